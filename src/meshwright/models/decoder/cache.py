"""The KV cache: keys and values of the tokens so far, on the mesh.

It stores the key heads, never repeated for the query heads. Sequences may differ in length;
positions >= length are uninitialized.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from meshwright.models.decoder.decode import decode_layouts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    keys: jax.Array  # [layers, batch, kv_heads, length, head_dim]
    values: jax.Array
    lengths: jax.Array  # [batch] tokens of each sequence in the cache


def filled(keys: jax.Array, values: jax.Array, lengths: jax.Array, room: int) -> Cache:
    """A cache for `room` tokens per sequence, filled with the keys and values of prefill.

    These are [layers, batch, length, kv_heads, head_dim].
    """
    layouts = decode_layouts()
    free = ((0, 0), (0, 0), (0, 0), (0, room - keys.shape[2]), (0, 0))
    keys, values = (
        reshard(jnp.pad(jnp.swapaxes(x, 2, 3), free), layouts.cache) for x in (keys, values)
    )
    return Cache(keys, values, reshard(lengths, layouts.batch))


def appended(cache: Cache, keys: jax.Array, values: jax.Array) -> Cache:
    """The cache with one more token per sequence; keys and values are [layers, batch, ...]."""
    layouts = decode_layouts()
    layers, batch, kv_heads, _, head_dim = layouts.cache.partitions

    def write(held: jax.Array, new: jax.Array, at: jax.Array) -> jax.Array:
        sequences = jnp.arange(at.shape[0])
        # jax puts the dims of index arrays first: [batch, layers, kv_heads, head_dim]
        return held.at[:, sequences, :, at].set(jnp.swapaxes(new, 0, 1), unique_indices=True)

    write = jax.shard_map(
        write,
        in_specs=(layouts.cache, P(layers, batch, kv_heads, head_dim), layouts.batch),
        out_specs=layouts.cache,
    )
    return Cache(
        write(cache.keys, keys, cache.lengths),
        write(cache.values, values, cache.lengths),
        cache.lengths + 1,
    )
