"""Pad sequences to the lengths a kernel needs, and cut its results.

Padded keys have a segment id that no query has, so no query attends to them. Padded queries come
last: their outputs are cut off, and their cotangents are zero, so they add nothing to the gradients
of keys and values.
"""

import jax
import jax.numpy as jnp

from meshwright.ops.attention.block import Block, Gradients, Partial
from meshwright.ops.attention.mask import Mask

Lengths = tuple[int, int]  # of queries and keys

# segment ids of padding: the largest, so that ascending ids stay ascending
_OF_QUERIES, _OF_KEYS = jnp.iinfo(jnp.int32).max - 1, jnp.iinfo(jnp.int32).max


def pad_block(block: Block, mask: Mask, lengths: Lengths) -> Block:
    """The block, padded to `lengths`."""
    if block.lengths == lengths:
        return block
    queries, keys = lengths
    q_segments, k_segments = block.q_segments, block.k_segments
    if q_segments is None and keys > block.k.shape[1] and not mask.ends_within(*block.lengths):
        q_segments = jnp.zeros(block.q.shape[:2], jnp.int32)
        k_segments = jnp.zeros(block.k.shape[:2], jnp.int32)
    if q_segments is not None and k_segments is not None:
        q_segments = _pad(q_segments.astype(jnp.int32), queries, _OF_QUERIES)
        k_segments = _pad(k_segments.astype(jnp.int32), keys, _OF_KEYS)
    k, v = (_pad(x, keys) for x in (block.k, block.v))
    return Block(_pad(block.q, queries), k, v, q_segments, k_segments)


def pad_output(output: Partial, queries: int) -> Partial:
    """The padded output; a finite lse keeps the weights of padding finite."""
    return Partial(_pad(output.out, queries), _pad(output.lse, queries))


def pad_cotangent(dout: jax.Array, queries: int) -> jax.Array:
    return _pad(dout, queries)


def cut_output(result: Partial, lengths: Lengths) -> Partial:
    """The output without padding."""
    return Partial(result.out[:, : lengths[0]], result.lse[:, : lengths[0]])


def cut_gradients(result: Gradients, lengths: Lengths) -> Gradients:
    queries, keys = lengths
    return result._replace(q=result.q[:, :queries], k=result.k[:, :keys], v=result.v[:, :keys])


def _pad(x: jax.Array, length: int, value: float = 0) -> jax.Array:
    """[batch, length, ..], padded with a value."""
    missing = length - x.shape[1]
    if not missing:
        return x
    return jnp.pad(x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2)), constant_values=value)
