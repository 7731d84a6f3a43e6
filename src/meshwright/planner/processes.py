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
    count, done = min(_cpus(), len(things)), 0
    if count > 1 and _can_fork():
        import multiprocessing
        from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor

        def kill() -> None:
            for process in multiprocessing.active_children():
                process.kill()

        global _work
        _work = run, things
        fork = multiprocessing.get_context("fork")
        try:
            with before_end(kill), ProcessPoolExecutor(count, fork, _begin) as pool:
                for result in pool.map(_of, range(len(things))):
                    yield result
                    done += 1
        except BrokenProcessPool:  # one was killed, as where memory is short: the rest is run here
            pass
    yield from map(run, things[done:])


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def _can_fork() -> bool:
    """A copy of a process has none of its threads: what these do or lock must not be needed."""
    import multiprocessing

    from jax._src import xla_bridge

    threads = {thread for thread in threading.enumerate() if thread.name != LISTENER}
    return (
        sys.platform == "linux"
        and threads == {threading.main_thread()}
        and not multiprocessing.current_process().daemon  # which may have no children
        and not xla_bridge.backends_are_initialized()
    )


def _begin() -> None:
    """Ctrl-C ends the first process; its end, of whatever kind, ends this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a caller may have a handler
    signal.set_wakeup_fd(-1)  # of the first process
    threading.Thread(target=_end_with_first, daemon=True).start()


def _end_with_first() -> None:
    import multiprocessing

    first = multiprocessing.parent_process()
    assert first is not None
    first.join()
    os._exit(1)


def _of(place: int) -> Any:
    run, things = _work
    return run(things[place])
