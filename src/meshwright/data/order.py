"""A shuffle computed by formula: the n-th index of a random order, without a table.

Any position can be computed alone, so a run resumes at any step and on any number of hosts.

>>> shuffled(range(7), 7, seed=1).tolist()  # the first epoch of 7 sequences
[6, 2, 5, 0, 4, 3, 1]
>>> shuffled(range(7, 14), 7, seed=1).tolist()  # the second has a different order
[3, 6, 0, 2, 5, 1, 4]
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

ROUNDS = 8


def in_order(positions: npt.ArrayLike, count: int) -> Indices:
    """Position → index without a shuffle: every epoch reads 0 to count - 1."""
    return np.asarray(positions, np.int64) % count


def shuffled(positions: npt.ArrayLike, count: int, seed: int) -> Indices:
    """Position → index: an epoch of `count` positions visits every index once, in its own order."""
    epoch, place = np.divmod(np.atleast_1d(np.asarray(positions, np.int64)), count)
    # hash the seed before adding the epoch, so that (seed, 1) and (seed + 1, 0) differ
    keys = _mixed(_mixed(np.array([seed % (1 << 64)], np.uint64)) + _words(epoch))
    indices = _permuted(place, count, keys)
    # cycle walking: the permutation is of a grid slightly larger than count, so repeat it for
    # indices that fell outside
    while (outside := indices >= count).any():
        indices[outside] = _permuted(indices[outside], count, keys[outside])
    return indices


def _permuted(place: Indices, count: int, keys: _Words) -> Indices:
    """A bijection of a grid of height × width >= count: a Feistel network in mixed radix.

    Each round shifts one coordinate by a hash of the other, so every round is invertible.
    """
    height = math.isqrt(count - 1) + 1
    width = -(-count // height)
    high, low = np.divmod(place, width)
    for number in range(0, ROUNDS, 2):
        high = (high + _hash(low, keys, number, height)) % height
        low = (low + _hash(high, keys, number + 1, width)) % width
    return np.asarray(high * width + low)


def _hash(values: Indices, keys: _Words, number: int, below: int) -> Indices:
    # a distinct constant for each round, much larger than the differences between values
    step = np.uint64((number + 1) * 0xD1342543DE82EF95 % (1 << 64))
    return (_mixed(_mixed(keys + step) + _words(values)) % np.uint64(below)).astype(np.int64)


def _words(values: npt.NDArray[Any]) -> _Words:
    return values.astype(np.uint64)


def _mixed(words: _Words) -> _Words:
    """Mix every input bit into all 64: the finalizer of SplitMix64."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
