"""The steps of a ring against the mask they stand for, place by place; no device is needed."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ops.attention.reference import Sees, zigzag

from meshwright.ops.attention import Mask
from meshwright.ops.attention.ring_steps import (
    RingStep,
    RingSteps,
    key_ends,
    keys_seen,
    ring_steps_of,
)


def work(steps: RingSteps, step: RingStep, length: int) -> np.ndarray:
    """[queries, keys] that a device computes and uses at a index, from what ring_steps.py says of it."""
    index, used = step.index, keys_seen(steps, step)
    mask = steps.first if index == 0 else None
    if index > steps.full:
        mask = steps.masked[index - steps.full - 1]
    if mask is not None:
        seen = Sees(**dataclasses.asdict(mask)).table(length, length)
    else:
        seen = np.ones((length, length), bool)
    ends = key_ends(steps, step, length)
    if ends is not None:
        seen &= np.arange(length)[None] < np.asarray(ends)[:, None]
    if mask is not None or steps.order != "zigzag":
        return seen & bool(used is None or used)
    seen, half = np.zeros((length, length), bool), length // 2
    if step.before:
        seen[:, :half] = True
    else:
        seen[half:] = True
    return seen


def all_steps(steps: RingSteps, ways: int, length: int, places: np.ndarray) -> np.ndarray:
    """How often each query meets each key, by their places in the text."""
    met = np.zeros((ways * length,) * 2, int)
    held = places.reshape(ways, length)
    for device in range(ways):
        for index in range(steps.exchanges + 1):
            found = work(steps, RingStep(np.int32(device), index, ways), length)
            met[np.ix_(held[device], held[(device - index) % ways])] += found
    return met


@given(ways=st.integers(2, 6), length=st.integers(1, 8), data=st.data())
def test_every_query_meets_each_key_it_sees_once(
    ways: int, length: int, data: st.DataObject
) -> None:
    windows = st.builds(lambda n: Mask(window=n), st.integers(1, ways * length + 1))
    blocks = st.integers(1, ways * length + 1)
    mask = data.draw(
        st.one_of(
            st.just(Mask()),
            st.just(Mask(causal=False)),
            windows,
            st.builds(lambda n: Mask(block=n), blocks),
        )
    )
    steps = ring_steps_of(mask.within(ways * length, ways * length), "contiguous", ways, length)
    expected = Sees(**dataclasses.asdict(mask)).table(ways * length, ways * length)
    met = all_steps(steps, ways, length, np.arange(ways * length))
    np.testing.assert_array_equal(met, expected)


@given(ways=st.integers(2, 6), chunk=st.integers(1, 4), block=st.sampled_from([None, 1, 2]))
def test_in_zigzag_order_too(ways: int, chunk: int, block: int | None) -> None:
    length = 2 * chunk * (block or 1)
    mask = Mask(block=block)
    steps = ring_steps_of(mask, "zigzag", ways, length)
    expected = Sees(block=block).table(ways * length, ways * length)
    met = all_steps(steps, ways, length, zigzag(ways * length, ways))
    np.testing.assert_array_equal(met, expected)


@pytest.mark.parametrize("ways", [2, 4, 8])
def test_in_zigzag_order_every_device_has_the_same_work_at_every_ring_step(ways: int) -> None:
    length = 8

    def useful(order: str) -> np.ndarray:
        steps = ring_steps_of(Mask(), order, ways, length)
        return np.array(
            [
                [work(steps, RingStep(np.int32(i), t, ways), length).sum() for i in range(ways)]
                for t in range(ways)
            ]
        )

    zigzag, contiguous = useful("zigzag"), useful("contiguous")
    assert (zigzag == zigzag[:, :1]).all()
    # in the order of the text the last device works at every index, the first at one
    np.testing.assert_array_equal((contiguous > 0).sum(0), np.arange(1, ways + 1))


@pytest.mark.parametrize(
    ("window", "exchanges", "full"),
    [(1, 0, 0), (2, 1, 0), (8, 1, 0), (9, 1, 0), (10, 2, 0), (16, 2, 1), (17, 2, 1), (18, 3, 1)],
)
def test_a_window_makes_no_exchange_more_than_it_reaches(
    window: int, exchanges: int, full: int
) -> None:
    steps = ring_steps_of(Mask(window=window), "contiguous", 4, 8)
    assert (steps.exchanges, steps.full) == (exchanges, full)
