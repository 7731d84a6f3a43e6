"""Detects a hanging process and ends the run.

    with Watchdog(run_folder) as watchdog:
        for step in …:
            batch = next(batches)
            watchdog.beat(step)             # directly before the step is started
            state, metrics = train_step(state, batch)
            …
            with watchdog.paused("saving"):
                save(state)

The position of `beat` matters: a process that hangs in its data reader has not begun the step that
the others wait in, so it is the one that is behind.

Each process has two threads. One reports to the coordinator's store and may block there if process
0 is stopped; the other decides and never blocks.
"""

import contextlib
import dataclasses
import faulthandler
import os
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType

from meshwright.errors import MeshwrightError
from meshwright.files import HeldPath
from meshwright.launch.coordinator import CoordinatorLostError, Store
from meshwright.launch.failure import (
    POLL_S,
    VERDICT,
    agree_on_verdict,
    end_process,
    exit_code,
    farewell_s,
    first_to_say,
    look_interval_s,
)
from meshwright.launch.verdict import REPORTS, Report, read_reports, verdict

HANG_TIMEOUT_S = 600.0  # without a new step; the default of --hang-timeout
SILENCE_S = 60.0  # jax gives up on a stopped process after 100 s, and says less
LIBRARY = sysconfig.get_paths()["stdlib"]
STEPS_WITH_GRACE = 2  # both may include a compilation, of this process or of another one


def pause_timeout_s(timeout_s: float) -> float:
    """The limit for compiling, saving and evaluating, if `timeout_s` is the limit for steps."""
    return max(3600.0, 4 * timeout_s)


class Watchdog:
    """Ends the process with exit code 75 when no step begins for `timeout_s`.

    `pause_timeout_s` is the limit before and during the first two steps (compilation) and inside
    `paused`. `store` is `coordinator_store()`, None for one process. Files, in `run_folder`:
    `watchdog.txt`, the line that is printed, and `watchdog-stacks-PROCESS.txt`, where each Python
    thread was.
    """

    def __init__(
        self,
        run_folder: Path | str,
        *,
        timeout_s: float,
        pause_timeout_s: float,
        store: Store | None = None,
        process_id: int = 0,
        processes: int = 1,
        poll_s: float = POLL_S,
        end: Callable[[str, int, float], None] = end_process,
    ) -> None:
        if not 0 < timeout_s <= pause_timeout_s:
            raise MeshwrightError(
                f"watchdog timeout_s={timeout_s:g}, pause_timeout_s={pause_timeout_s:g}: the first "
                "must be above 0 and no longer than the second, which covers compiling and saving"
            )
        self._folder = Path(run_folder)
        self._held: HeldPath | None = None  # the folder, from the first step on
        self._timeout_s, self._pause_timeout_s = timeout_s, pause_timeout_s
        self._store, self._process_id, self._processes = store, process_id, processes
        self._poll_s = look_interval_s(processes, poll_s)
        self._silence_s = max(min(SILENCE_S, timeout_s), 4 * self._poll_s)
        self._end = end
        self._beats = 0
        self._mine = Report(process_id, socket.gethostname(), limit_s=pause_timeout_s)
        self._since = time.monotonic()
        self._main = threading.main_thread().ident
        self._stopped = threading.Event()
        self._peers: dict[int, Report] = {}
        self._grew: dict[int, float] = {}  # when the count of each peer last increased
        self._noted = 0.0  # when the peers were last read
        self._told = time.monotonic()  # when the store last answered
        self._judged_elsewhere: str | None = None

    def __enter__(self) -> "Watchdog":
        self._since = self._told = time.monotonic()
        threads = [self._decide] if self._store is None else [self._inform, self._decide]
        for work in threads:
            threading.Thread(target=work, name="watchdog", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopped.set()
        if self._held is not None:
            self._held.close()
        if self._store is not None:
            left = dataclasses.replace(self._now(), left=True)
            with contextlib.suppress(CoordinatorLostError):
                self._store.put(f"{REPORTS}{self._process_id}", left.text())

    def beat(self, step: int) -> None:
        """`step` is about to begin."""
        if not self._beats:
            with contextlib.suppress(OSError):  # this host may not see it
                self._held = HeldPath(self._folder)
        self._beats += 1
        graced = self._beats <= STEPS_WITH_GRACE
        limit = self._pause_timeout_s if graced else self._timeout_s
        self._got_on(step=step, limit_s=limit, doing="")

    @contextlib.contextmanager
    def paused(self, doing: str) -> Iterator[None]:
        """A block with the longer limit: "saving", "evaluating"."""
        before = self._mine
        self._got_on(doing=doing, limit_s=self._pause_timeout_s)
        try:
            yield
        finally:
            self._got_on(doing=before.doing, limit_s=before.limit_s)

    def _got_on(self, **changes: object) -> None:
        self._since = time.monotonic()
        self._mine = dataclasses.replace(self._mine, **changes)  # type: ignore[arg-type]

    def _now(self) -> Report:
        frame = sys._current_frames().get(self._main or 0)
        return dataclasses.replace(
            self._mine,
            seconds=round(time.monotonic() - self._since, 1),
            where="" if frame is None else place_of(frame),
        )

    # ---- the thread that talks to the store ------------------------------------------------------

    def _inform(self) -> None:
        assert self._store is not None
        count = 0
        while not self._stopped.wait(self._poll_s if count else 0):
            count += 1
            now = dataclasses.replace(self._now(), count=count)
            try:
                self._store.put(f"{REPORTS}{self._process_id}", now.text())
                self._judged_elsewhere = self._store.get(VERDICT)
                # the reports of others matter only if this process waits
                if now.seconds > min(10.0, self._timeout_s / 4):
                    self._note(self._store.get_all(REPORTS))
            except CoordinatorLostError:
                return  # `_decide` notices that the store does not respond
            self._told = time.monotonic()

    def _note(self, texts: dict[str, str]) -> None:
        now = time.monotonic()
        for report in read_reports(texts).values():
            known = self._peers.get(report.process)
            if known is None or known.count != report.count:
                self._grew[report.process] = now
            self._peers[report.process] = report
        self._noted = now

    # ---- the thread that decides -----------------------------------------------------------------

    def _decide(self) -> None:
        tick = min(0.5, self._poll_s)
        last = time.monotonic()
        while not self._stopped.wait(tick):
            now = time.monotonic()
            slept = now - last - tick
            last = now
            if slept > max(5.0, tick):  # Ctrl-Z or a closed lid is not a hang
                self._since += slept
                self._told += slept
                self._grew = {process: at + slept for process, at in self._grew.items()}
            line = self._judged_elsewhere or self._verdict(now)
            if line is not None and not self._stopped.is_set():
                self._finish(line)
                return

    def _verdict(self, now: float) -> str | None:
        mine = self._now()
        if self._store is None:
            return verdict([mine], self._process_id, self._silence_s)
        if now - self._told > self._silence_s:
            step = "the first step" if mine.step is None else f"step {mine.step}"
            return (
                f"{step} has not finished for {mine.seconds:.0f} s: process 0, the coordinator, "
                f"has not responded for {now - self._told:.0f} s"
            )
        if self._noted < self._since or mine.seconds <= min(self._silence_s, mine.limit_s):
            return None
        reports = [mine]
        for process in range(self._processes):
            if process != self._process_id:
                peer = self._peers.get(process, Report(process))
                silent = now - self._grew.get(process, self._since)
                reports.append(dataclasses.replace(peer, silent_s=silent))
        return verdict(sorted(reports, key=lambda r: r.process), self._process_id, self._silence_s)

    def _finish(self, line: str) -> None:
        # what is now at the path of a folder that was deleted or moved may be another run's
        own_folder = self._held is None or self._held.is_there()
        if own_folder:
            self._write_stacks(line)
        says = True
        if self._store is not None:
            line, says = self._told_to_all(line)
        if own_folder:
            self._write_line(line)
        alone = self._store is None
        wait_s = 0.0 if alone else farewell_s(self._process_id, self._poll_s)
        self._end(line if says else "", exit_code(line), wait_s)

    def _write_stacks(self, line: str) -> None:
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            stacks = self._folder / f"watchdog-stacks-{self._process_id}.txt"
            with stacks.open("w", encoding="utf-8") as file:
                file.write(f"{line}\n\n")
                file.flush()
                faulthandler.dump_traceback(file=file, all_threads=True)

    def _write_line(self, line: str) -> None:
        with contextlib.suppress(OSError), (self._folder / "watchdog.txt").open("a") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} process {self._process_id}: {line}\n")

    def _told_to_all(self, line: str) -> tuple[str, bool]:
        """The line that counts, and whether this process prints it."""
        # in a thread, since the store itself may hang
        agreed = [(line, True)]

        def tell() -> None:
            assert self._store is not None
            verdict = agree_on_verdict(self._store, line)
            agreed[0] = verdict, True  # should the store hang now
            agreed[0] = verdict, first_to_say(self._store, self._process_id)

        thread = threading.Thread(target=tell, daemon=True)
        thread.start()
        thread.join(5.0)
        return agreed[0]


def place_of(frame: FrameType) -> str:
    """`reader.py:88 next_batch`: the innermost line outside of libraries, else the innermost."""
    inner: FrameType | None = frame
    while inner is not None:
        path = inner.f_code.co_filename
        if f"{os.sep}site-packages{os.sep}" not in path and not path.startswith(LIBRARY):
            frame = inner
            break
        inner = inner.f_back
    name = Path(frame.f_code.co_filename).name
    return f"{name}:{frame.f_lineno} {frame.f_code.co_name}"
