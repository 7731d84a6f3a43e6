"""One process: a step that hangs ends it, in time and with the reason; a slow save does not."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright import MeshwrightError
from meshwright.launch import Watchdog

PROGRAM = """
import sys, time
from meshwright.launch import Watchdog
def next_batch():
    time.sleep(100)
with Watchdog(sys.argv[1], timeout_s=0.5, pause_timeout_s=20, poll_s=0.1) as watchdog:
    for step in range(1, 4):
        watchdog.beat(step)
    next_batch()
"""


def ended(run: Path, **limits: float) -> tuple[Watchdog, list[str]]:
    lines: list[str] = []
    basic = {"timeout_s": 0.3, "pause_timeout_s": 5.0, "poll_s": 0.05}
    watchdog = Watchdog(run, end=lambda line, code, wait: lines.append(line), **(basic | limits))  # type: ignore[arg-type]
    return watchdog, lines


def test_a_reader_that_hangs_ends_the_process_and_leaves_its_stack(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 75
    said = "step 3 has not finished for 1 s: this process is in <string>:5 next_batch"
    assert f"error: {said}" in done.stderr
    assert said in (tmp_path / "watchdog.txt").read_text()
    stacks = (tmp_path / "watchdog-stacks-0.txt").read_text()
    assert "in next_batch" in stacks


def test_steps_that_continue_are_left_alone(tmp_path: Path) -> None:
    watchdog, lines = ended(tmp_path)
    with watchdog:
        for step in range(8):
            watchdog.beat(step)
            time.sleep(0.1)
    time.sleep(0.5)  # nothing is watched after the loop
    assert lines == []
    assert list(tmp_path.iterdir()) == []


def test_compiling_and_saving_have_the_longer_limit(tmp_path: Path) -> None:
    watchdog, lines = ended(tmp_path)
    with watchdog:
        time.sleep(0.4)
        for step in (1, 2):
            watchdog.beat(step)
            time.sleep(0.4)
        watchdog.beat(3)
        with watchdog.paused("saving"):
            time.sleep(0.5)
        time.sleep(0.2)  # the step has its whole limit again
        assert lines == []
        time.sleep(0.4)
    assert len(lines) == 1
    assert lines[0].startswith("step 3 has not finished")


def test_a_save_that_never_ends_is_noticed_too(tmp_path: Path) -> None:
    watchdog, lines = ended(tmp_path, timeout_s=0.2, pause_timeout_s=0.4)
    with watchdog:
        for step in (1, 2, 3):
            watchdog.beat(step)
        with watchdog.paused("saving"):
            time.sleep(0.8)
    assert len(lines) == 1
    assert "step 3 has not finished for" in lines[0]
    assert "(saving)" in lines[0]


def test_limits_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError, match=r"timeout_s=60, pause_timeout_s=10"):
        Watchdog(tmp_path, timeout_s=60, pause_timeout_s=10)
    with pytest.raises(MeshwrightError, match="above 0"):
        Watchdog(tmp_path, timeout_s=0, pause_timeout_s=10)
