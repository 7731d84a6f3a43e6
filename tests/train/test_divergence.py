"""Weights that diverge never cost a healthy checkpoint, and the way back to it is told."""

import json
import re
import shlex
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tests.processes import Ended, run_commands
from tests.train.test_loop import MODEL

import meshwright as mw
from meshwright.cli.train import settings
from meshwright.train.checkpoint import Checkpoints
from meshwright.train.config import TrainConfig
from meshwright.train.resume import resume_command
from meshwright.train.run import read_metrics
from meshwright.train.state import TrainState, params_are_finite

RUINED = ["--optimizer.learning-rate", "1e38", "--optimizer.warmup-steps", "0"]


@pytest.fixture
def train(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    command = ["train", str(tmp_path / "config.json"), "--run", str(tmp_path / "run")]
    return [*command, "--batch", "4", "--seq", "32", "--steps", "30", "--max-skipped", "3"]


def command_in(ended: Ended) -> list[str]:
    """The command that a message prints at its end."""
    found = re.search(r"meshwright (train .*)$", ended.err.strip())
    assert found, ended.err
    return shlex.split(found[1])


def test_a_diverging_run_keeps_the_newest_healthy_checkpoint_and_prints_how_to_resume(
    train: list[str], tmp_path: Path
) -> None:
    """The reported case: it deleted step 4 and left steps 12, 14 and 16, none of them usable."""
    often = [*train, *RUINED, "--checkpoint.every", "2", "--checkpoint.keep-last", "1"]
    good, *failed = run_commands([*train, "--stop-at", "4"], often, often, often)
    assert good.code == 0, good.err
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    for ended in failed:
        assert ended.code == 2
        assert "Traceback" not in ended.err
        assert ended.err.count("\n") == 1
        assert f"newest healthy checkpoint is step 4 in {checkpoints.folder}" in ended.err
        assert "these weights are not saved" in ended.err
        assert command_in(ended)[-2:] == ["--resume-from", "4"]
    assert checkpoints.healthy() == [4]
    # with another learning rate, as the message says, the run gets on from there
    mended = [*command_in(failed[-1]), "--optimizer.learning-rate", "1e-3", "--stop-at", "7"]
    [ended] = run_commands(mended)
    assert ended.code == 0, ended.err
    assert "going on from step 4" in ended.out
    assert checkpoints.steps()[-1] == 7
    assert read_metrics(tmp_path / "run").rows[-1]["loss"] < 10


def test_checkpoints_of_ruined_weights_are_set_aside_when_an_earlier_one_is_resumed(
    train: list[str], tmp_path: Path
) -> None:
    """Saved after every step, the ruined weights of step 5 are saved before anything is wrong."""
    every = [*train, "--checkpoint.every", "1"]
    first, failed, again, mended = run_commands(
        [*train, "--stop-at", "4"],
        [*every, *RUINED],
        [*every, *RUINED],
        [*every, "--resume-from", "4", "--stop-at", "6"],
    )
    assert (first.code, failed.code, again.code) == (0, 2, 2)
    assert "newest healthy checkpoint is step 4" in again.err
    assert mended.code == 0, mended.err
    folder = tmp_path / "run" / "checkpoints"
    assert f"set aside in {folder / 'set-aside-1'}: 1 later checkpoint (5)" in mended.out
    assert Checkpoints(folder).steps() == [4, 5, 6]
    assert Checkpoints(folder).healthy() == [4, 5]
    aside = Checkpoints(folder / "set-aside-1")
    assert aside.steps() == [5]
    assert aside.meta(5)["config"]["optimizer"]["learning_rate"] == 1e38
    assert read_metrics(tmp_path / "run").column("loss")[0] == [1, 2, 3, 4, 5, 6]
    assert read_metrics(aside.folder).column("loss")[0][-1] > 5


def test_weights_that_are_not_finite_are_never_saved(train: list[str], tmp_path: Path) -> None:
    """The only step's update overflows: nothing was skipped, and there is nothing worth saving."""
    short = [*train, "--stop-at", "1", *RUINED, "--optimizer.weight-decay", "1e30"]
    [ended] = run_commands(short)
    assert ended.code == 2
    assert "the weights of step 1 are not finite, so they are not saved" in ended.err
    assert command_in(ended)[-2:] == ["--resume-from", "none"]
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == []


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
        ["--compute.no-scan", "--compute.overlap", "--optimizer.clip-norm", "None"],
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
