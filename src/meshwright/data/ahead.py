"""Read the next batches in background threads while the devices compute."""

import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Read = TypeVar("Read")
THREADS = 2
AHEAD = 4  # steps


def read_ahead(
    read: Callable[[int], Read],
    start: int,
    stop: int | None,
    threads: int = THREADS,
    ahead: int = AHEAD,
) -> Iterator[tuple[int, Read]]:
    """Yield (step, read(step)) for each step from `start`, reading up to `ahead` steps early.

    >>> list(read_ahead(lambda step: step * step, 2, 5, threads=1, ahead=2))
    [(2, 4), (3, 9), (4, 16)]
    """
    stop = sys.maxsize if stop is None else stop
    waiting: deque[tuple[int, Future[Read]]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="meshwright-read-ahead")
    step = start
    try:
        while step < stop or waiting:
            while step < stop and len(waiting) < max(ahead, threads):
                waiting.append((step, pool.submit(read, step)))
                step += 1
            number, future = waiting.popleft()
            yield number, future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
