"""Names on the Hugging Face Hub: the real huggingface_hub against a server on this machine."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.forked import shared_commands
from tests.hub.server import Hub, commit, running
from tests.processes import SEVERAL_COMMANDS, Ended

from meshwright.data import TokenStore
from meshwright.hub import CONFIG, HubName, hub_name, local_folder, name_of_snapshot

QWEN = Path(__file__).parents[1] / "models/hf_reference/qwen2.5-tied"
TOKENIZER = {
    "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
    "post_processor": None, "decoder": None, "pre_tokenizer": {"type": "Whitespace"},
    "added_tokens": [
        {"id": 0, "content": "</s>", "special": True, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False}
    ],
    "model": {"type": "WordLevel", "vocab": {"</s>": 0, "a": 1, "b": 2}, "unk_token": "a"},
}  # fmt: skip
GENERATE = ("generate", "org/tiny", "--prompt", "a b", "--max-new", "4", "--temperature", "0")
PLAN = ("plan", "org/tiny", "--on", "cpu:1", "--batch", "1", "--seq", "8")
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
def run(hub: Hub, tmp_path: Path) -> Run:
    """Runs commands of meshwright in a process whose Hub is that server."""

    def run(*commands: tuple[str, ...], **environment: str) -> list[Ended]:
        said, out = tmp_path / "said", tmp_path / "ended.json"
        settings = {
            "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0",
            "HF_TOKEN": "", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1", **environment,
        }  # fmt: skip
        code = shared_commands().run_script(
            SEVERAL_COMMANDS, [json.dumps(commands), str(out)], said, settings
        )
        assert code == 0, said.read_text()
        return [Ended(*ended) for ended in json.loads(out.read_text())]

    return run


def test_a_model_is_downloaded_once_and_only_what_is_needed(
    hub: Hub, run: Run, tmp_path: Path
) -> None:
    (planned,) = run(PLAN)
    assert planned.code == 0, planned.err
    assert (
        f"downloading org/tiny ({commit('org/tiny/main')[:8]}): 1 file, 663 B, to " in planned.err
    )
    assert hub.gets == {"config.json": 1}
    (generated,) = run(GENERATE)
    assert generated.code == 0, generated.err
    assert "2 files, " in generated.err
    assert hub.gets == {"config.json": 1, "model.safetensors": 1, "tokenizer.json": 1}
    hub.requests.clear()
    again, local = run(
        GENERATE, (GENERATE[0], str(hub.root / "models/org/tiny/main"), *GENERATE[2:])
    )
    assert again.out == generated.out == local.out
    assert "downloading" not in again.err
    # whether main has moved, and nothing else
    assert hub.requests == {"GET /api/models/org/tiny": 1}


def test_without_a_network_the_cache_is_used_or_its_lack_told(hub: Hub, run: Run) -> None:
    (ended,) = run(GENERATE, HF_HUB_OFFLINE="1")
    assert ended.code == 2
    assert (
        "HF_HUB_OFFLINE forbids downloads; unset it, or where there is a network: hf download org/tiny --local-dir DIR, then give ./DIR"
        in ended.err
    )
    (ended,) = run(GENERATE, HF_ENDPOINT="http://127.0.0.1:9")
    assert ended.code == 2
    assert "the Hugging Face Hub cannot be reached (" in ended.err
    (online, planned) = run(GENERATE, PLAN)
    assert online.code == planned.code == 0
    hub.requests.clear()
    (offline, other) = run(GENERATE, ("generate", "org/tiny@v1", *GENERATE[2:]), HF_HUB_OFFLINE="1")
    assert (offline.code, offline.out) == (0, online.out)
    assert other.code == 2
    assert not hub.requests
    (unreachable,) = run(GENERATE, HF_ENDPOINT="http://127.0.0.1:9")
    assert (unreachable.code, unreachable.out) == (0, online.out)


def test_a_revision_is_that_revision(hub: Hub, run: Run) -> None:
    there = ("plan", "org/tiny@v1", *PLAN[2:-1], "200")
    pinned = ("plan", f"org/tiny@{commit('org/tiny/v1')}", *PLAN[2:])
    missing = ("plan", "org/tiny@v9", *PLAN[2:])
    too_long, ended, absent = run(there, pinned, missing)
    assert "128" in too_long.out
    assert ended.code == 0, ended.err
    assert "'org/tiny' on the Hub has no revision 'v9'" in absent.err
    assert hub.gets == {"config.json": 1}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("org/token", "the Hub refuses the token for 'org/token' (401): log in with `hf auth login`, or set HF_TOKEN to another one"),
        ("org/absent", "is neither a folder here nor a model on the Hugging Face Hub"),
        ("org/tinny", "on the Hugging Face Hub (did you mean 'org/tiny'?); if it is private, log in with `hf auth login`, or set HF_TOKEN"),
        ("org/gated", "'org/gated' is gated: accept its terms at http://127.0.0.1:"),
        ("runs/first.json", "runs/first.json does not exist; give the folder of a run"),
        ("a/b/c", "a/b/c does not exist"),
    ],
)  # fmt: skip
def test_what_the_hub_refuses_is_one_line(run: Run, name: str, says: str) -> None:
    (ended,) = run(("generate", name, "--prompt", "a"))
    assert ended.code == 2
    assert says in ended.err
    assert ended.err.count("\n") == 1


def test_a_transfer_that_breaks_is_resumed_and_wrong_bytes_are_refused(
    hub: Hub, run: Run, tmp_path: Path
) -> None:
    hub.breaks.add("model.safetensors")
    hub.damaged.add("tokenizer.json")
    (ended,) = run(GENERATE)
    assert ended.code == 2
    assert (
        "tokenizer.json of 'org/tiny' came with another checksum than the Hub names, and was deleted; run"
        in ended.err
    )
    assert hub.gets["model.safetensors"] == 2
    hub.damaged.clear()
    (ended,) = run(GENERATE)
    assert ended.code == 0, ended.err
    assert hub.gets == {"config.json": 1, "model.safetensors": 2, "tokenizer.json": 2}


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
    # main has moved: the same command is refused, that of the commit resumes
    weights = hub.root / "models/org/tiny/main/model.safetensors"
    shutil.move(weights.parent, weights.parents[1] / "old")
    shutil.copytree(weights.parents[1] / "old", weights.parent)


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
    (tmp_path / "org/name").mkdir(parents=True)
    assert hub_name("org/name") is None
    assert local_folder("org/name", CONFIG) == Path("org/name")
    snapshot = Path("/cache/models--org--a--b/snapshots", "0" * 40)
    assert name_of_snapshot(snapshot) == HubName("org/a--b", "0" * 40)
    assert name_of_snapshot(tmp_path) is None
