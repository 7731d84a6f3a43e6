"""TensorBoard and W&B get what metrics.jsonl gets; skipped where they are not installed."""

from pathlib import Path

import pytest

from meshwright.training.run import MetricsLog


def test_tensorboard_reads_each_step_once_after_a_resume(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for steps, resume in ((range(1, 8), None), (range(5, 10), 4)):
        with MetricsLog(tmp_path, tensorboard=True, resume_step=resume) as log:
            for step in steps:
                log.write(step, {"loss": step / 2})
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(n, n / 2) for n in range(1, 10)]


def test_a_resumed_run_continues_the_same_wandb_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids = []
    for resume in (None, 4):
        with MetricsLog(tmp_path, wandb="meshwright-test", resume_step=resume) as log:
            log.write(5, {"loss": 1.0})
        ids.append((tmp_path / "wandb-id.txt").read_text())
    assert ids[0] == ids[1]
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 2
