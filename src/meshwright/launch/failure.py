"""End all processes of a multi-process run when one of them fails.

After a Python exception in one process, the others would wait for it in a collective, and it would
wait for them in jax's shutdown. So the first process that fails writes the reason to the store and
exits; the watchdog of every other process reads it and exits too. On each host one process prints
the reason: the one that failed, if it is there.
"""

import contextlib
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from meshwright.errors import MeshwrightError
from meshwright.interrupt import LONGEST_END_S, before_end, ending_by_signal
from meshwright.launch.coordinator import CoordinatorLostError, Store
from meshwright.launch.verdict import REPORTS, read_reports

VERDICT = "meshwright/verdict"
SAID = "meshwright/said/"  # by host: the process that prints the verdict
EXIT_CODE = 75  # EX_TEMPFAIL: worth a restart, from the last checkpoint
MISTAKE_CODE = 2  # a person must fix something: a restart would fail the same way
_MISTAKE = re.compile(r"process \d+ stopped: ")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
POLL_S = 1.0  # how often each process checks whether another has exited
_ends = threading.RLock()  # held by the thread that ends the process; others wait until it exits


class AgreedError(MeshwrightError):
    """An error that all processes raise with the same text, so none must tell the others."""


@contextlib.contextmanager
def ends_together(
    store: Store | None, process_id: int = 0, processes: int = 1, poll_s: float = POLL_S
) -> Iterator[None]:
    """An exception inside ends this process at once and is reported to the others.

    In a run of one process (`store` is None) exceptions pass through unchanged.
    """
    interval_s = look_interval_s(processes, poll_s)

    def tell_the_others() -> None:
        if store is not None:
            agree_on_verdict(store, f"process {process_id} was stopped by a signal")
            time.sleep(farewell_s(process_id, interval_s))

    try:
        with before_end(tell_the_others):
            yield
    except SystemExit as wanted:
        if store is None or not wanted.code:
            raise
        _end_failed(store, process_id, wanted, interval_s)
    except BaseException as failure:
        if store is None:
            raise
        _end_failed(store, process_id, failure, interval_s)


def _end_failed(store: Store, process_id: int, failure: BaseException, interval_s: float) -> None:
    if threading.current_thread() is threading.main_thread():
        # torchrun and Slurm send it when another process is gone; this one ends anyway, and says so
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    wait_s = farewell_s(process_id, interval_s)
    says = first_to_say(store, process_id)
    if isinstance(failure, AgreedError):
        end_process(str(failure) if says else "", MISTAKE_CODE, wait_s)
    about = str(failure).partition("\n")[0] or type(failure).__name__
    mistake = isinstance(failure, MeshwrightError) and not isinstance(failure, CoordinatorLostError)
    text = f"process {process_id} {'stopped' if mistake else 'failed'}: {about}"
    lost = None
    if not isinstance(failure, MeshwrightError | KeyboardInterrupt | SystemExit):
        # maybe a broken connection (of several exception types), caused by another process
        lost = _gone(store, process_id, interval_s)
        text = text if lost is None else f"{lost} ({about})"
    verdict = agree_on_verdict(store, text)
    says |= verdict == text
    shown = verdict if says else ""
    if lost is not None or not verdict.endswith(f": {about}"):
        end_process(shown, exit_code(verdict), 0.0 if process_id else wait_s)
    if isinstance(failure, MeshwrightError):
        shown = shown and verdict.removesuffix(about) + str(failure)  # all of its lines
        end_process(shown, MISTAKE_CODE if mistake else EXIT_CODE, wait_s)
    if isinstance(failure, KeyboardInterrupt):
        end_process(shown, 130, wait_s)
    if says and not isinstance(failure, SystemExit):
        traceback.print_exception(failure)
    end_process(shown, 1, wait_s)


def first_to_say(store: Store, process_id: int) -> bool:
    """Whether this process of its host is the one to print why the run ends."""
    try:
        return store.put_once(SAID + _host(), str(process_id)) == str(process_id)
    except CoordinatorLostError:
        return True


def _host() -> str:
    """The host's name and boot: containers on several hosts may have the same name."""
    boot = ""
    with contextlib.suppress(OSError):  # Linux alone has it
        boot = BOOT_ID.read_text().strip()
    return f"{socket.gethostname()}/{boot}"


def _gone(store: Store, process_id: int, interval_s: float) -> str | None:
    """The processes whose watchdog no longer reports; None if all report."""
    try:
        before = read_reports(store.get_all(REPORTS))
        time.sleep(2.5 * interval_s)
        after = read_reports(store.get_all(REPORTS))
    except CoordinatorLostError:
        return None
    gone = [
        f"process {report.process} ({report.host}) is gone, last seen at step {report.step}"
        for report in after.values()
        if report.process != process_id
        and not report.left
        and report.process in before
        and before[report.process].count == report.count
    ]
    return "; ".join(gone[:4]) or None


def look_interval_s(processes: int, poll_s: float) -> float:
    """Poll interval: a thousand processes must not poll one store every second."""
    return max(poll_s, processes / 50)


def farewell_s(process_id: int, interval_s: float) -> float:
    """How long a process waits after it has written the reason.

    The others should read it before a connection breaks. Process 0 hosts the store and exits last.
    """
    return 2.5 * interval_s if process_id else 5 * interval_s + 1


def agree_on_verdict(store: Store, text: str) -> str:
    """The reason why the run ends: the first one written counts for all."""
    try:
        return store.put_once(VERDICT, text)
    except CoordinatorLostError:
        return text


def exit_code(verdict: str) -> int:
    """The exit code for a verdict of any process."""
    return MISTAKE_CODE if _MISTAKE.match(verdict) else EXIT_CODE


def end_process(text: str, code: int = EXIT_CODE, wait_s: float = 0.0) -> None:
    """Print the reason and exit, without jax's shutdown, which would wait for hanging processes.

    Without a text, another process prints it.
    """
    # while the watchdog waits, a connection to a process that exited breaks in the main thread
    _ends.acquire()
    if ending_by_signal():  # which prints the reason itself; the watchdog reads it again
        time.sleep(LONGEST_END_S)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    shown = "\x1b[?25h" if os.isatty(2) else ""  # a live line may have hidden the cursor
    line = f"\nerror: {text}\n" if text else ""
    with contextlib.suppress(OSError):
        os.write(2, f"{shown}{line}".encode())
    time.sleep(wait_s)
    os._exit(code)
