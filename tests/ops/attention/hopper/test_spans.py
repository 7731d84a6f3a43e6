"""Runs of queries and keys that a mask and documents let see each other, against pairs one by one."""

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from meshwright.ops.attention.hopper.spans import Documents, Lengths, guide, tile_and_pair
from meshwright.ops.attention.mask import Mask

MASKS = [
    Mask(),
    Mask(causal=False),
    Mask(window=3),
    Mask(window=13),
    Mask(block=6),
    Mask(window=9, offset=16),
    Mask(offset=8),
]
RUNS = Lengths(4, 8)


def pairs(mask: Mask, documents: Documents | None, lengths: Lengths) -> np.ndarray:
    """[rows, queries, keys]: who sees whom."""
    seen = mask.seen(jnp.arange(lengths.q), jnp.arange(lengths.k))
    seen = np.ones((1, *lengths), bool) if seen is None else np.asarray(seen)[None]
    if documents is not None:
        seen = seen & (np.asarray(documents.q)[:, :, None] == np.asarray(documents.k)[:, None, :])
    return seen


def check(of: str, mask: Mask, documents: Documents | None, lengths: Lengths, tight: bool) -> None:
    found = np.asarray(guide(of, mask, documents, lengths, RUNS).spans)  # type: ignore[arg-type]
    seen = pairs(mask, documents, lengths)
    rows = seen.shape[0]
    tiles = seen.reshape(rows, lengths.q // RUNS.q, RUNS.q, lengths.k // RUNS.k, RUNS.k)
    some, whole = tiles.any(axis=(2, 4)), tiles.all(axis=(2, 4))
    if of == "keys":
        some, whole = some.swapaxes(1, 2), whole.swapaxes(1, 2)
    assert found.shape == (*some.shape[:2], 4)
    for row, run in np.ndindex(*some.shape[:2]):
        first, whole_first, whole_end, end = found[row, run]
        assert first <= whole_first <= whole_end <= end
        assert not some[row, run, :first].any()
        assert not some[row, run, end:].any()
        assert whole[row, run, whole_first:whole_end].all()
        if tight:  # nothing is looked at in vain, and masked only where it must be
            at = np.flatnonzero(some[row, run])
            assert (first, end) == ((at[0], at[-1] + 1) if at.size else (0, 0))
            assert whole_end - whole_first == whole[row, run].sum()


LENGTHS = [Lengths(32, 32), Lengths(16, 32), Lengths(32, 16)]


@pytest.mark.parametrize("of", ["queries", "keys"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_without_documents_just_what_is_seen_is_looked_at(
    of: str, lengths: Lengths, mask: Mask
) -> None:
    check(of, mask, None, lengths, tight=True)


@pytest.mark.parametrize("of", ["queries", "keys"])
@given(st.integers(0, 2**32 - 1), st.integers(1, 9))
def test_documents_in_order_leave_out_all_that_lies_apart(of: str, seed: int, number: int) -> None:
    rng = np.random.default_rng(seed)
    documents = jnp.asarray(np.sort(rng.integers(0, number, (2, 32)), axis=1).astype(np.int32))
    both = Documents(documents, documents)
    check(of, Mask(causal=False), both, Lengths(32, 32), tight=True)


@pytest.mark.parametrize("of", ["queries", "keys"])
@given(
    st.sampled_from(MASKS),
    st.sampled_from(LENGTHS),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 3, 4]),
)
def test_documents_in_any_order_are_never_left_out(
    of: str, mask: Mask, lengths: Lengths, seed: int, each: int
) -> None:
    rng = np.random.default_rng(seed)
    both = (rng.integers(-3, 3, (2, 32)).repeat(each, axis=1)[:, :length] for length in lengths)
    documents = Documents(*(jnp.asarray(x.astype(np.int32)) for x in both))
    check(of, mask, documents, lengths, tight=False)


def test_four_documents_take_a_quarter_of_the_work() -> None:
    length = 1024
    documents = jnp.repeat(jnp.arange(4), length // 4)[None]
    both = Documents(documents, documents)
    found = guide("queries", Mask(causal=False), both, Lengths(length, length))
    first, whole_first, whole_end, end = np.asarray(found.spans)[0].T
    assert (end - first).tolist() == [2] * 16
    assert (whole_first == first).all()
    assert (whole_end == end).all()


@pytest.mark.parametrize(
    ("pairs", "pair_bytes"), [(1, 1), (6, 1), (16, 1), (16, 2**25), (8, 2**30)]
)
def test_every_thread_block_has_another_tile(pairs: int, pair_bytes: int) -> None:
    tiles = 5
    blocks = jnp.arange(tiles * pairs)
    tile, pair = (np.asarray(x) for x in tile_and_pair(blocks, tiles, pairs, pair_bytes))
    assert sorted(zip(tile, pair, strict=True)) == [
        (t, p) for t in range(tiles) for p in range(pairs)
    ]
    assert np.all(np.diff(tile[pair == 0]) == 1)  # the first tile first


def test_few_pairs_run_together_and_fewer_that_read_much() -> None:
    def together(pairs: int, pair_bytes: int) -> int:
        tile, _ = tile_and_pair(jnp.arange(4 * pairs), 4, pairs, pair_bytes)
        return int(np.argmax(np.asarray(tile) > 0))

    assert [together(pairs, 1) for pairs in (1, 4, 6, 64)] == [1, 4, 2, 8]
    assert [together(64, size * 2**20) for size in (20, 64, 200)] == [8, 2, 1]
