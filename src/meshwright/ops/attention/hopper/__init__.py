"""Attention kernels for Hopper GPUs with any mask and packed documents; masked blocks are skipped.

cuDNN has no segment ids; cudnn.py says what it has instead.
"""

from typing import Any

import jax

from meshwright.arithmetic import round_up
from meshwright.ops.attention.block import Block, Call, Gradients, Kernel, Partial
from meshwright.ops.attention.hopper import backward, forward
from meshwright.ops.attention.hopper.spans import RUNS, Documents
from meshwright.ops.attention.mask import Mask
from meshwright.ops.mosaic import HOPPER, unavailable

HEAD_DIMS = (64, 128)  # limited by registers


def _forward(block: Block, mask: Mask, dtype: Any = None) -> Partial:
    return forward.forward(block.q, block.k, block.v, mask, _documents(block), dtype)


def _backward(
    block: Block, mask: Mask, output: Partial, dout: jax.Array, dtype: Any = None
) -> Gradients:
    q, k, v = block[:3]
    return backward.backward(q, k, v, output, dout, mask, _documents(block), dtype)


def _documents(block: Block) -> Documents | None:
    if block.q_segments is None:
        return None
    assert block.k_segments is not None
    return Documents(block.q_segments.astype("int32"), block.k_segments.astype("int32"))


def _refuses(call: Call) -> str | None:
    if call.platform not in ("gpu", "cuda"):
        return "it runs on Hopper GPUs"
    why = unavailable(HOPPER)
    if why is not None:
        return why
    if call.dtype != "bfloat16":
        return f"it computes in bfloat16, not {call.dtype}"
    if call.head_dim not in HEAD_DIMS:
        known = " or ".join(map(str, HEAD_DIMS))
        return f"it needs head_dim {known}, not {call.head_dim}"
    if call.biased:
        return "it adds no bias to the scores"
    if call.softcapped:
        return "it does not cap scores"
    if call.dynamic:
        return "it needs the mask at compile time"
    return None


def _lengths(call: Call) -> tuple[int, int]:
    """Multiples of the tile sizes."""
    return round_up(call.queries, RUNS.q), round_up(call.keys, RUNS.k)


hopper = Kernel(_forward, _backward, _refuses, lengths=_lengths)
