"""SIGTERM, SIGHUP (a lost connection) and Ctrl-C become "stop after this step".

    with stop_on_signals() as stop:
        for step in range(first, steps):
            if agree(stop, step):
                break                       # save, and end with 0
            …

Before the first step there is nothing to save: there each of them ends the process at once, and so
does a second Ctrl-C later (in a program that calls `train`: KeyboardInterrupt, SystemExit).

## Why all processes stop before the same step

Maybe only one process receives the signal, but all must leave the loop at the same step; otherwise
the rest would wait forever in a collective. Let `lag` be how far the loop runs ahead of results:
before step n begins, each process has read the loss of step n − lag − 1 (lag 0: the previous step).

The signalled process, before it begins step s, writes `stop = s + lag + 1` to the store, and
continues. Another process is about to begin step n:

- n < stop: it may or may not see the text; in both cases it continues.
- n = stop: it has read the loss of step s. That loss is a mean over all processes, so the
  signalled process had begun s, after its write. The text is visible: it stops.
- n > stop is impossible: it would have stopped at n = stop.

If several processes are signalled, the first text counts (`put_once`) and the others read it; the
same argument holds for its writer. No process waits for another, so there is no deadlock. The cost
is one read of the store per step (0.3 ms on one machine, no device involved); `every` reduces it.
"""

import contextlib
import itertools
import os
import signal
from collections.abc import Iterator

from meshwright.errors import MeshwrightError
from meshwright.interrupt import ctrl_c_says, signal_calls, termination_calls
from meshwright.launch.coordinator import Store

_runs = itertools.count()  # the same in every process: each opens its loops in the same order


class Stop:
    """Whether and why this process should stop; `agree` decides when."""

    def __init__(self, key: str | None = None) -> None:
        self.reason: str | None = None
        self.stepping = False  # the first step has begun
        self.key = key or f"meshwright/stop/{next(_runs)}"

    @property
    def requested(self) -> bool:
        return self.reason is not None

    def request(self, reason: str) -> None:
        """Request a stop after this step; the first reason is kept."""
        self.reason = self.reason or reason


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Catch the signals inside the block; the previous handlers are restored after it.

    Python delivers signals to the main thread only: in other threads nothing is caught; use
    `request` to stop.
    """
    stop = Stop()

    interrupts = itertools.count()

    def take_termination(number: signal.Signals) -> bool:
        if stop.stepping and not stop.requested:
            _say(f"{number.name}: stopping after this step")
        if stop.stepping:
            stop.request(number.name)
        return stop.stepping

    def take_ctrl_c() -> bool:
        if not stop.stepping or next(interrupts):
            return False
        if not stop.requested:
            _say("Ctrl-C: stopping after this step; Ctrl-C again stops at once")
        stop.request("Ctrl-C")
        return True

    def line() -> str:
        return "stopped at once" if stop.stepping else "stopped before the first step"

    with (
        termination_calls(take_termination),
        signal_calls(signal.SIGINT, take_ctrl_c),
        ctrl_c_says(line),
    ):
        yield stop


def agree(stop: Stop, step: int, store: Store | None = None, lag: int = 1, every: int = 1) -> bool:
    """Whether every process leaves the loop now, before `step`. Call it once before each step.

    `store`: `coordinator_store()`, None for one process. `lag`: see the top of this file.
    `every`: check only before every n-th step, for thousands of processes with one store.
    """
    stop.stepping = True
    if store is None:
        return stop.requested
    if stop.requested:
        at = -(-(step + lag + 1) // every) * every
        store.put_once(stop.key, f"{at} {stop.reason}")
    if step % every:
        return False
    text = store.get(stop.key)
    if text is None:
        return False
    at_text, _, reason = text.partition(" ")
    stop.request(f"{reason} in another process")
    if step > int(at_text):
        raise MeshwrightError(
            f"the other processes stopped before step {at_text}, this one is about to begin step "
            f"{step}: the loop ran further ahead than lag={lag}"
        )
    return step == int(at_text)


def _say(text: str) -> None:
    # not print: a handler may run in the middle of another print
    with contextlib.suppress(OSError):
        os.write(2, f"\n{text}\n".encode())
