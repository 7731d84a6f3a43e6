"""NVIDIA's fused attention as a kernel of blocks."""

import jax

from meshwright.ops.attention import documents, fused
from meshwright.ops.attention.block import Block, Call, Kernel, Partial, Slopes
from meshwright.ops.attention.mask import Mask


def _forward(block: Block, mask: Mask) -> Partial:
    if block.q_segments is not None:
        return documents.forward(fused.forward, block, mask.causal)
    return fused.forward(_rows(block, mask))


def _backward(block: Block, mask: Mask, whole: Partial, given: jax.Array) -> Slopes:
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
    if call.mask.block is not None:
        return "it has no block-causal mask"
    if call.mask.causal and (call.mask.offset or call.queries != call.keys):
        return "its masks begin at the first key"
    if call.segmented and call.mask.window is not None:
        return "it takes a sliding window or packed documents, not both"
    if call.segmented and call.mask.causal:
        why = documents.refuses_causal(call.queries)
        if why is not None:
            return why
    return fused.unavailable()


cudnn = Kernel(_forward, _backward, _refuses)
