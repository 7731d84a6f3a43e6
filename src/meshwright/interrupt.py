"""Ctrl-C in a terminal prints one line and ends the process, also while jax is imported.

    end_on_ctrl_c()                                   # the command line does, before it imports jax
    with ctrl_c_says(lambda: "stopped after 3 files"):
        with before_end(lambda: shutil.rmtree(scratch)):
            …

KeyboardInterrupt is not enough: during an import it prints a traceback of another library, in a
callback (jax has one for the garbage collector) it is printed and ignored, and while the main
thread is in a compiler it is not raised at all. So a separate thread receives the signal and ends
the process.

A program that only imports meshwright is not affected: there Ctrl-C raises KeyboardInterrupt.
"""

import atexit
import contextlib
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TypeVar

# 128 + the number, as shells have it; SIGHUP comes when a terminal or ssh connection is gone
EXIT_CODES = {signal.SIGHUP: 129, signal.SIGINT: 130, signal.SIGTERM: 143}
LISTENER = "ctrl-c"  # the thread that waits for signals, and holds no lock while it does
LONGEST_END_S = 30.0  # for what is cleaned up; a second Ctrl-C does not wait for it

_T = TypeVar("_T")
_listening = False
_ending = threading.Event()
_saying = threading.Lock()
# innermost last
_takers: dict[int, list[Callable[[], bool]]] = {number: [] for number in EXIT_CODES}
_lines: list[Callable[[], str]] = [lambda: "stopped"]
_before_end: list[Callable[[], object]] = []


def end_on_ctrl_c() -> None:
    """From now on Ctrl-C ends this process with one line. For programs, in their main thread."""
    global _listening
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)  # the number of each signal, at once
    signal.signal(signal.SIGINT, lambda number, frame: None)  # no KeyboardInterrupt
    threading.Thread(target=_listen, args=(read,), name=LISTENER, daemon=True).start()
    # while Python shuts down threads do not run any more: there the signal itself ends the process
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)
    _listening = True


@contextlib.contextmanager
def signal_calls(number: signal.Signals, take: Callable[[], bool]) -> Iterator[None]:
    """Inside, the signal calls `take`; if that is False, it ends the process."""
    with _registered(_takers[number], take):
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.getsignal(number)

        def handle(number: int, frame: FrameType | None) -> None:
            if _listening or take():  # where there is a listener, it calls `take`
                return
            if callable(before):
                before(number, frame)
            elif number == signal.SIGINT:
                raise KeyboardInterrupt
            else:
                raise SystemExit(EXIT_CODES[signal.Signals(number)])

        signal.signal(number, handle)
        try:
            yield
        finally:
            signal.signal(number, before)


@contextlib.contextmanager
def termination_calls(take: Callable[[signal.Signals], bool]) -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP call `take`, as in `signal_calls`.

    SIGHUP stays ignored where it is ignored: so `nohup` lets a process outlive its terminal.
    """
    with contextlib.ExitStack() as calls:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGTERM or not hangup_is_ignored():
                calls.enter_context(signal_calls(number, functools.partial(take, number)))
        yield


def hangup_is_ignored() -> bool:
    """Whether this process was started with nohup."""
    return signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def ctrl_c_says(line: Callable[[], str]) -> contextlib.AbstractContextManager[None]:
    """Inside, what Ctrl-C prints before it ends the process."""
    return _registered(_lines, line)


def before_end(action: Callable[[], object]) -> contextlib.AbstractContextManager[None]:
    """Inside, what Ctrl-C does before it ends the process, as `finally` would."""
    return _registered(_before_end, action)


@contextlib.contextmanager
def whatever_ends(action: Callable[[], object]) -> Iterator[None]:
    """Inside, what Ctrl-C, SIGTERM and SIGHUP do before they end the process."""
    with before_end(action), termination_calls(lambda number: False):
        yield


def ending_by_signal() -> bool:
    """Whether a signal is ending this process now."""
    return _ending.is_set()


def unless_ending(action: Callable[[], object]) -> None:
    """Call it, but not after the line of a signal that is ending this process."""
    with _saying:
        if not _ending.is_set():
            action()


@contextlib.contextmanager
def _registered(entries: list[_T], entry: _T) -> Iterator[None]:
    entries.append(entry)
    try:
        yield
    finally:
        entries.remove(entry)


def _listen(read: int) -> None:
    while data := os.read(read, 64):
        for number in data:
            if number == signal.SIGINT or _takers.get(number):
                _end_unless_taken(number)


def _end_unless_taken(number: int) -> None:
    if _ending.is_set():
        os._exit(EXIT_CODES[signal.Signals(number)])
    if _takers[number] and _takers[number][-1]():
        return
    _ending.set()
    shown = "\x1b[?25h\n" if os.isatty(2) else ""  # a live line may have hidden the cursor
    with _saying, contextlib.suppress(OSError):
        os.write(2, f"{shown}{_lines[-1]()}\n".encode())
    # in a thread, so that this one hears a second Ctrl-C
    threading.Thread(target=_end, args=(EXIT_CODES[signal.Signals(number)],), daemon=True).start()


def _end(code: int) -> None:
    limit = threading.Timer(LONGEST_END_S, os._exit, (code,))
    limit.daemon = True
    limit.start()
    for action in reversed(_before_end):
        with contextlib.suppress(Exception):
            action()
    os._exit(code)
