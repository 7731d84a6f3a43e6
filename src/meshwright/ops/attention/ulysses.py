"""Ulysses: one all-to-all gives a device full sequences of some heads, another returns them."""

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.ops.attention.block import Block
from meshwright.ops.attention.kernels import one_call
from meshwright.ops.attention.mask import Mask


def attend(local: Block, mask: Mask, over: tuple[str, ...], ways: int, kernel: str) -> jax.Array:
    """Inside shard_map: attention of this device's part of the sequences, split over `over`."""

    def full_sequences(x: jax.Array) -> jax.Array:
        return lax.all_to_all(x, over, split_axis=2, concat_axis=1, tiled=True)

    segments = local.q_segments
    if segments is not None:  # every device needs all of them: send each a copy
        batch, part = segments.shape
        copies = jnp.broadcast_to(segments[:, None], (batch, ways, part))
        segments = lax.all_to_all(copies, over, split_axis=1, concat_axis=1, tiled=True)
        segments = segments.reshape(batch, ways * part)
    q, k, v = (full_sequences(x) for x in (local.q, local.k, local.v))
    out = one_call(Block(q, k, v, segments, segments), mask, kernel)
    return lax.all_to_all(out, over, split_axis=1, concat_axis=2, tiled=True)
