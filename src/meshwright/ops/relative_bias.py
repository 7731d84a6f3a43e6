"""T5's relative position bias: a learned number for each head and bucket of distances.

A distance is the key's position less the query's. Small distances have a bucket each, larger ones
share buckets that grow with the logarithm, and from `max_distance` on all share the last.

>>> relative_buckets(np.array([-200, -20, -2, -1, 0, 1, 2, 20]), 8, 16, bidirectional=True).tolist()
[3, 3, 2, 1, 0, 5, 6, 7]
>>> relative_buckets(np.array([-200, -20, -2, -1, 0, 1]), 8, 16, bidirectional=False).tolist()
[7, 7, 2, 1, 0, 0]
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import PartitionSpec as P

from meshwright.ops.collectives import all_gather, spec_of


def relative_buckets(
    distances: npt.NDArray[np.int64], buckets: int, max_distance: int, *, bidirectional: bool
) -> npt.NDArray[np.int64]:
    """The bucket of each distance; without `bidirectional` keys ahead are as far as distance 0."""
    first = np.zeros_like(distances)
    if bidirectional:  # half of the buckets are for keys ahead
        buckets //= 2
        first = np.where(distances > 0, buckets, 0)
        away = np.abs(distances)
    else:
        away = np.maximum(-distances, 0)
    exact = buckets // 2
    # in float32, as the published models computed it: where a bucket ends is a matter of rounding
    ratio = np.log(np.maximum(away, 1).astype(np.float32) / np.float32(exact))
    share = ratio / np.float32(math.log(max_distance / exact)) * np.float32(buckets - exact)
    large = np.minimum(exact + share.astype(np.int64), buckets - 1)
    return first + np.where(away < exact, away, large)


def relative_bias(
    table: jax.Array,
    queries: int,
    keys: int,
    *,
    max_distance: int,
    bidirectional: bool,
    token_axes: tuple[str, ...] = (),
) -> jax.Array:
    """The bias [heads, queries, keys] in float32, from a table [buckets, heads] that may be split.

    Queries and keys both start at position 0. Over `token_axes` (those that split batch and length)
    its gradient stays partial sums until it is that of the table: see ops.collectives.
    """
    # distances 0 to keys - 1, one that is not used, and 1 - queries to -1
    distances = np.concatenate([np.arange(keys + 1), np.arange(1 - queries, 0)])
    number = relative_buckets(distances, table.shape[0], max_distance, bidirectional=bidirectional)
    by_distance = all_gather(_entries(table.astype(jnp.float32), number), token_axes)
    kind = jax.typeof(by_distance).sharding.spec
    return jax.shard_map(
        functools.partial(_spread, queries=queries, keys=keys),
        in_specs=kind,
        out_specs=P(spec_of(by_distance)[1], None, None, reduced=kind.reduced),
    )(by_distance)


def _entries(table: jax.Array, number: npt.NDArray[np.int64]) -> jax.Array:
    """The table's entries of these numbers, on each device's heads."""
    spec = spec_of(table)
    return jax.shard_map(
        lambda table: jnp.take(table, number, axis=0), in_specs=spec, out_specs=spec
    )(table)


def _spread(by_distance: jax.Array, *, queries: int, keys: int) -> jax.Array:
    """[distances, heads] → [heads, queries, keys]: query i has the distances shifted by i.

    Without an index for every pair: a vector of n numbers, repeated and cut every n - 1 numbers,
    is shifted by one more in each piece.
    """
    every, heads = by_distance.shape
    repeated = jnp.broadcast_to(by_distance.T[:, None], (heads, queries, every))
    flat = repeated.reshape(heads, queries * every)[:, : queries * (every - 1)]
    return flat.reshape(heads, queries, every - 1)[:, :, :keys]


def relative_bias_at(
    table: jax.Array, positions: jax.Array, keys: int, *, max_distance: int
) -> jax.Array:
    """The bias [.., heads, queries, keys] of queries that look back, at positions [.., queries].

    Positions may be traced. Keys start at position 0; those ahead have the bias of distance 0.
    """
    # by how far back a key is
    number = relative_buckets(-np.arange(keys), table.shape[0], max_distance, bidirectional=False)
    table = all_gather(table.astype(jnp.float32), ())  # without axes that split nothing
    spec = spec_of(table)

    def local(table: jax.Array, positions: jax.Array) -> jax.Array:
        places = jnp.arange(keys).reshape((1,) * positions.ndim + (keys,))
        back = jnp.clip(positions[..., None] - places, 0, keys - 1)
        return jnp.moveaxis(table[jnp.asarray(number)[back]], -1, -3)

    out = P(*(None,) * (positions.ndim - 1), spec[1], None, None)
    return jax.shard_map(local, in_specs=(spec, P()), out_specs=out)(table, positions)
