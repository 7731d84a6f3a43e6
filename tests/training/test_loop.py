"""Runs through the command line's own entry, in their own processes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tests.forked import Commands
from tests.patience import PATIENCE_S, eventually
from tests.processes import free_port
from tests.training.conftest import TrainCommand

from meshwright.checkpoint import Checkpoints
from meshwright.training.run import only_run_in, read_metrics

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
SETTINGS = ["--batch", "8", "--seq", "32", "--steps", "12", "--optimizer.warmup-steps", "2"]


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return str(tmp_path / "config.json")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "meshwright.cli.main", "train", *arguments]


def losses(run: Path) -> list[float]:
    steps, values = read_metrics(run).column("loss")
    assert steps == list(range(1, len(steps) + 1))
    return values


def parameters(run: Path, step: int) -> dict[str, Any]:
    """Every array of a checkpoint's parameters and moments."""
    checkpoints = Checkpoints(run / "checkpoints")
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    targets: dict[str, Any] = {}
    for name, array in checkpoints.arrays(step).items():
        *path, last = name.split("/")
        node = targets
        for part in path:
            node = node.setdefault(part, {})
        node[last] = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=one)
    leaves, _ = jax.tree_util.tree_flatten_with_path(checkpoints.restore(step, targets))
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in leaves
    }


def test_a_stopped_run_resumes_bit_for_bit_and_on_another_mesh_within_rounding(
    train_command: TrainCommand, model: str, tmp_path: Path
) -> None:
    mesh = ["--cpu-devices", "4", "--mesh", "fsdp=2,tp=2"]
    through, stopped, moved = tmp_path / "through", tmp_path / "stopped", tmp_path / "moved"
    train_command(model, *SETTINGS, *mesh, "--run", str(through))
    same_again = model, *SETTINGS, *mesh, "--run", str(stopped), "--stop-at", "5"
    train_command(*same_again)
    assert "--stop-at 5 ends it there; leave that out to continue" in train_command(*same_again)
    shutil.copytree(stopped, moved)
    # a run's own settings continue it
    assert "resuming from step 5" in train_command("--config", str(stopped / "config.json"))
    other = ["--cpu-devices", "2", "--mesh", "dp=2"]
    train_command(model, *SETTINGS, *other, "--run", str(moved))
    assert losses(stopped) == losses(through)
    np.testing.assert_allclose(losses(moved), losses(through), rtol=1e-5)
    expected, same, near = (parameters(run, 12) for run in (through, stopped, moved))
    assert expected.keys() == same.keys() == near.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(same[name], array, err_msg=name)
        distance = np.linalg.norm((near[name] - array).astype(np.float64).ravel())
        size = np.linalg.norm(array.astype(np.float64).ravel())
        # moments of a few steps are sums of gradients near zero: judged less strictly
        assert distance <= (1e-5 if name.startswith("params") else 1e-3) * size, name


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")]
)
def test_a_signal_in_the_loop_saves_and_ends_with_zero(
    commands: Commands, number: signal.Signals, name: str, model: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    settings = ["--batch", "4", "--seq", "32", "--steps", "100000", "--run", str(run)]
    settings += ["--eval.sequences", "4", "--eval.every", "100000"]
    process = commands.start(["train", model, *settings, "--cpu-devices", "1"], tmp_path / "said")
    metrics = run / "metrics.jsonl"
    eventually(lambda: process.poll() is not None or (metrics.exists() and metrics.stat().st_size))
    assert process.poll() is None
    process.send_signal(number)
    eventually(lambda: process.poll() is not None)
    assert process.poll() == 0
    out = process.said.read_text()
    steps, _ = read_metrics(run).column("loss")
    assert f"saved step {steps[-1]} ({name})" in out
    assert Checkpoints(run / "checkpoints").latest() == steps[-1]
    assert "eval loss" not in out, "who sends a signal does not wait for long"
    assert "finished</span>" not in (page := (run / "run.html").read_text())
    assert f"stopped</span> step {steps[-1]:,} of 100,000: {name}" in page


@pytest.mark.slow
def test_two_processes_of_four_devices_train_as_one_of_eight(
    train_command: TrainCommand, model: str, tmp_path: Path
) -> None:
    mesh = ["--mesh", "dp=2,fsdp=2,tp=2"]
    alone, together = tmp_path / "alone", tmp_path / "together"
    train_command(model, *SETTINGS, *mesh, "--cpu-devices", "8", "--run", str(alone))
    arguments = [model, *SETTINGS, *mesh, "--cpu-devices", "4", "--run", str(together)]
    joined = ["--coordinator", f"localhost:{free_port()}", "--processes", "2", "--process-id"]
    both = [
        subprocess.Popen(
            command(*arguments, *joined, str(i)), stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )
        for i in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=PATIENCE_S)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], "\n".join(outputs)
    # only process 0 speaks; Gloo itself says whom it is connected to, in any order
    assert "saved step 12" in outputs[0]
    assert not any(word in outputs[1] for word in ("step", "mesh", "saved", "error"))
    np.testing.assert_allclose(losses(together), losses(alone), rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tinyy"], "did you mean 'tiny'"),
        (["tiny", "--data", "nowhere.store"], "nowhere.store"),
        (["tiny", "--batch", "6", "--mesh", "fsdp=4", "--cpu-devices", "4"], "batch=4 or 8"),
        (["tiny", "--mesh", "tp=8", "--cpu-devices", "8"], "kv_heads"),
        (["tiny", "--seq", "4096"], "longer than the model allows; 2048"),
        (["tiny", "--mesh", "fsdp=3", "--cpu-devices", "4"], "needs 3 devices, 4 are here"),
        (["tiny", "--optimizer.name", "adamx"], "did you mean 'adamw'"),
        (["tiny", "--rules", "nofile"], "nofile"),
        (["tiny", "--steps", "0"], "steps=0"),
        (["tiny", "--stepz", "5"], "--steps"),
        (["tiny", "--cpu-devices", "0"], "cpu_devices=0 must be at least 1"),
        (["tiny", "--mesh", "foo=4", "--cpu-devices", "4"], "the axes are dp, fsdp, tp, sp"),
        (["tiny", "--optimizer.clip-norm", "inf"], "optimizer.clip_norm=inf is not a finite"),
        (["tiny", "--loss.chunk", "0"], "loss.chunk=0"),
        (["tiny", "--optimizer.b1", "1.0"], "b1=1.0 must be from 0 to below 1"),
    ],
)
def test_a_mistake_is_told_before_anything_is_compiled(
    train_command: TrainCommand, arguments: list[str], words: str, tmp_path: Path
) -> None:
    said = train_command(*arguments, "--run", str(tmp_path / "run"), expect=2)
    assert words in said
    assert "Traceback" not in said
    assert not (tmp_path / "run" / "config.json").exists()


def test_an_unsupported_architecture_and_another_model_are_named(
    train_command: TrainCommand, model: str, tmp_path: Path
) -> None:
    other = tmp_path / "bloom.json"
    other.write_text(json.dumps({"architectures": ["BloomForCausalLM"], "model_type": "bloom"}))
    assert "BloomForCausalLM" in train_command(str(other), "--run", str(tmp_path / "r"), expect=2)
    run = ["--run", str(tmp_path / "run"), "--cpu-devices", "1"]
    train_command(model, *SETTINGS, *run, "--stop-at", "1")
    said = train_command("tiny", *SETTINGS, *run, expect=2)
    assert "another model" in said
    assert "embed 32 there, 128 now" in said
    said = train_command(model, *SETTINGS, *run, "--seed", "3", expect=2)
    assert "cannot be resumed with other data: --seed was 0, is now 3. The run would" in said


def test_settings_come_from_a_file_and_flags_win(
    train_command: TrainCommand, model: str, tmp_path: Path
) -> None:
    run, again = tmp_path / "run", tmp_path / "again"
    train_command(model, *SETTINGS, "--run", str(run), "--stop-at", "1", "--cpu-devices", "1")
    stops = "--steps", "2"
    train_command("--config", str(run / "config.json"), "--run", str(again), *stops)
    saved = json.loads((again / "config.json").read_text())
    assert (saved["steps"], saved["batch"], saved["model"]) == (2, 8, model)
    assert (saved["stop_at"], losses(again)[:1]) == (None, losses(run))
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps({"model": "tiny", "stepps": 3}))
    assert "did you mean 'steps'" in train_command("--config", str(broken), expect=2)


def test_steps_that_are_not_finite_are_skipped_and_end_the_run(
    train_command: TrainCommand, model: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    said = train_command(
        model, *SETTINGS[:-2], "--run", str(run), "--cpu-devices", "1", "--max-skipped", "3",
        "--optimizer.learning-rate", "1e30", "--optimizer.warmup-steps", "0",
        "--checkpoint.every", "1", "--optimizer.clip-norm", "None",
        expect=2,
    )  # fmt: skip
    assert "3 consecutive steps" in said
    assert "weights are not saved" in said
    records = read_metrics(run).records
    assert records[-1]["skipped_steps"] >= 3
    assert re.search(
        r"failed</span> step \d+ of \d+: 3 consecutive", (run / "run.html").read_text()
    )


def test_a_save_that_fails_is_told_and_the_next_one_is_made(
    train_command: TrainCommand, model: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "step-00000004").write_text("in the way")
    said = train_command(
        model, *SETTINGS, "--run", str(run), "--cpu-devices", "1", "--checkpoint.every", "4"
    )
    assert "warning: step 4 was not saved" in said
    assert "saved step 12" in said
    said = train_command(
        model, *SETTINGS, "--run", str(run), "--cpu-devices", "1", "--stop-at", "6"
    )
    assert "nothing to do: " in said
    assert "steps 12 to" not in said


def test_one_run_at_a_time_writes_to_a_folder(
    train_command: TrainCommand, model: str, tmp_path: Path
) -> None:
    with only_run_in(tmp_path / "run"):
        said = train_command(
            model, *SETTINGS, "--run", str(tmp_path / "run"), "--cpu-devices", "1", expect=2
        )
    assert f"another run is writing to '{tmp_path / 'run'}' (process {os.getpid()}" in said


def test_a_refused_resume_leaves_the_settings_as_they_were(
    train_command: TrainCommand, model: str, tmp_path: Path
) -> None:
    run = ["--run", str(tmp_path / "run"), "--cpu-devices", "1"]
    train_command(model, *SETTINGS, *run, "--stop-at", "1")
    before = (tmp_path / "run" / "config.json").read_text()
    said = train_command(model, *SETTINGS, *run, "--optimizer.name", "lion", expect=2)
    assert "was trained with optimizer.name adamw, now it is lion" in said
    assert (tmp_path / "run" / "config.json").read_text() == before


def test_the_best_checkpoint_is_kept_and_a_run_that_no_longer_improves_stops(
    train_command: TrainCommand, model: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    rising = [  # a learning rate with which the loss soon grows
        model, *SETTINGS[:4], "--steps", "40", "--run", str(run), "--cpu-devices", "1",
        "--eval.sequences", "4", "--eval.every", "2", "--checkpoint.every", "100",
        "--checkpoint.keep-last", "1", "--optimizer.name", "lion",
        "--optimizer.learning-rate", "0.1", "--eval.patience",
    ]  # fmt: skip
    out = train_command(*rising, "3")
    steps, values = read_metrics(run).column("eval_loss")
    best = steps[values.index(min(values))]
    assert steps[-1] == best + 6 < 40
    assert Checkpoints(run / "checkpoints").steps() == [best, best + 6]
    assert f"(3 evaluations without a lower loss than that of step {best}, " in out
    assert f"--step {best} serves or exports it" in out
    assert "nothing to do: 3 evaluations without a lower loss" in train_command(*rising, "3")
    train_command(*rising, "4")  # continues from where it was
    assert read_metrics(run).column("eval_loss")[0][-1] == best + 8
    assert Checkpoints(run / "checkpoints").steps() == [best, best + 6, best + 8]


def test_each_step_is_evaluated_once(
    train_command: TrainCommand, model: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train_command(
        model, *SETTINGS, "--run", str(run), "--cpu-devices", "1", "--eval.sequences", "4",
        "--eval.every", "3", "--stop-at", "6",
    )  # fmt: skip
    assert read_metrics(run).column("eval_loss")[0] == [3, 6]
