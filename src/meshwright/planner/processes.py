"""Map a function over items in as many processes as this machine has CPUs, on Linux.

for offer in in_processes(offer_on, machines): ...
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from meshwright.interrupt import LISTENER, before_end

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_work: tuple[Callable[[Any], Any], Sequence[Any]]  # what processes inherit


def in_processes(run: Callable[[_Item], _Result], items: Sequence[_Item]) -> Iterator[_Result]:
    """`map(run, items)`, in their order. Results, and exceptions, are pickled."""
    count, done = min(_cpus(), len(items)), 0
    if count > 1 and _can_fork():
        for result in _by_forked(run, items, count):
            yield result
            done += 1
    yield from map(run, items[done:])


def _by_forked(
    run: Callable[[_Item], _Result], items: Sequence[_Item], count: int
) -> Iterator[_Result]:
    """The first results: all of them unless a process cannot be made, or is killed."""
    import multiprocessing
    from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor

    global _work
    _work = run, items
    others = set(multiprocessing.active_children())

    def kill() -> None:
        for process in set(multiprocessing.active_children()) - others:
            process.kill()

    with before_end(kill):
        try:
            pool = ProcessPoolExecutor(count, multiprocessing.get_context("fork"), _begin)
            answers = [pool.submit(_result_of, index) for index in range(len(items))]
        except (OSError, NotImplementedError, RuntimeError):  # no memory, process, thread is left
            kill()
            return
        try:
            for answer in answers:
                yield answer.result()
        except BrokenProcessPool:  # one was killed, as where memory is short
            return
        finally:
            kill()  # an error does not wait for what still runs
            pool.shutdown()


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
    with contextlib.suppress(RuntimeError):  # no thread is left
        threading.Thread(target=_end_with_first, daemon=True).start()


def _end_with_first() -> None:
    import multiprocessing

    first = multiprocessing.parent_process()
    assert first is not None
    first.join()
    os._exit(1)


def _result_of(index: int) -> Any:
    run, items = _work
    return run(items[index])
