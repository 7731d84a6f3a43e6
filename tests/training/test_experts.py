"""Runs of mixtures of experts: checkpoints that move between meshes, and what is written of them."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.training.conftest import TrainCommand
from tests.training.test_loop import losses, parameters

from meshwright.training.run import read_metrics
from meshwright.training.run.summary import expert_loads

SETTINGS = [
    "tiny-moe", "--override", "layers=2", "selection_bias=true", "--loss.balance-bias", "0.01",
    "--compute.capacity", "1.25", "--batch", "8", "--seq", "32", "--accumulation", "2",
    "--steps", "6", "--optimizer.warmup-steps", "2",
]  # fmt: skip


@pytest.mark.slow
def test_a_run_with_experts_resumes_with_another_ep(
    train_command: TrainCommand, tmp_path: Path
) -> None:
    first = ["--cpu-devices", "4", "--mesh", "ep=4", "--run"]
    others = {
        "fewer": ["--cpu-devices", "4", "--mesh", "ep=2,fsdp=2", "--compute.experts", "ring"],
        "alone": ["--cpu-devices", "1"],
    }
    through, stopped = tmp_path / "through", tmp_path / "stopped"
    said = train_command(*SETTINGS, *first, str(through))
    assert "% dropped by experts" in said
    train_command(*SETTINGS, *first, str(stopped), "--stop-at", "3")
    expected, loads = parameters(through, 6), expert_loads(read_metrics(through))
    assert loads is not None
    assert np.shape(loads["layers"]) == (2, 8)
    np.testing.assert_allclose(np.mean(loads["layers"], axis=1), 1, atol=0.01)
    for name, settings in others.items():
        moved = tmp_path / name
        shutil.copytree(stopped, moved)
        said = train_command(*SETTINGS, *settings, "--run", str(moved))
        assert "resuming from step 3" in said
        np.testing.assert_allclose(losses(moved), losses(through), rtol=1e-5)
        found = parameters(moved, 6)
        assert found.keys() == expected.keys()
        for path, array in expected.items():
            if path.startswith("params"):
                np.testing.assert_allclose(found[path], array, atol=2e-5, err_msg=path)
        assert expert_loads(read_metrics(moved)) == loads
        dropped = [read_metrics(run).column("dropped")[1] for run in (moved, through)]
        np.testing.assert_allclose(*dropped, atol=1e-6)
        assert min(dropped[0]) > 0
    dropless = [{"1.25": "0", "6": "7"}.get(word, word) for word in SETTINGS]
    said = train_command(*dropless, "--cpu-devices", "1", "--run", str(tmp_path / "alone"))
    assert "note: compute.capacity is 0.0, was 1.25 before this resume" in said
    assert len(read_metrics(tmp_path / "alone").column("dropped")[1]) == 6  # none of step 7
