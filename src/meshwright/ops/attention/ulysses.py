"""Ulysses: one all-to-all gives a device full sequences of some heads, another returns them."""

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.ops.attention.block import Block, Method
from meshwright.ops.attention.kernels import one_call
from meshwright.ops.attention.mask import Mask


def attend(
    local: Block,
    mask: Mask,
    over: tuple[str, ...],
    ways: int,
    method: Method,
) -> jax.Array:
    """Inside shard_map: attention of this device's part of the sequences, split over `over`."""

    def full_sequences(x: jax.Array) -> jax.Array:
        return lax.all_to_all(x, over, split_axis=2, concat_axis=1, tiled=True)

    def all_segments(segments: jax.Array) -> jax.Array:
        """Every device needs all of them: send each a copy."""
        batch, part = segments.shape
        copies = jnp.broadcast_to(segments[:, None], (batch, ways, part))
        received = lax.all_to_all(copies, over, split_axis=1, concat_axis=1, tiled=True)
        return received.reshape(batch, ways * part)

    q, k, v = (full_sequences(x) for x in (local.q, local.k, local.v))
    q_segments = k_segments = None
    if local.q_segments is not None and local.k_segments is not None:
        q_segments = all_segments(local.q_segments)
        shared = local.k_segments is local.q_segments
        k_segments = q_segments if shared else all_segments(local.k_segments)

    def own_heads(x: jax.Array | None) -> jax.Array | None:
        """Of what every device has of all heads."""
        if x is None:
            return None
        heads = x.shape[0] // ways
        return lax.dynamic_slice_in_dim(x, lax.axis_index(over) * heads, heads)

    block = Block(q, k, v, q_segments, k_segments, None, *map(own_heads, (local.bias, local.sinks)))
    out = one_call(block, mask, method)
    return lax.all_to_all(out, over, split_axis=1, concat_axis=2, tiled=True)
