"""The limit of a decode step: weights and keys, read once."""

import pytest

from serve import SIZES, limit


@pytest.mark.parametrize(("name", "expected"), [("8b", 318), ("1.5b", 1920)])
def test_the_limit_at_batch_one_is_the_bandwidth_over_the_bytes(name: str, expected: int) -> None:
    found = limit(SIZES[name], 1, 640, 4.8e12, (2, 2))
    assert found == pytest.approx(expected, rel=0.02)
    assert limit(SIZES[name], 1, 640, 4.8e12, (1, 2)) == pytest.approx(2 * found, rel=0.03)
