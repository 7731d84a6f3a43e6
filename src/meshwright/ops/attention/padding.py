"""Sequences padded to the lengths a kernel computes with, and its results cut back.

Padded keys carry a segment id that no query has, so no query sees them. Padded queries come after
the others: their outputs are cut off, and their cotangents are zero, so they add nothing to the
gradients of keys and values.
"""

import jax
import jax.numpy as jnp

from meshwright.ops.attention.block import Block, Gradients, Partial
from meshwright.ops.attention.mask import Mask

Lengths = tuple[int, int]  # of queries and keys

# segment ids of padding: the largest, so that ids stay in ascending order where they were
_OF_QUERIES, _OF_KEYS = jnp.iinfo(jnp.int32).max - 1, jnp.iinfo(jnp.int32).max


def pad_block(block: Block, mask: Mask, lengths: Lengths) -> Block:
    """The block with as many queries and keys as `lengths` says."""
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


def pad_output(whole: Partial, queries: int) -> Partial:
    """What was found over all keys; a finite log-sum keeps the weights of padding finite."""
    return Partial(_pad(whole.out, queries), _pad(whole.log_sum, queries))


def pad_cotangent(dout: jax.Array, queries: int) -> jax.Array:
    return _pad(dout, queries)


def cut_output(found: Partial, lengths: Lengths) -> Partial:
    """Without what was found for padding."""
    return Partial(found.out[:, : lengths[0]], found.log_sum[:, : lengths[0]])


def cut_gradients(found: Gradients, lengths: Lengths) -> Gradients:
    queries, keys = lengths
    return found._replace(q=found.q[:, :queries], k=found.k[:, :keys], v=found.v[:, :keys])


def _pad(x: jax.Array, length: int, value: float = 0) -> jax.Array:
    """[batch, length, ..], filled up with a value."""
    missing = length - x.shape[1]
    if not missing:
        return x
    return jnp.pad(x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2)), constant_values=value)
