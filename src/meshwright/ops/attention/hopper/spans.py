"""Which tiles of keys each tile of queries attends to, and which need no mask.

>>> guide("queries", Mask(), None, Lengths(256, 256)).spans[0].tolist()  # causal
[[0, 1, 1, 1], [0, 1, 1, 1], [0, 0, 1, 2], [0, 0, 1, 2]]

Each entry is for one run (tile) of 64 queries and counts runs of 128 keys: attention covers runs
[first, last), and those between the two middle numbers need no mask.
"""

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwright.ops.attention.mask import Mask

_PAIRS = 8  # of a sequence and a head, whose thread blocks may run at the same time
_CACHED = 160 * 2**20  # bytes that they may read: more than the cache has, since they read in step


class Lengths(NamedTuple):
    q: int
    k: int


RUNS = Lengths(q=64, k=128)  # tile sizes of the kernels


def tile_and_pair(block: Any, tiles: int, pairs: int, pair_bytes: int) -> tuple[Any, Any]:
    """What a thread block has: a tile, and a pair of a sequence and a head.

    The first thread blocks have the first tile of a few pairs, the next ones the second. Callers
    number the tiles that take longest first: so none of these starts last, when there is nothing
    left for the other multiprocessors. Of `pair_bytes`, which all tiles of a pair read, those of
    as many pairs run together as the cache has room for.
    """
    together = math.gcd(_PAIRS, pairs)
    while together > 1 and together * pair_bytes > _CACHED:
        together //= 2
    group, place = lax.div(block, together * tiles), lax.rem(block, together * tiles)
    return lax.div(place, together), group * together + lax.rem(place, together)


class Documents(NamedTuple):
    """Segment ids of queries and keys."""

    q: jax.Array  # [batch, queries]
    k: jax.Array  # [batch, keys]


class Span(NamedTuple):
    """The runs that one run attends to, and those that need no mask."""

    first: Any
    whole: Any
    whole_end: Any
    end: Any


class Guide(NamedTuple):
    """Inputs of a kernel besides queries, keys and values."""

    q_documents: Any  # [batch, queries]; without documents a placeholder
    k_documents: Any
    spans: Any  # [batch or 1, runs, 4]


def guide(
    of: Literal["queries", "keys"],
    mask: Mask,
    documents: Documents | None,
    lengths: Lengths,
    runs: Lengths = RUNS,
) -> Guide:
    """Spans of keys for runs of queries; or spans of queries for runs of keys.

    Without documents the spans are the same for all sequences, and known at compile time.
    """
    if documents is None:
        found = _without_documents(of, mask, lengths, runs)
        return Guide(found, found, found)
    some, whole = _by_place(jnp, mask, lengths, runs)
    alike, same = _by_document(documents, runs)
    return Guide(*documents, _ends(jnp, some & alike, whole & same, of))


def masked(
    scores: jax.Array,
    mask: Mask,
    query: jax.Array,
    key: jax.Array,
    documents: tuple[jax.Array, jax.Array] | None,
) -> jax.Array:
    """Scores of query-key pairs, -inf where positions or documents mask them."""
    seen = mask.pairs_seen(query, key)
    if documents is not None:
        same = documents[0] == documents[1]
        seen = same if seen is None else seen & same
    return scores if seen is None else jnp.where(seen, scores, -jnp.inf)


@functools.lru_cache(maxsize=64)
def _without_documents(
    of: Literal["queries", "keys"], mask: Mask, lengths: Lengths, runs: Lengths
) -> np.ndarray:
    found: np.ndarray = _ends(np, *_by_place(np, mask, lengths, runs), of)
    found.setflags(write=False)
    return found


def _by_place(on: Any, mask: Mask, lengths: Lengths, runs: Lengths) -> tuple[Any, Any]:
    """[1, runs of queries, runs of keys]: whether any pair, and whether every pair, is unmasked.

    `on` is numpy, or jax's.
    """
    q_low = on.arange(lengths.q // runs.q, dtype=np.int32)[None, :, None] * runs.q + mask.offset
    k_low = on.arange(lengths.k // runs.k, dtype=np.int32)[None, None, :] * runs.k
    q_high, k_high = q_low + (runs.q - 1), k_low + (runs.k - 1)
    some = whole = on.full((1, q_low.size, k_low.size), True)
    if mask.block is not None:
        some = some & (q_high // mask.block >= k_low // mask.block)
        whole = whole & (q_low // mask.block >= k_high // mask.block)
    elif mask.causal:
        some = some & (q_high >= k_low)
        whole = whole & (q_low >= k_high)
    if mask.window is not None:
        some = some & (q_low - k_high < mask.window)
        whole = whole & (q_high - k_low < mask.window)
    return some, whole


def _by_document(documents: Documents, runs: Lengths) -> tuple[jax.Array, jax.Array]:
    """The same by documents, [batch, ..]. Only the range of ids in each run is compared: with ids
    out of order a run may count as unmasked although it is masked, never the other way around."""
    q_least, q_most = (x[:, :, None] for x in _range(documents.q, runs.q))
    k_least, k_most = (x[:, None, :] for x in _range(documents.k, runs.k))
    some = (q_least <= k_most) & (k_least <= q_most)
    return some, (q_least == k_most) & (k_least == q_most)


def _range(segments: jax.Array, run: int) -> tuple[jax.Array, jax.Array]:
    by_run = segments.reshape(segments.shape[0], -1, run)
    return jnp.min(by_run, axis=-1), jnp.max(by_run, axis=-1)


def _ends(on: Any, some: Any, whole: Any, of: Literal["queries", "keys"]) -> Any:
    """[batch, runs, 4]: the Span of each run."""
    if of == "keys":
        some, whole = some.transpose(0, 2, 1), whole.transpose(0, 2, 1)
    number = some.shape[2]
    at = on.arange(number, dtype=np.int32)[None, None]
    end = on.max(on.where(some, at + 1, 0), axis=2)
    first = on.minimum(on.min(on.where(some, at, number), axis=2), end)  # of none: the end
    whole_first = on.min(on.where(whole, at, number), axis=2)
    in_line = whole | (at < whole_first[:, :, None])
    whole_end = on.min(on.where(in_line, number, at), axis=2)
    inner = (on.clip(x, first, end) for x in (whole_first, whole_end))
    return on.stack([first, *inner, end], axis=-1).astype(np.int32)
