"""The shuffle by formula: a permutation, another for each seed and epoch, and an even one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.order import in_order, shuffled

SEEDS = st.integers(-(2**70), 2**70)


@given(count=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 10**6))
def test_every_epoch_meets_every_sequence_once(count: int, seed: int, epoch: int) -> None:
    sequences = shuffled(np.arange(count) + epoch * count, count, seed)
    assert sorted(sequences.tolist()) == list(range(count))


@given(count=st.integers(1, 2**40), seed=SEEDS, at=st.lists(st.integers(0, 2**44), min_size=1))
def test_a_position_asked_for_alone_gives_the_same_sequence(
    count: int, seed: int, at: list[int]
) -> None:
    sequences = shuffled(at, count, seed)
    assert sequences.tolist() == [shuffled([one], count, seed)[0] for one in at]
    assert (sequences >= 0).all()
    assert (sequences < count).all()


@given(seed=st.integers(0, 10**9))
def test_seeds_and_epochs_give_different_orders(seed: int) -> None:
    count = 500
    orders = [
        shuffled(np.arange(count) + epoch * count, count, seed + i)
        for i in range(3)
        for epoch in range(3)
    ]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            # two random orders of 500 agree in one place on average
            assert (one == other).sum() < 15


def test_sequences_fall_evenly_everywhere() -> None:
    """Pearson's statistic of (position, sequence) over many seeds, for sizes around a square."""
    for count in (7, 16, 17, 30):
        seeds = 1500
        table = np.zeros((count, count))
        for seed in range(seeds):
            table[np.arange(count), shuffled(np.arange(count), count, seed)] += 1
        expected = seeds / count
        statistic = ((table - expected) ** 2 / expected).sum()
        freedom = (count - 1) ** 2
        assert abs(statistic - freedom) < 6 * np.sqrt(2 * freedom), count


def test_neighbours_do_not_stay_neighbours() -> None:
    sequences = shuffled(np.arange(100_000), 100_000, seed=0)
    steps = np.abs(np.diff(sequences))
    # the mean distance of two random places is a third of the length
    assert abs(steps.mean() / 100_000 - 1 / 3) < 0.01
    assert (steps < 10).mean() < 0.001


def test_without_a_shuffle_sequences_come_in_order() -> None:
    assert in_order(range(7), 3).tolist() == [0, 1, 2, 0, 1, 2, 0]
