"""Weights that diverge never cost a healthy checkpoint, and the way back to it is told."""

import dataclasses
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tests.patience import PATIENCE_S
from tests.processes import Ended, free_port, run_commands
from tests.training.test_loop import MODEL

import meshwright as mw
from meshwright.checkpoint import Checkpoints
from meshwright.cli.train import settings
from meshwright.training.config import TrainConfig
from meshwright.training.resume import resume_command
from meshwright.training.run import read_metrics
from meshwright.training.state import TrainState, params_are_finite

RUINED = ["--optimizer.learning-rate", "1e38", "--optimizer.warmup-steps", "0"]


def settings_of(folder: Path, run: str) -> list[str]:
    (folder / "config.json").write_text(json.dumps(MODEL))
    command = ["train", str(folder / "config.json"), "--run", str(folder / run)]
    return [*command, "--batch", "4", "--seq", "32", "--steps", "30", "--max-skipped", "3"]


@dataclasses.dataclass(frozen=True)
class Runs:
    """Four runs in one folder, one after the other, and one in another folder."""

    folder: Path
    good: Ended  # to step 4
    ruined: Ended  # a save every other step, as was reported
    ruined_again: Ended  # after every step, so that ruined weights are saved before it shows
    mended: Ended  # from step 4 to step 6
    overflowing: Ended  # weights that are not finite after the first step, which is also the last


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("diverging")
    train, other = settings_of(folder, "run"), settings_of(folder, "other")
    last_only = ["--checkpoint.keep-last", "1"]
    ended = run_commands(
        [*train, "--stop-at", "4"],
        [*train, *RUINED, "--checkpoint.every", "2", *last_only],
        [*train, *RUINED, "--checkpoint.every", "1", *last_only],
        [*train, "--resume-from", "4", "--checkpoint.every", "1", "--stop-at", "6"],
        [*other, *RUINED, "--optimizer.weight-decay", "1e30", "--stop-at", "1"],
    )
    return Runs(folder, *ended)


def command_in(ended: Ended) -> list[str]:
    """The command that a message prints at its end."""
    found = re.search(r"meshwright (train .*)$", ended.err.strip())
    assert found, ended.err
    return shlex.split(found[1])


def test_a_run_that_gives_up_names_the_newest_healthy_checkpoint_and_how_to_resume(
    runs: Runs,
) -> None:
    """It deleted step 4, and left steps 12, 14 and 16, none of them usable."""
    assert runs.good.code == 0, runs.good.err
    for ended in (runs.ruined, runs.ruined_again):
        assert ended.code == 2
        assert ended.err.count("\n") == 1
        assert f"healthy checkpoint is step 4 in {runs.folder / 'run' / 'checkpoints'}" in ended.err
        assert "these weights are not saved" in ended.err
        printed = settings(command_in(ended)[1:])
        assert (printed.resume_from, printed.run) == ("4", runs.folder / "run")
        assert (printed.batch, printed.seq, printed.max_skipped) == (4, 32, 3)


def test_the_run_continues_from_the_healthy_checkpoint(runs: Runs) -> None:
    assert runs.mended.code == 0, runs.mended.err
    assert "resuming from step 4" in runs.mended.out
    checkpoints = Checkpoints(runs.folder / "run" / "checkpoints")
    assert checkpoints.steps() == [4, 5, 6]
    assert checkpoints.healthy() == [4, 5], "no step was computed from the last one yet"
    metrics = read_metrics(runs.folder / "run")
    assert metrics.column("loss")[0] == [1, 2, 3, 4, 5, 6]
    assert metrics.records[-1]["loss"] < 10


def test_later_checkpoints_are_set_aside_when_an_earlier_one_is_resumed(runs: Runs) -> None:
    aside = Checkpoints(runs.folder / "run" / "checkpoints" / "set-aside-1")
    assert f"set aside in {aside.folder}: 1 later checkpoint (5)" in runs.mended.out
    assert aside.steps() == [5]
    assert aside.meta(5)["config"]["optimizer"]["learning_rate"] == 1e38
    assert read_metrics(aside.folder).column("loss")[0][-1] > 5


def test_weights_that_are_not_finite_are_never_saved(runs: Runs) -> None:
    """No step was skipped, but the only update overflowed."""
    assert runs.overflowing.code == 2
    said = "the weights of step 1 are not finite, so they are not saved"
    assert said in runs.overflowing.err
    assert command_in(runs.overflowing)[-2:] == ["--resume-from", "none"]
    assert Checkpoints(runs.folder / "other" / "checkpoints").steps() == []


def test_finite_parameters_are_told_from_others_on_any_mesh() -> None:
    mesh = mw.mesh("fsdp=8,tp=2", axis_types="explicit")
    place = NamedSharding(mesh, P("fsdp", "tp"))
    for bad, finite in ((1.0, True), (jnp.inf, False), (jnp.nan, False)):
        array = jax.device_put(jnp.ones((16, 4)).at[9, 3].set(bad), place)
        params = {"a": jax.device_put(jnp.ones((16, 4)), place), "b": array}
        assert params_are_finite(TrainState(0, params, None, 0, 0), mesh) is finite


@pytest.mark.parametrize(
    "flags",
    [
        ["--steps", "7", "--optimizer.learning-rate", "1e38", "--checkpoint.keep-every", "10"],
        ["--compute.layers", "unroll", "--compute.overlap", "on", "--optimizer.clip-norm", "None"],
        ["--data", "a b.store:0.7,c.store:0.3", "--init-from", "it's", "--mesh", "fsdp=2,tp=2"],
    ],
)
def test_the_printed_command_gives_the_same_settings(flags: list[str]) -> None:
    config = settings(["tiny", "--run", "a run", *flags])
    printed = shlex.split(resume_command(config, 40))
    assert printed[:3] == ["meshwright", "train", "tiny"]
    again = settings(printed[2:])
    assert again.resume_from == "40"
    assert TrainConfig(**{**vars(again), "resume_from": "latest"}) == config


@pytest.mark.slow
def test_two_processes_give_up_together_and_resume_from_the_same_step(tmp_path: Path) -> None:
    train = settings_of(tmp_path, "run")

    def both(*flags: str) -> list[Ended]:
        joined = ["--coordinator", f"localhost:{free_port()}", "--processes", "2"]
        words = [sys.executable, "-m", "meshwright.cli.main", *train, "--checkpoint.every", "1"]
        started = [
            subprocess.Popen(
                [*words, *joined, "--cpu-devices", "1", "--process-id", str(i), *flags],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for i in range(2)
        ]  # fmt: skip
        try:
            said = [process.communicate(timeout=PATIENCE_S) for process in started]
        finally:
            for process in started:
                process.kill()
        return [Ended(p.returncode, *text) for p, text in zip(started, said, strict=True)]

    assert [ended.code for ended in both("--stop-at", "2")] == [0, 0]
    failed = both(*RUINED)
    assert [ended.code for ended in failed] == [2, 2], failed
    said = "".join(ended.err for ended in failed).replace("'", "")
    assert said.count("newest healthy checkpoint is step 2") == 1  # by one process
    assert said.count("--resume-from 2 (and in each process its own --process-id)") == 1
    mended = both("--resume-from", "2", "--stop-at", "4")
    assert [ended.code for ended in mended] == [0, 0], mended
    assert "set aside in" in mended[0].out
    assert Checkpoints(tmp_path / "run" / "checkpoints").healthy() == [2, 3]
    missing = both("--resume-from", "1")
    assert [ended.code for ended in missing] == [2, 2]
    said = "".join(ended.err for ended in missing)
    assert said.count("has no complete checkpoint of that step; it has steps 2, 3, 4") == 1
