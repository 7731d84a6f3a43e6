"""The schedule of a mixture: right proportions at every prefix, each sample of a source once."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.schedule import LONGEST_PERIOD, Schedule
from meshwright.errors import MeshwrightError

WEIGHTS = st.lists(st.integers(1, 60), min_size=1, max_size=8)


@given(weights=WEIGHTS, start=st.integers(0, 10**12))
def test_every_prefix_holds_each_source_by_its_weight_to_within_one_sample(
    weights: list[int], start: int
) -> None:
    schedule = Schedule.of_weights(weights)
    samples = 2 * schedule.period + 5
    source, _ = schedule.assign(range(samples))
    counts = (source[:, None] == np.arange(len(weights))).cumsum(axis=0)
    wanted = np.arange(1, samples + 1)[:, None] * np.array(weights) / sum(weights)
    assert np.abs(counts - wanted).max() < 1
    # and far from the start, from one sample: how many of its source came before
    (far,), (number,) = schedule.assign([start])
    assert abs(int(number) - Fraction(start * weights[far], sum(weights))) < 1


@given(weights=WEIGHTS)
def test_the_samples_of_a_source_are_numbered_without_gaps(weights: list[int]) -> None:
    schedule = Schedule.of_weights(weights)
    source, number = schedule.assign(range(3 * schedule.period))
    for i in range(len(weights)):
        assert number[source == i].tolist() == list(range(int((source == i).sum())))


@pytest.mark.parametrize(
    ("weights", "quotas"),
    [
        (["0.7", "0.3"], (7, 3)),
        ([0.7, 0.2, 0.1], (7, 2, 1)),
        ([2, 1], (2, 1)),
        (["1e-1", "9e-1"], (1, 9)),
        ([5], (1,)),
        ([Fraction(1, 3), Fraction(2, 3)], (1, 2)),
    ],
)
def test_weights_are_taken_exactly(weights: list[str], quotas: tuple[int, ...]) -> None:
    assert Schedule.of_weights(weights).quotas == quotas


@settings(max_examples=20)
@given(st.lists(st.floats(1e-9, 1e9), min_size=2, max_size=6))
def test_odd_weights_are_rounded_to_the_longest_period(weights: list[float]) -> None:
    schedule = Schedule.of_weights(weights)
    assert schedule.period <= LONGEST_PERIOD + len(weights)
    shares = np.array(schedule.quotas) / schedule.period
    assert np.abs(shares - np.array(weights) / sum(weights)).max() < len(weights) / LONGEST_PERIOD
    assert min(schedule.quotas) >= 1


@pytest.mark.parametrize("weight", ["0", "-1", "much", "nan", "inf", ""])
def test_weights_that_are_none_are_named(weight: str) -> None:
    with pytest.raises(MeshwrightError, match="weight"):
        Schedule.of_weights(["1", weight])
