"""Waiting for what must come. The limit ends a test that hangs; it is no measure of speed.

A test fails for what happens, not for when: times belong to benchmarks/. `tests/test_suite.py` holds
tests to that.
"""

import time
from collections.abc import Callable

PATIENCE_S = 1200.0  # as long as a busy machine could need, and more


def eventually(condition: Callable[[], object]) -> None:
    """Wait until `condition()` is true."""
    limit = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > limit:
            raise TimeoutError(f"nothing came of it in {PATIENCE_S:g} s")
        time.sleep(0.01)
