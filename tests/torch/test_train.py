"""`meshwright train --backend torch`: the losses of JAX, and runs that change the backend."""

import contextlib
import datetime
import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tests.patience import PATIENCE_S

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import torch.distributed as dist
from tests.forked import Commands
from tests.torch.models import tiny

from meshwright.checkpoint import folders
from meshwright.cli.main import main
from meshwright.errors import MeshwrightError
from meshwright.serving import generation_mesh, load_weights, model_source
from meshwright.torch import checkpoint
from meshwright.torch.train import train
from meshwright.torch.train.backend import on_meta
from meshwright.torch.train.batch import model_inputs
from meshwright.torch.train.settings import check_settings
from meshwright.torch.train.store import TorchrunStore
from meshwright.training import TorchConfig, TrainConfig, with_settings
from meshwright.training.config import EvalConfig


def test_a_model_has_no_dropout_in_training_and_evaluation() -> None:
    fields = tiny("granite").config.to_dict() | {"attention_dropout": 0.3}
    network = on_meta(fields, torch.float32)
    assert network.config.attention_dropout == 0.3
    assert not any(module.training for module in network.modules())


SIZES = ["--steps", "9", "--batch", "8", "--seq", "64", "--accumulation", "2"]
SIZES += ["--eval.sequences", "6", "--eval.every", "100", "--optimizer.learning-rate", "3e-3"]
TORCH = ["--backend", "torch", "--processes", "2"]


QUIET = {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "JAX_PLATFORMS": "cpu"}


def losses(run: Path) -> dict[tuple[int, str], float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = ("loss", "eval_loss", "grad_norm", "tokens", "keys_seen")
    return {(row["step"], name): row[name] for row in rows for name in names if name in row}


@pytest.mark.slow  # tests/torch/test_lora.py and test_exchange.py have quick ones
@pytest.mark.parametrize("kind", ["mistral"])  # its window must hold within documents
def test_a_run_goes_from_torch_to_jax_and_back(kind: str, tmp_path: Path) -> None:
    weights = str(tmp_path / "weights")
    tiny(kind, vocab_size=385, sliding_window=24).save_pretrained(weights)  # tp does not divide it
    start = [weights, "--init-from", weights, *SIZES]
    plain, mixed = tmp_path / "plain", tmp_path / "mixed"
    other = ["--optimizer.weight-decay", "0.5", "--optimizer.b2", "0.9"]
    parts = [
        (plain, ["--stop-at", "6"]),
        (plain, other),
        (mixed, [*TORCH, "--mesh", "dp=1,tp=2", "--stop-at", "3", "--compute.sequence-parallel",
                 "--compute.remat", "full"]),
        (mixed, ["--stop-at", "6"]),
        (mixed, [*TORCH, "--mesh", "dp=2,fsdp=1", *other]),  # weights are the same on both
    ]  # fmt: skip
    with contextlib.closing(Commands(os.environ | QUIET)) as commands:
        for run, flags in parts:
            said = tmp_path / "said"
            code = commands.run(["train", *start, "--run", str(run), *flags], said)
            assert code == 0, said.read_text()[-3000:]
    wanted, found = losses(plain), losses(mixed)
    assert found.keys() >= wanted.keys()
    for key, value in wanted.items():
        assert found[key] == pytest.approx(value, rel=2e-5), key
    # the server and `generate` read what PyTorch saved
    trees = [load_weights(model_source(run), generation_mesh()).params for run in (plain, mixed)]
    for one, other in zip(*map(jax.tree.leaves, trees), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-4)


def test_a_run_ends_well_if_an_older_checkpoint_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(folder: Path, step: int) -> None:
        raise PermissionError("not allowed")

    monkeypatch.setattr(folders, "delete", refuse)
    config = TrainConfig("tiny", tmp_path, "torch", "dp=1", steps=4, batch=2, seq=16)
    train(with_settings(config, {"checkpoint.every": 1, "checkpoint.keep_last": 1}))
    assert folders.complete_steps(tmp_path / "checkpoints") == [1, 2, 3, 4]
    assert folders.healthy_steps(tmp_path / "checkpoints") == [1, 2, 3]
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert said == [
        f"warning: step {step} is saved, but step 1 cannot be deleted: not allowed"
        for step in (3, 4)
    ]


def test_a_run_whose_folder_was_replaced_ends_and_changes_nothing_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, write = tmp_path / "run", checkpoint._write

    def replacing(file: Path, values: dict[str, torch.Tensor]) -> None:
        write(file, values)
        if file.parent.name == ".saving-00000002":
            shutil.rmtree(run)
            file.parent.mkdir(parents=True)
            (run / "checkpoints" / "step-00000001").mkdir()

    monkeypatch.setattr(checkpoint, "_write", replacing)
    config = TrainConfig("tiny", run, "torch", "dp=1", steps=4, batch=2, seq=16)
    settings = {"checkpoint.every": 1, "checkpoint.keep_last": 1}
    try:
        with pytest.raises(MeshwrightError, match=r"^the run's folder .* was deleted or moved"):
            train(with_settings(config, settings))
    finally:
        dist.destroy_process_group()
    left = sorted(path.name for path in run.rglob("*"))
    assert left == [".saving-00000002", "checkpoints", "step-00000001"]
    assert "warning" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"cpu_devices": 2}, "--cpu-devices 2 is a setting of the JAX backend"),
        (
            {"eval": EvalConfig(sequences=4, prompts=("The",))},
            "--eval.prompts ('The',) is a setting of the JAX backend",
        ),
        ({"submesh": "2,1,1,1"}, "--submesh 2,1,1,1 is a setting of the JAX backend"),
        ({"rules": "t5x:1,1"}, "--rules t5x:1,1 are rules for JAX arrays"),
        ({"model": "t5-tiny"}, "t5-tiny is not a dense decoder"),
        ({"seq": 10**6}, "is longer than the model allows"),
        ({"rules": "nofile"}, "nor a file that can be read"),
    ],
)
def test_settings_that_torch_does_not_have_are_refused(changes: Any, says: str) -> None:
    with pytest.raises(MeshwrightError) as error:
        check_settings(TrainConfig(**{"model": "tiny", "backend": "torch"} | changes))
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--mesh", "dp=2,tp=2"], "needs 4 processes, and this one was started alone"),
        (["--optimizer.name", "lion"], "with --backend torch the optimizer is adamw"),
        (["--batch", "3", "--accumulation", "2"], "batch=2 or 4 would fit"),
    ],
)
def test_a_mistake_is_told_in_one_line(
    flags: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", "tiny", "--backend", "torch", "--run", str(tmp_path / "run"), *flags])
    assert end.value.code == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("error: ")
    assert says in said[0]


def test_settings_of_torch_need_its_backend() -> None:
    with pytest.raises(MeshwrightError, match="belong to --backend torch"):
        TrainConfig("tiny", torch=TorchConfig(compile="off"))


def test_the_store_of_torchrun_holds_text_by_key() -> None:
    served = dist.TCPStore(
        "127.0.0.1",
        0,
        is_master=True,
        timeout=datetime.timedelta(seconds=PATIENCE_S),
        wait_for_workers=False,
    )
    store = TorchrunStore(served.clone())
    assert store.get("run/a") is None
    assert store.get_all("run/") == {}
    store.put("run/a", "1")
    store.put("run/a", "2")
    store.put("other", "…")
    assert store.put_once("run/b", "first") == "first"
    assert store.put_once("run/b", "second") == "first"
    assert store.get_all("run/") == {"run/a": "2", "run/b": "first"}
    assert store.get("other") == "…"


@pytest.mark.parametrize("window", [None, 3])
def test_documents_do_not_see_each_other(window: int | None) -> None:
    segments = np.array([[1, 1, 1, 1, 2, 2], [1, 1, 1, 1, 1, 1]], np.int32)
    positions = np.array([[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 5]], np.int32)
    batch = {"tokens": positions, "segments": segments, "positions": positions}
    found = model_inputs(batch, window, torch.device("cpu"))
    assert found["position_ids"].tolist() == positions.tolist()
    for row in range(2):
        for query in range(6):
            for key in range(6):
                seen = segments[row, query] == segments[row, key] and key <= query
                seen = seen and (window is None or query - key < window)
                assert found["attention_mask"][row, 0, query, key] == seen


def test_one_document_in_a_sequence_needs_no_mask() -> None:
    ones = np.ones((2, 6), np.int32)
    batch = {"tokens": ones, "segments": ones, "positions": ones}
    assert set(model_inputs(batch, None, torch.device("cpu"))) == {"input_ids", "use_cache"}
    assert "attention_mask" in model_inputs(batch, 3, torch.device("cpu"))
