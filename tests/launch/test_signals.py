"""SIGTERM and Ctrl-C ask; several processes leave the loop before the same step, always."""

import contextlib
import os
import random
import signal
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.launch.memory_store import MemoryStore

from meshwright import MeshwrightError
from meshwright.launch import Stop, agree, stop_on_signals


def test_sigterm_asks_to_stop_and_the_handlers_come_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with stop_on_signals() as stop:
        assert not agree(stop, 0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (stop.requested, stop.reason) == (True, "SIGTERM")
        assert agree(stop, 1)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def send(*signals: signal.Signals, stepping: bool = True) -> Stop:
    with stop_on_signals() as stop:
        assert not stepping or not agree(stop, 0)
        for number in signals:
            os.kill(os.getpid(), number)
    return stop


def test_the_second_ctrl_c_interrupts_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    assert send(signal.SIGINT).reason == "Ctrl-C"
    assert "Ctrl-C again stops at once" in capfd.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT, signal.SIGINT)


def test_only_a_second_ctrl_c_stops_at_once() -> None:
    assert send(signal.SIGINT, signal.SIGTERM).reason == "Ctrl-C"
    assert send(signal.SIGTERM, signal.SIGTERM).reason == "SIGTERM"
    assert send(signal.SIGTERM, signal.SIGINT).reason == "SIGTERM"
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGTERM, signal.SIGINT, signal.SIGINT)


def test_before_the_first_step_a_signal_ends_at_once() -> None:
    with pytest.raises(SystemExit) as ended:
        send(signal.SIGTERM, stepping=False)
    assert ended.value.code == 143
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT, stepping=False)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@contextlib.contextmanager
def hangup_disposition(disposition: signal.Handlers) -> Iterator[None]:
    """What SIGHUP does, however the tests were started."""
    before = signal.signal(signal.SIGHUP, disposition)
    try:
        yield
        assert signal.getsignal(signal.SIGHUP) is disposition
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_lost_connection_is_a_request_to_stop() -> None:
    with hangup_disposition(signal.SIG_DFL):
        assert send(signal.SIGHUP).reason == "SIGHUP"
        assert send(signal.SIGHUP, signal.SIGHUP, signal.SIGTERM).reason == "SIGHUP"
        with pytest.raises(SystemExit) as ended:
            send(signal.SIGHUP, stepping=False)
    assert ended.value.code == 129


def test_under_nohup_a_lost_connection_is_ignored() -> None:
    with hangup_disposition(signal.SIG_IGN):
        assert not send(signal.SIGHUP).requested
        assert not send(signal.SIGHUP, stepping=False).requested
        assert send(signal.SIGHUP, signal.SIGTERM).reason == "SIGTERM"


def test_outside_the_main_thread_a_stop_is_asked_for_by_hand() -> None:
    asked = []

    def work() -> None:
        with stop_on_signals() as stop:
            stop.request("time is up")
            asked.append((agree(stop, 1), stop.reason))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert asked == [(True, "time is up")]


def simulate(
    processes: int, steps: int, lag: int, every: int, told: int, signals: dict[int, int], seed: int
) -> list[int]:
    """The step before which each process left; any order of turns that collectives allow.

    A process may begin step n once every process has begun step n - lag - 1: then that step's loss,
    a mean over all of them, can be looked at. `told` is the lag that `agree` is told. `signals`:
    process to the step before which it is signalled.
    """
    order = random.Random(seed)
    fast = order.randrange(processes)
    store = MemoryStore()
    stops = [Stop(key="stop") for _ in range(processes)]
    next_step = [0] * processes
    left: dict[int, int] = {}
    while len(left) < processes:
        able = [
            p
            for p in range(processes)
            if p not in left and min(next_step) >= next_step[p] - lag  # all began n - lag - 1
        ]
        assert able, f"nobody can continue: {next_step}, left {left}"
        # one process is often faster: that reaches the ends of what the lag allows
        process = fast if fast in able and order.random() < 0.7 else order.choice(able)
        step = next_step[process]
        if signals.get(process, steps) <= step:
            stops[process].request("SIGTERM")
        if step == steps or agree(stops[process], step, store, told, every):
            left[process] = step
            next_step[process] = step
        else:
            next_step[process] += 1
    return [left[process] for process in range(processes)]


@given(
    processes=st.integers(2, 5),
    lag=st.integers(0, 4),
    every=st.integers(1, 4),
    signals=st.dictionaries(st.integers(0, 4), st.integers(0, 30), max_size=5),
    seed=st.integers(0, 2**32),
)
def test_every_process_leaves_before_the_same_step_in_any_order_of_events(
    processes: int, lag: int, every: int, signals: dict[int, int], seed: int
) -> None:
    steps = 40
    left = simulate(processes, steps, lag, every, lag, signals, seed)
    first = min((at for process, at in signals.items() if process < processes), default=steps)
    assert len(set(left)) == 1
    # soon after the first signal, and not before it
    assert min(first, steps) <= left[0] <= min(steps, first + 2 * lag + 1 + every)


def test_a_loop_that_runs_further_ahead_than_it_said_is_caught() -> None:
    caught = 0
    for seed in range(50):
        try:
            left = simulate(2, 40, lag=4, every=1, told=0, signals={0: 10}, seed=seed)
        except (MeshwrightError, AssertionError) as mistake:
            caught += "ran further ahead than lag=0" in str(mistake)
        else:
            assert len(set(left)) == 1
    assert caught


def test_one_process_stops_without_a_store() -> None:
    stop = Stop()
    stop.request("the disk is full")
    stop.request("something later")
    assert agree(stop, 7)
    assert stop.reason == "the disk is full"
