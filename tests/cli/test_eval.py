"""`meshwright eval needle`: what it prints and refuses."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.checkpoint import Checkpoints
from meshwright.cli.main import main
from meshwright.data import Needles, needle_sequences
from meshwright.models import model_to_dict, save_hf
from meshwright.models.decoder import DecoderConfig, abstract_arrays

CONFIG = DecoderConfig(258, 1, 16, 2, 2, 8, 32, max_seq=200)
SEQUENCES = ["--seq", "64", "--sequences", "5"]


def params_that_say_e() -> dict[str, object]:
    """Every token's hidden state is the same, and the head likes `e` best."""
    params = jax.tree.map(lambda spec: jnp.zeros(spec.shape), abstract_arrays(CONFIG))
    params["embedding"] = params["embedding"].at[:, 0].set(1.0)
    params["norm"] = jnp.ones(16)
    params["output"] = params["output"].at[0, ord("e")].set(1.0)
    return params


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a run whose model always says `e`."""
    folder = tmp_path_factory.mktemp("run")
    with Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(7, {"params": params_that_say_e()}, {}, wait=True)
    (folder / "config.json").write_text(json.dumps({"model_config": model_to_dict(CONFIG)}))
    (folder / "tokenizer_state.json").write_text('{"kind": "bytes"}')
    return str(folder)


def right_by_chance() -> int:
    """How many of the answers that the command asks for are `e`."""
    count = int(np.sum(needle_sequences(Needles(), 5, 64, fresh=True).answers == ord("e")))
    assert 0 < count < 20
    return count


def test_it_counts_by_depth_and_by_distance(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["eval", "needle", run, *SEQUENCES, "--depths", "4", "--mesh", "fsdp=2,sp=2"])
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0].split() == ["needle", "position", "asked", "found", "%"]
    assert any(line.startswith("distance to the answer") for line in lines)
    assert "16 to 31" in printed.out
    right = right_by_chance()
    assert lines[-1] == f"found {right} of 20: {5 * right:.1f}% (5 sequences of 64 tokens)"
    assert printed.err.startswith(f"step 7 of {run}, mesh fsdp=2,sp=2,dp=1,tp=1 on 4 devices of 16")
    assert "context parallelism over sp: " in printed.err


def test_json_is_plain_data(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["eval", "needle", run, *SEQUENCES, "--json"])
    data = json.loads(capsys.readouterr().out)
    assert (data["sequences"], data["seq"], data["asked"]) == (5, 64, 20)
    assert data["right"] == right_by_chance()
    assert data["share"] == data["right"] / 20
    for groups in (data["by_depth"], data["by_distance"]):
        assert sum(group["asked"] for group in groups) == 20
        assert sum(group["right"] for group in groups) == data["right"]


def test_a_hugging_face_folder_is_asked_as_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(save_hf(tmp_path / "hf", params_that_say_e(), CONFIG, dtype=jnp.float32))
    main(["eval", "needle", folder, *SEQUENCES, "--tokenizer", "bytes", "--json"])
    assert json.loads(capsys.readouterr().out)["right"] == right_by_chance()
    with pytest.raises(SystemExit):
        main(["eval", "needle", folder, *SEQUENCES])
    assert "no tokenizer.json; name one with --tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seq", "40"], ["seq=40 is too short", "or more"]),
        (["--seq", "208"], ["seq=208 is longer than the model allows; use 200"]),
        (["--sequences", "0"], ["sequences=0 leaves nothing to ask"]),
        (["--depths", "0"], ["--depths 0"]),
        (["--needles", "11"], ["key_length=1; give a longer key"]),
        (["--questions", "5"], ["questions=5 with needles=4"]),
        (["--seq", "66", "--mesh", "sp=4", "--context-parallel", "ring"], ["64 or 72 would fit"]),
        (["--mesh", "tp=4"], ["tp=4 does not divide the model's kv_heads=2"]),
        (["--mesh", "sq=2"], ["axis 'sq'"]),
        (["--step", "8"], ["no checkpoint of step 8"]),
        (["--cpu-devices", "4"], ["--cpu-devices 4 comes too late"]),
    ],
)
def test_mistakes_are_one_readable_message_and_status_2(
    run: str, arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["eval", "needle", run, *arguments])
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert not printed.out
    for word in words:
        assert word in printed.err


def test_an_unknown_flag_or_folder_is_said(
    tmp_path: Path, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, words in (
        ([run, "--depth", "4"], "--depths"),
        ([str(tmp_path / "nowhere")], "does not exist; give the folder of a run"),
        ([str(tmp_path)], "holds no config.json"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["eval", "needle", *arguments])
        assert stopped.value.code == 2
        assert words in capsys.readouterr().err
