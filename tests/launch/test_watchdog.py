"""One process: a step that hangs ends it, in time and with the reason; a slow save does not."""

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.launch.memory_store import MemoryStore
from tests.patience import PATIENCE_S, eventually

from meshwright import MeshwrightError
from meshwright.launch import Watchdog, failure
from meshwright.launch import watchdog as watchdogs
from meshwright.launch.failure import VERDICT

PROGRAM = """
import sys, time
from meshwright.launch import Watchdog
def next_batch():
    time.sleep(100_000)
with Watchdog(sys.argv[1], timeout_s=0.5, pause_timeout_s=20, poll_s=0.1) as watchdog:
    for step in range(1, 4):
        watchdog.beat(step)
    next_batch()
"""


class Clock:
    """A time that passes when the test says so, and then until the watchdog has looked at it."""

    strftime = staticmethod(time.strftime)

    def __init__(self) -> None:
        self.now, self.looks = 0.0, 0

    def monotonic(self) -> float:
        self.looks += threading.current_thread().name == "watchdog"
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
        seen = self.looks
        # a look reads the time twice, so it has begun and ended within four
        eventually(lambda: self.looks >= seen + 4 or not watching())


def watching() -> bool:
    return any(thread.name == "watchdog" for thread in threading.enumerate())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    monkeypatch.setattr(watchdogs, "time", made)
    yield made
    eventually(lambda: not watching())


def ended(run: Path) -> tuple[Watchdog, list[str]]:
    lines: list[str] = []
    end = lambda line, code, wait: lines.append(line)  # noqa: E731
    return Watchdog(run, timeout_s=3, pause_timeout_s=8, poll_s=0.01, end=end), lines


def test_a_reader_that_hangs_ends_the_process_and_leaves_its_stack(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 75
    said = r"step 3 has not finished for \d+ s: this process is in <string>:5 next_batch"
    assert re.search(f"error: {said}", done.stderr)
    assert re.search(said, (tmp_path / "watchdog.txt").read_text())
    stacks = (tmp_path / "watchdog-stacks-0.txt").read_text()
    assert "in next_batch" in stacks


def test_steps_that_continue_are_left_alone(tmp_path: Path, clock: Clock) -> None:
    watchdog, lines = ended(tmp_path)
    with watchdog:
        for step in range(8):
            watchdog.beat(step)
            clock.advance(2)
    clock.advance(100)  # nothing is watched after the loop
    assert lines == []
    assert list(tmp_path.iterdir()) == []


def test_compiling_and_saving_have_the_longer_limit(tmp_path: Path, clock: Clock) -> None:
    watchdog, lines = ended(tmp_path)
    with watchdog:
        clock.advance(4)
        for step in (1, 2):
            watchdog.beat(step)
            clock.advance(4)
        watchdog.beat(3)
        with watchdog.paused("saving"):
            clock.advance(4)
        clock.advance(2)  # the step has its whole limit again
        assert lines == []
        clock.advance(2)
        assert len(lines) == 1
    assert lines[0].startswith("step 3 has not finished for 4 s")


def test_a_save_that_never_ends_is_noticed_too(tmp_path: Path, clock: Clock) -> None:
    watchdog, lines = ended(tmp_path)
    with watchdog:
        for step in (1, 2, 3):
            watchdog.beat(step)
        with watchdog.paused("saving"):
            clock.advance(4)
            assert lines == []
            clock.advance(5)
            assert len(lines) == 1
    assert "step 3 has not finished for 9 s" in lines[0]
    assert "(saving)" in lines[0]


def test_time_in_which_the_machine_slept_does_not_count(tmp_path: Path, clock: Clock) -> None:
    watchdog, lines = ended(tmp_path)
    with watchdog:
        for step in (1, 2, 3):
            watchdog.beat(step)
        clock.advance(3600)
        assert lines == []
        clock.advance(4)
        assert len(lines) == 1


def test_the_agreed_reason_counts_although_the_store_hangs_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, ended = threading.Event(), threading.Event()

    def hangs(*_: object) -> bool:
        asked.set()
        return ended.wait(PATIENCE_S)

    class Thread(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            assert asked.wait(PATIENCE_S)

    store = MemoryStore()
    store.put(VERDICT, "process 3 failed")
    watchdog = Watchdog(tmp_path, timeout_s=3, pause_timeout_s=8, store=store)
    monkeypatch.setattr(watchdogs, "first_to_say", hangs)
    monkeypatch.setattr(watchdogs, "threading", SimpleNamespace(Thread=Thread))
    assert watchdog._told_to_all("this process waits") == ("process 3 failed", True)
    ended.set()


def test_each_host_of_the_same_name_says_the_reason_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, said = MemoryStore(), []
    for process in range(4):
        boot = tmp_path / f"boot-{process // 2}"
        boot.write_text(f"{boot.name}\n")
        monkeypatch.setattr(failure, "BOOT_ID", boot)
        said.append(failure.first_to_say(store, process))
    assert said == [True, False, True, False]
    monkeypatch.setattr(failure, "BOOT_ID", tmp_path / "none")
    assert failure.first_to_say(store, 4)


def test_limits_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError, match=r"timeout_s=60, pause_timeout_s=10"):
        Watchdog(tmp_path, timeout_s=60, pause_timeout_s=10)
    with pytest.raises(MeshwrightError, match="above 0"):
        Watchdog(tmp_path, timeout_s=0, pause_timeout_s=10)
