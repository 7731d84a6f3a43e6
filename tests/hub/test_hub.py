"""Names on the Hugging Face Hub: the real huggingface_hub against a server on this machine."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from tests.forked import shared_commands
from tests.hub.server import Hub, commit, running
from tests.processes import SEVERAL_COMMANDS, Ended
from tests.word_tokenizer import word_tokenizer

from meshwright.data import TokenStore
from meshwright.hub import CONFIG, HubName, hub_name, local_folder, name_of_snapshot
from meshwright.models import (
    ADAPTER,
    LoraConfig,
    abstract_arrays,
    from_hf_config,
    save_adapter,
    with_adapter,
)
from meshwright.training import TrainConfig, weights_folder

QWEN = Path(__file__).parents[1] / "models/hf_reference/qwen2.5-tied"
TOKENIZER = word_tokenizer({"</s>": 0, "a": 1, "b": 2}, special=["</s>"])
NAME = "org/tiny"
GENERATE = ("generate", NAME, "--prompt", "a b", "--max-new", "4", "--temperature", "0")
PLAN = ("plan", NAME, "--on", "cpu:1", "--batch", "1", "--seq", "8")


def folder_of(ended: Ended) -> Path:
    """The folder that the error of LOOK names; nothing else is printed."""
    start, _, rest = ended.err.removeprefix("error: ").partition(" is a Hugging Face folder, which")
    assert rest.count("\n") == 1, ended.err
    assert not ended.out
    return Path(start)


LOOK = ("generate", NAME, "--prompt", "a", "--step", "1")  # ends when all files are there
Run = Callable[..., list[Ended]]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """One model in two revisions, and a dataset with two splits."""
    repo = tmp_path / "served/models/org/tiny"
    for revision in ("main", "v1"):
        folder = repo / revision
        (folder / "original").mkdir(parents=True)
        (folder / "onnx").mkdir()
        for file in ("config.json", "model.safetensors"):
            shutil.copy(QWEN / file, folder / file)
        (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
        for other in (
            "pytorch_model.bin",
            "original/model.safetensors",
            "onnx/model.onnx",
            "README.md",
        ):
            (folder / other).write_text(revision)
        (folder / "consolidated.safetensors").write_text("another copy of the weights")
    fields = json.loads((repo / "v1/config.json").read_text())
    (repo / "v1/config.json").write_text(json.dumps(fields | {"max_position_embeddings": 128}))
    data = tmp_path / "served/datasets/org/stories/main"
    data.mkdir(parents=True)
    (data / "README.md").write_text("about")
    (data / "train.jsonl").write_text('{"text": "a b"}\n{"text": "b a b"}\n')
    (data / "test.jsonl").write_text('{"text": "b"}\n')
    with running(tmp_path / "served") as server:
        yield server


@pytest.fixture
def environment(hub: Hub, tmp_path: Path) -> dict[str, str]:
    return {
        "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0", "HF_TOKEN": "",
        "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1",
    }  # fmt: skip


@pytest.fixture
def run(environment: dict[str, str], tmp_path: Path) -> Run:
    """Runs commands of meshwright in a process whose Hub is that server."""

    def run(*commands: tuple[str, ...], **changes: str) -> list[Ended]:
        said, out = tmp_path / "said", tmp_path / "ended.json"
        code = shared_commands().run_script(
            SEVERAL_COMMANDS, [json.dumps(commands), str(out)], said, environment | changes
        )
        assert code == 0, said.read_text()
        return [Ended(*ended) for ended in json.loads(out.read_text())]

    return run


def test_a_model_is_downloaded_once_and_only_what_is_needed(
    hub: Hub, run: Run, tmp_path: Path
) -> None:
    (planned,) = run(PLAN)
    assert planned.code == 0, planned.err
    main = commit("org/tiny/main")
    assert f"downloading org/tiny ({main[:8]}): 1 file, 663 B, to {tmp_path}" in planned.err
    assert hub.gets == {"config.json": 1}
    local = str(hub.root / "models/org/tiny/main")
    generated, same = run(GENERATE, (GENERATE[0], local, *GENERATE[2:]))
    assert generated.code == 0, generated.err
    assert generated.out == same.out
    assert "downloading org/tiny" in generated.err
    assert ": 2 files, " in generated.err
    assert hub.gets == {"config.json": 1, "model.safetensors": 1, "tokenizer.json": 1}
    hub.requests.clear()
    (again,) = run(LOOK)
    assert folder_of(again) == tmp_path / "home/hub/models--org--tiny/snapshots" / main
    # whether main has moved, and nothing else; a commit cannot move
    assert hub.requests == {"GET /api/models/org/tiny": 1}
    (by_commit,) = run((LOOK[0], f"org/tiny@{main}", *LOOK[2:]))
    assert folder_of(by_commit) == folder_of(again)
    assert hub.requests.total() == 1


def test_without_a_network_the_cache_is_used_or_its_lack_told(hub: Hub, run: Run) -> None:
    (ended,) = run(PLAN, HF_HUB_OFFLINE="1")
    assert ended.code == 2
    by_hand = "hf download org/tiny --local-dir DIR, then give ./DIR"
    assert (
        f"HF_HUB_OFFLINE forbids downloads; unset it, or where there is a network: {by_hand}"
        in (ended.err)
    )
    nowhere = "http://127.0.0.1:9"
    (ended,) = run(PLAN, HF_ENDPOINT=nowhere)
    assert ended.code == 2
    assert "the Hugging Face Hub cannot be reached (" in ended.err
    assert f"where there is a network: {by_hand}" in ended.err
    assert run(LOOK)[0].code == 2
    hub.requests.clear()
    (offline,) = run(LOOK, HF_HUB_OFFLINE="1")
    assert folder_of(offline).name == commit("org/tiny/main")
    assert not hub.requests
    # other libraries fill the cache without a list of the repository's files
    shutil.rmtree(folder_of(offline).parents[1] / "trees")
    (listed,) = run(LOOK, HF_HUB_OFFLINE="1")
    assert folder_of(listed) == folder_of(offline)
    (unreachable,) = run(LOOK, HF_ENDPOINT=nowhere)
    assert str(folder_of(offline)) in unreachable.err
    (partly,) = run(("plan", "org/tiny@v1", *PLAN[2:]))
    assert partly.code == 0, partly.err
    (ended,) = run(("generate", "org/tiny@v1", "--prompt", "a"), HF_HUB_OFFLINE="1")
    assert "not all of it is in the cache of the Hugging Face Hub" in ended.err


def test_processes_that_start_together_download_once(
    hub: Hub, environment: dict[str, str], tmp_path: Path
) -> None:
    code = f"from meshwright.hub import MODEL, local_folder; print(local_folder({NAME!r}, MODEL))"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=os.environ | environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for _ in range(3)
    ]  # fmt: skip
    ended = [process.communicate() for process in processes]
    assert len({out for out, _ in ended}) == 1, ended
    assert all(process.returncode == 0 for process in processes)
    assert hub.gets == {"config.json": 1, "model.safetensors": 1, "tokenizer.json": 1}


def test_a_revision_is_that_revision(hub: Hub, run: Run) -> None:
    there = ("plan", "org/tiny@v1", *PLAN[2:], "--json")
    missing = ("plan", "org/tiny@v9", *PLAN[2:])
    ended, absent = run(there, missing)
    assert json.loads(ended.out)["model"]["max_seq"] == 128
    assert "'org/tiny' on the Hub has no revision 'v9'; see http://127.0.0.1:" in absent.err


def test_a_model_that_is_not_in_safetensors_is_refused(hub: Hub, run: Run) -> None:
    (hub.root / "models/org/tiny/v1/model.safetensors").unlink()
    (hub.root / "models/org/tiny/v1/tokenizer.json").unlink()
    (ended,) = run(("train", "org/tiny@v1", "--steps", "1"))
    assert ended.code == 2
    assert "'org/tiny@v1' on the Hub has no weights in safetensors files; it has " in ended.err
    assert not hub.gets


def test_without_huggingface_hub_the_error_says_how_to_install_it(run: Run) -> None:
    block = ("[python]", "import sys; sys.modules['huggingface_hub'] = None")
    (ended,) = run(block, PLAN)
    assert ended.code == 2
    assert (
        "need huggingface_hub, which is not installed: pip install -e '.[hub]' (in the" in ended.err
    )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("org/token", "the Hub refuses the token for 'org/token' (401): log in with `hf auth login`, or set HF_TOKEN to another one"),
        ("org/absent", "is neither a folder here nor a model on the Hugging Face Hub"),
        ("org/tinny", "on the Hugging Face Hub (did you mean 'org/tiny'?); if it is private, log in with `hf auth login`, or set HF_TOKEN"),
        ("runs/first", "runs/first does not exist; give the folder of a run"),
        ("a/b/c", "a/b/c does not exist"),
    ],
)  # fmt: skip
def test_what_the_hub_refuses_is_one_line(run: Run, name: str, says: str) -> None:
    (ended,) = run(("generate", name, "--prompt", "a"))
    assert ended.code == 2
    assert says in ended.err
    assert ended.err.count("\n") == 1


def test_a_gated_model_says_where_to_accept_its_terms(hub: Hub, run: Run) -> None:
    """Its files are listed for everyone, and refused."""
    (hub.root / "models/org/tiny").rename(hub.root / "models/org/gated")
    (ended,) = run(("generate", "org/gated", "--prompt", "a"))
    assert ended.code == 2
    where = f"{hub.url}/org/gated, and log in with `hf auth login`, or set HF_TOKEN"
    assert ended.err.endswith(f"error: 'org/gated' is gated: accept its terms at {where}\n")


def test_a_transfer_that_breaks_is_resumed_and_wrong_bytes_are_refused(hub: Hub, run: Run) -> None:
    hub.breaks.add("model.safetensors")
    hub.damaged.add("tokenizer.json")
    (ended,) = run(("generate", NAME, "--prompt", "a"))
    assert ended.code == 2
    damaged = "tokenizer.json of 'org/tiny' came with another checksum than the Hub names, and was deleted"
    assert f"{damaged}; run the command again" in ended.err
    assert hub.gets["model.safetensors"] == 2
    hub.damaged.clear()
    hub.short.add("tokenizer.json")
    (ended,) = run(LOOK)
    assert (
        "the download of 'org/tiny' failed (Consistency check failed: file should be of size"
        in ended.err
    )
    assert (
        "run the command again, files that are complete are kept; or download by hand: hf"
        in ended.err
    )
    hub.short.clear()
    run(LOOK)
    (ended,) = run(LOOK)
    assert hub.gets == {"config.json": 1, "model.safetensors": 2, "tokenizer.json": 3}
    served = hub.root / "models/org/tiny/main"
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (folder_of(ended) / file).read_bytes() == (served / file).read_bytes()


def test_of_a_dataset_the_split_is_downloaded(hub: Hub, run: Run, tmp_path: Path) -> None:
    pack = (
        "data",
        "pack",
        "org/stories",
        "--tokenizer",
        "org/tiny",
        "--out",
        str(tmp_path / "s.store"),
    )
    asked, packed = run(pack, (*pack, "--split", "train"))
    assert asked.code == 2
    assert (
        "data 'org/stories' holds several splits: test (1 file: test.jsonl), train (1 file: train.jsonl); choose one, as in --split train"
        in asked.err
    )
    assert packed.code == 0, packed.err
    assert hub.gets == {"tokenizer.json": 1, "train.jsonl": 1}
    store = TokenStore.open(tmp_path / "s.store")
    assert store.tokens[:].tolist() == [1, 2, 0, 2, 1, 2, 0]
    assert store.meta["sources"] == [
        {"path": f"org/stories@{commit('org/stories/main')}", "documents": 2}
    ]
    (absent,) = run(("data", "pack", "org/nothing", "--out", str(tmp_path / "n.store")))
    assert "nor a dataset on the Hugging Face Hub" in absent.err


def test_a_dataset_is_packed_on_first_use(hub: Hub, run: Run, tmp_path: Path) -> None:
    name = f"org/stories@{commit('org/stories/main')}"
    work = tmp_path / "work"
    work.mkdir()
    code = f"""
import os
os.chdir({str(work)!r})
from meshwright.training import TrainConfig
from meshwright.training.setup import mixture_of, with_commits
config = with_commits(TrainConfig({NAME!r}, data="org/stories:2,embedded:1"))
assert config.data == "{name}:2,embedded:1", config.data
[store] = mixture_of(with_commits(TrainConfig({NAME!r}, data="org/stories"))).stores
assert store.tokens[:].tolist() == [1, 2, 0, 2, 1, 2, 0]  # of its train split
assert mixture_of(TrainConfig({NAME!r}, data="{name}")).stores[0].path == store.path
"""
    (wrong,) = run(("[python]", code), ("eval", NAME, "--data", "org/stories"))
    assert hub.gets["train.jsonl"] == 1
    assert "test.jsonl" not in hub.gets
    [store] = work.iterdir()
    assert store.name.startswith("stories.")
    said = (tmp_path / "said").read_text()
    assert f"packed {name} (train.jsonl) on first use, into {store.name} here: 2 doc" in said
    assert "pack the split to evaluate on: meshwright data pack org/stories --split" in wrong.err
    (hub.root / "datasets/org/stories/main/train.jsonl").rename(
        hub.root / "datasets/org/stories/main/val.jsonl"
    )
    hub.commits[hub.root / "datasets/org/stories/main"] = commit("another")
    (asked,) = run(("train", NAME, "--data", "org/stories", "--seq", "16"))
    assert asked.code == 2
    assert "holds several splits: test (1 file: test.jsonl), validation (1" in asked.err
    assert "is packed on first use; to train with --data stories.store" in asked.err


def test_an_adapter_is_named_like_a_model(hub: Hub, run: Run, tmp_path: Path) -> None:
    config, lora = from_hf_config(QWEN), LoraConfig(2)
    arrays = with_adapter(abstract_arrays(config), lora, np.float32)
    random = np.random.default_rng(0)
    factors = jax.tree.map(lambda spec: random.normal(size=spec.shape).astype("f"), arrays)
    served = hub.root / "models/org/adapter/main"
    save_adapter(served, {ADAPTER: factors[ADAPTER]}, config, lora, NAME)
    (served / "README.md").write_text("about")
    code = f"""
from meshwright.serving import model_source, with_adapters
for source in (model_source({NAME!r}, adapter="org/adapter"), model_source("org/adapter")):
    assert source.adapter.lora.rank == 2
    assert source.adapter.folder.name == {commit("org/adapter/main")!r}
    assert {commit("org/tiny/main")!r} in source.name
beside = with_adapters(model_source({NAME!r}), {{"one": "org/adapter"}})
assert beside.adapters["one"].folder == source.adapter.folder
"""
    (no_adapter,) = run(
        ("[python]", code), ("generate", NAME, "--prompt", "a", "--adapter", "org/tiny@v1")
    )
    assert hub.gets["adapter_model.safetensors"] == hub.gets["adapter_config.json"] == 1
    assert hub.gets["model.safetensors"] == 1
    assert "README.md" not in hub.gets
    assert "'org/tiny@v1' on the Hub has no adapter of PEFT (adapter_config.json)" in no_adapter.err


def test_settings_name_the_commit_of_the_weights(run: Run) -> None:
    name = f"org/tiny@{commit('org/tiny/main')}"
    code = f"""
from meshwright.training import TrainConfig, weights_folder, with_commits
config = with_commits(TrainConfig({NAME!r}))
assert config.model == {name!r}, config
assert weights_folder(config).name == {commit("org/tiny/main")!r}
assert str(with_commits(TrainConfig("tiny", init_from={NAME!r})).init_from) == {name!r}
assert with_commits(TrainConfig("tiny")) == TrainConfig("tiny")
"""
    assert not run(("[python]", code))


@pytest.mark.slow
def test_a_run_starts_from_the_weights_and_keeps_to_their_commit(
    hub: Hub, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("a b " * 2000)
    store, folder = str(tmp_path / "a.store"), tmp_path / "run"
    pack = ("data", "pack", str(tmp_path / "a.txt"), "--tokenizer", "org/tiny", "--out", store)
    train = ("train", "org/tiny", "--data", store, "--batch", "2", "--seq", "16", "--steps", "2")
    lora = ("--lora.rank", "2", "--stop-at", "1", "--run", str(folder))
    packed, trained = run(pack, (*train, *lora))
    assert packed.code == trained.code == 0, packed.err + trained.err
    name = f"org/tiny@{commit('org/tiny/main')}"
    assert trained.out.startswith(f"{name} on mesh")
    assert f"snapshots/{commit('org/tiny/main')}" in trained.out
    assert json.loads((folder / "config.json").read_text())["model"] == name
    # main moves: the same command is refused, that of the commit resumes
    served = hub.root / "models/org/tiny"
    (served / "main").rename(served / "kept")
    shutil.copytree(served / "kept", served / "main")
    weights = bytearray((served / "main/model.safetensors").read_bytes())
    weights[-1] ^= 1
    (served / "main/model.safetensors").write_bytes(weights)
    hub.commits[served / "main"] = commit("a newer one")
    hub.commits[served / "kept"] = commit("org/tiny/main")
    rest = ("--lora.rank", "2", "--run", str(folder))
    (moved,) = run((*train, *rest))
    assert moved.code == 2
    assert "is an adapter of the weights that were in " in moved.err
    (resumed,) = run(("train", "--config", str(folder / "config.json"), "--stop-at", "2"))
    assert resumed.code == 0, resumed.err
    assert "resuming from step 1" in resumed.out
    # without the cache, the adapter's weights come from the Hub again, of the same commit
    shutil.rmtree(tmp_path / "home")
    hub.gets.clear()
    exported = ("export", str(folder), str(tmp_path / "adapter"))
    generated, written = run(("generate", str(folder), *GENERATE[2:]), exported)
    assert generated.code == written.code == 0, generated.err + written.err
    assert hub.gets["model.safetensors"] == 1
    adapter = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == NAME
    assert f"{NAME}@{adapter['revision']}" == name


def test_a_name_is_not_a_path_and_a_folder_here_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_name("org/name") == HubName("org/name")
    assert hub_name("org/name.v2@refs/pr/1") == HubName("org/name.v2", "refs/pr/1")
    for path in (
        "name",
        "./org/name",
        "/org/name",
        "~/name",
        "org/name/x",
        "org/x.jsonl",
        "org/",
        "@/x",
    ):
        assert hub_name(path) is None, path
    assert hub_name(Path("./org/name")) is None  # pathlib drops the ./
    missing = TrainConfig("tiny", init_from="./org/name")
    assert weights_folder(missing) == Path("org/name")
    (tmp_path / "org/name").mkdir(parents=True)
    assert hub_name("org/name") is None
    assert local_folder("org/name", CONFIG) == Path("org/name")
    snapshot = Path("/cache/models--org--a--b/snapshots", "0" * 40)
    assert name_of_snapshot(snapshot) == HubName("org/a--b", "0" * 40)
    assert name_of_snapshot(tmp_path) is None
