"""Ulysses: each device exchanges its part of the length for its own heads, and back."""

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.ops.attention.block import Block
from meshwright.ops.attention.kernels import one_call
from meshwright.ops.attention.mask import Mask


def attend(here: Block, mask: Mask, over: tuple[str, ...], ways: int, kernel: str) -> jax.Array:
    """Inside shard_map: attention of this device's part of the rows, split over `over`."""

    def whole_rows(x: jax.Array) -> jax.Array:
        return lax.all_to_all(x, over, split_axis=2, concat_axis=1, tiled=True)

    def whole_segments(segments: jax.Array) -> jax.Array:
        """Every device needs them all: a copy for each is sent."""
        batch, part = segments.shape
        copies = jnp.broadcast_to(segments[:, None], (batch, ways, part))
        gathered = lax.all_to_all(copies, over, split_axis=1, concat_axis=1, tiled=True)
        return gathered.reshape(batch, ways * part)

    q, k, v = (whole_rows(x) for x in (here.q, here.k, here.v))
    q_segments = k_segments = None
    if here.q_segments is not None and here.k_segments is not None:
        q_segments = whole_segments(here.q_segments)
        shared = here.k_segments is here.q_segments
        k_segments = q_segments if shared else whole_segments(here.k_segments)
    bias = here.bias
    if bias is not None:  # whole over the length on every device: each takes its own heads
        heads = bias.shape[0] // ways
        bias = lax.dynamic_slice_in_dim(bias, lax.axis_index(over) * heads, heads)
    out = one_call(Block(q, k, v, q_segments, k_segments, bias=bias), mask, kernel)
    return lax.all_to_all(out, over, split_axis=1, concat_axis=2, tiled=True)
