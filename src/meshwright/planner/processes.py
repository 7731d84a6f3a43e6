"""A function of each of several things, in as many processes as this machine has CPUs.

for offer in in_processes(offer_on, machines): ...
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from meshwright.interrupt import LISTENER, before_end

_Thing = TypeVar("_Thing")
_Result = TypeVar("_Result")
_work: tuple[Callable[[Any], Any], Sequence[Any]]  # what processes inherit


def in_processes(run: Callable[[_Thing], _Result], things: Sequence[_Thing]) -> Iterator[_Result]:
    """`map(run, things)`, in their order. Results, and exceptions, are pickled."""
    count = min(_cpus(), len(things))
    if count < 2 or not _can_fork():
        yield from map(run, things)
        return
    import multiprocessing

    def kill() -> None:
        for process in multiprocessing.active_children():
            process.kill()

    global _work
    _work = run, things
    with before_end(kill), multiprocessing.get_context("fork").Pool(count, _begin) as pool:
        yield from pool.imap(_of, range(len(things)))


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def _can_fork() -> bool:
    """A copy of a process has none of its threads: what these do or lock must not be needed."""
    from jax._src import xla_bridge

    threads = {thread for thread in threading.enumerate() if thread.name != LISTENER}
    return (
        sys.platform == "linux"
        and threads == {threading.main_thread()}
        and not xla_bridge.backends_are_initialized()
    )


def _begin() -> None:
    """Ctrl-C ends the first process, which ends this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)  # of the first process


def _of(place: int) -> Any:
    run, things = _work
    return run(things[place])
