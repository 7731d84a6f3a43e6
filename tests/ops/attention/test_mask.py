"""Masks: what they let be seen, their simplest form, and mistakes in them."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ops.attention.reference import Sees

from meshwright.errors import MeshwrightError
from meshwright.ops.attention import EVERYTHING, Mask

masks = st.one_of(
    st.just(EVERYTHING),
    st.builds(Mask, offset=st.integers(-9, 9)),
    st.builds(Mask, window=st.integers(1, 12), offset=st.integers(-9, 9)),
    st.builds(Mask, block=st.integers(1, 12), offset=st.integers(-9, 9)),
)
sizes = st.integers(1, 9)


def seen(mask: Mask, queries: int, keys: int) -> np.ndarray:
    found = mask.seen(np.arange(queries), np.arange(keys))  # type: ignore[arg-type]
    return np.ones((queries, keys), bool) if found is None else np.asarray(found)


@given(mask=masks, queries=sizes, keys=sizes)
def test_a_query_sees_what_the_definition_says(mask: Mask, queries: int, keys: int) -> None:
    expected = Sees(**dataclasses.asdict(mask)).table(queries, keys)
    np.testing.assert_array_equal(seen(mask, queries, keys), expected)


@given(mask=masks, queries=sizes, keys=sizes)
def test_the_simplest_form_says_the_same(mask: Mask, queries: int, keys: int) -> None:
    simple = mask.within(queries, keys)
    np.testing.assert_array_equal(seen(simple, queries, keys), seen(mask, queries, keys))
    assert simple.within(queries, keys) == simple
    if mask.block is None and seen(mask, queries, keys).all():
        assert simple == EVERYTHING


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"window": 0}, "window=0 must be at least 1"),
        ({"block": 0}, "block=0 must be at least 1"),
        ({"window": -3}, "window=-3 is not a whole number"),
        ({"window": 2.5}, "window=2.5 is not a whole number"),
        ({"block": "8"}, "block='8' is not a whole number"),
        ({"causal": False, "window": 8}, "window=8 is causal; leave causal=True"),
        ({"window": 8, "block": 4}, r"a window \(8\) or a block \(4\), not both"),
    ],
)
def test_a_mask_that_cannot_be_is_an_error(fields: dict[str, object], words: str) -> None:
    with pytest.raises(MeshwrightError, match=words):
        Mask(**fields)  # type: ignore[arg-type]
