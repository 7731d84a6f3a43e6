"""Read the next batches in background threads (Grain) while the devices compute."""

import functools
import importlib
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any, TypeVar

logger = logging.getLogger("meshwright")

Read = TypeVar("Read")


def read_ahead(
    read: Callable[[int], Read], start: int, stop: int | None, threads: int, ahead: int
) -> Iterator[tuple[int, Read]]:
    """Yield (step, read(step)) for each step from `start`, reading up to `ahead` steps early.

    >>> list(read_ahead(lambda step: step * step, 2, 5, threads=1, ahead=2))
    [(2, 4), (3, 9), (4, 16)]
    """
    stop = sys.maxsize if stop is None else stop
    try:
        grain: Any = importlib.import_module("grain")
    except ImportError:
        _say_once()
        yield from _plain(read, start, stop, ahead)
        return
    steps = grain.MapDataset.range(start, stop).map(lambda step: (int(step), read(int(step))))
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=max(ahead, threads))
    with closing(iter(steps.to_iter_dataset(options))) as batches:
        yield from batches


def _plain(
    read: Callable[[int], Read], start: int, stop: int, ahead: int
) -> Iterator[tuple[int, Read]]:
    waiting: deque[tuple[int, Future[Read]]] = deque()
    pool = ThreadPoolExecutor(1, thread_name_prefix="meshwright-read-ahead")
    step = start
    try:
        while step < stop or waiting:
            while step < stop and len(waiting) < max(ahead, 1):
                waiting.append((step, pool.submit(read, step)))
                step += 1
            number, future = waiting.popleft()
            yield number, future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@functools.cache
def _say_once() -> None:
    logger.warning(
        "grain is not installed: one plain thread reads batches ahead "
        "(to use Grain: pip install grain)"
    )
