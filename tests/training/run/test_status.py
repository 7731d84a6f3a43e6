"""The state of a run, as its folder tells it, and its page while it trains."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.training.run import (
    ENDED,
    RESUMED,
    LivePage,
    MetricsLog,
    only_run_in,
    read_metrics,
    run_status,
)
from meshwright.training.run.page import EVERY_S, SHARE, run_page
from meshwright.training.run.status import QUIET_S


def made(folder: Path, steps: int, of: int = 10) -> Path:
    with MetricsLog(folder) as log:
        for step in range(1, steps + 1):
            log.write(step, {"loss": 1 / step, "step_seconds": 2.0})
    (folder / "config.json").write_text(json.dumps({"steps": of}))
    (folder / "run.json").write_text('{"version": "0.2.0"}')
    return folder


def state(folder: Path) -> str:
    return run_status(folder, read_metrics(folder)).state


@pytest.fixture
def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_run_that_is_locked_by_a_process_is_running(tmp_path: Path) -> None:
    made(tmp_path, 4)
    with only_run_in(tmp_path):
        assert state(tmp_path) == "running"


def test_a_run_whose_process_is_gone_without_a_note_has_failed(
    tmp_path: Path, ended_process: int
) -> None:
    made(tmp_path, 4)
    (tmp_path / ".lock").write_text(f"process {ended_process} on {socket.gethostname()}\n")
    assert state(tmp_path) == "failed"
    made(tmp_path, 10)  # it came to its last step, and died while saving or before
    assert state(tmp_path) == "finished"


def test_a_run_of_an_earlier_version_is_stopped_where_its_last_step_is_saved_else_unknown(
    tmp_path: Path,
) -> None:
    (made(tmp_path, 4) / "run.json").write_text('{"model": "tiny"}')
    assert state(tmp_path) == "unknown"
    (tmp_path / "run.json").write_text("5")  # what is no object names no version
    assert state(tmp_path) == "unknown"
    assert "unknown" in run_page(tmp_path)
    (tmp_path / "checkpoints" / "step-00000003").mkdir(parents=True)
    assert state(tmp_path) == "unknown"
    (tmp_path / "checkpoints" / "step-00000004").mkdir()
    assert state(tmp_path) == "stopped"


def test_a_run_of_another_machine_is_running_while_it_writes(tmp_path: Path) -> None:
    made(tmp_path, 4)
    (tmp_path / ".lock").write_text(f"process {os.getpid()} on elsewhere\n")
    assert state(tmp_path) == "running"
    old = (tmp_path / "metrics.jsonl").stat().st_mtime - 2 * QUIET_S
    os.utime(tmp_path / "metrics.jsonl", (old, old))
    assert state(tmp_path) == "failed"


def test_the_noted_end_counts_until_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.training.run.metrics.time.time", lambda: 5.0)  # as lines stand
    with only_run_in(made(tmp_path, 4)):
        with MetricsLog(tmp_path) as log:
            log.note(5, ENDED, state="stopped", reason="SIGTERM")  # a step without a line
        status = run_status(tmp_path, read_metrics(tmp_path))
        assert (status.state, status.step, status.steps, status.reason) == (
            "stopped", 5, 10, "SIGTERM",
        )  # fmt: skip
        with MetricsLog(tmp_path, resume_step=4) as log:
            log.note(4, RESUMED, mesh="fsdp=2")
        assert state(tmp_path) == "running"
        with MetricsLog(tmp_path) as log:
            log.note(6, ENDED, state="failed", reason="out of memory")
        assert state(tmp_path) == "failed"
        with MetricsLog(tmp_path, resume_step=0) as log:  # anew, without a word
            log.write(1, {"loss": 1.0})
        assert state(tmp_path) == "running"


def test_the_page_of_a_running_run_is_written_at_once_and_then_seldom(tmp_path: Path) -> None:
    now = 0.0
    page = LivePage(made(tmp_path, 4), clock=lambda: now)
    with only_run_in(tmp_path):
        page.update()
        text = page.file.read_text()
        assert "running</span> step 4 of 10, about 12s left" in text
        assert "location.reload()" in text
        page.file.unlink()
        now = EVERY_S - 1
        page.update()
        assert not page.file.exists()
        now = EVERY_S
        page.update()
        assert page.file.exists()


def test_a_page_that_takes_long_to_write_is_written_less_often(tmp_path: Path) -> None:
    times = iter([0.0, 5.0, 5 / SHARE, 5 + 5 / SHARE, 5 + 5 / SHARE])  # 5 s, then not yet, then due
    page = LivePage(made(tmp_path, 4), clock=lambda: next(times))
    page.update()
    page.file.unlink()
    page.update()
    assert not page.file.exists()
    page.update()
    assert page.file.exists()
