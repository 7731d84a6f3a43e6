"""A shuffle that is a formula: the n-th row of a random order, with no table of it.

Any position can be asked for alone, so a run resumes at any step and on any number of hosts.

>>> shuffled(range(7), 7, seed=1).tolist()  # the first epoch of 7 rows
[6, 2, 5, 0, 4, 3, 1]
>>> shuffled(range(7, 14), 7, seed=1).tolist()  # the second is in another order
[3, 6, 0, 2, 5, 1, 4]
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

ROUNDS = 8


def in_order(positions: npt.ArrayLike, count: int) -> Rows:
    """Position to row, without a shuffle: every epoch reads rows 0 to count - 1."""
    return np.asarray(positions, np.int64) % count


def shuffled(positions: npt.ArrayLike, count: int, seed: int) -> Rows:
    """Position to row: each epoch of `count` positions meets every row once, in its own order."""
    epoch, place = np.divmod(np.atleast_1d(np.asarray(positions, np.int64)), count)
    # mixed before the epoch is added: one seed's second epoch is not the next seed's first
    keys = _mixed(_mixed(np.array([seed % (1 << 64)], np.uint64)) + _words(epoch))
    rows = _permuted(place, count, keys)
    # the permutation is of a grid a little larger than count: those that fell outside go on
    # walking their cycle until they come back in
    while (outside := rows >= count).any():
        rows[outside] = _permuted(rows[outside], count, keys[outside])
    return rows


def _permuted(place: Rows, count: int, keys: _Words) -> Rows:
    """A bijection of a grid of height × width >= count: a Feistel network in mixed radix.

    Each round shifts one coordinate by a hash of the other, which can be undone: so can all.
    """
    height = math.isqrt(count - 1) + 1
    width = -(-count // height)
    high, low = np.divmod(place, width)
    for number in range(0, ROUNDS, 2):
        high = (high + _hash(low, keys, number, height)) % height
        low = (low + _hash(high, keys, number + 1, width)) % width
    return np.asarray(high * width + low)


def _hash(values: Rows, keys: _Words, number: int, below: int) -> Rows:
    # a step of its own for each round, far from the small differences between values
    step = np.uint64((number + 1) * 0xD1342543DE82EF95 % (1 << 64))
    return (_mixed(_mixed(keys + step) + _words(values)) % np.uint64(below)).astype(np.int64)


def _words(values: npt.NDArray[Any]) -> _Words:
    return values.astype(np.uint64)


def _mixed(words: _Words) -> _Words:
    """Spread every bit over all 64: the finalizer of the SplitMix64 generator."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
