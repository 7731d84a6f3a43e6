"""NVIDIA's fused attention as a kernel of blocks."""

from typing import Any

import jax

from meshwright.ops.attention import documents, fused
from meshwright.ops.attention.block import Block, Call, Gradients, Kernel, Partial
from meshwright.ops.attention.mask import Mask


def _forward(block: Block, mask: Mask, dtype: Any = None) -> Partial:
    if block.q_segments is not None:
        return documents.forward(fused.forward, block, mask.causal)
    return fused.forward(_rows(block, mask))


def _backward(
    block: Block, mask: Mask, whole: Partial, given: jax.Array, dtype: Any = None
) -> Gradients:
    if block.q_segments is not None:
        return documents.backward(fused.backward, block, mask.causal, whole, given)
    return fused.backward(_rows(block, mask), whole, given)


def _rows(block: Block, mask: Mask) -> fused.Rows:
    return fused.Rows(block.q, block.k, block.v, causal=mask.causal, window=mask.window)


def _refuses(call: Call) -> str | None:
    if call.platform not in ("gpu", "cuda"):
        return "it runs on NVIDIA GPUs"
    if call.dtype not in ("bfloat16", "float16"):
        return f"it computes in bfloat16 and float16, not {call.dtype}"
    if call.head_dim > 128 or call.head_dim % 8:
        return f"head_dim {call.head_dim} is not a multiple of 8 up to 128"
    if call.biased:
        return "it adds no bias to the scores"
    if call.dynamic:
        return "which keys a query sees must be known when it is compiled"
    if call.mask.block is not None:
        return "it has no block-causal mask"
    if call.mask.causal and (call.mask.offset or call.queries != call.keys):
        return "its masks begin at the first key"
    if call.segmented and call.mask.window is not None:
        return "it takes a sliding window or packed documents, not both"
    return fused.unavailable()


def _lengths(call: Call) -> tuple[int, int]:
    """Of packed documents even lengths, which can be halved until a bias of their mask is small."""
    if not call.segmented:
        return call.lengths
    return documents.padded_length(call.queries), documents.padded_length(call.keys)


cudnn = Kernel(_forward, _backward, _refuses, lengths=_lengths)
