"""cuDNN's fused attention as a kernel."""

from typing import Any

import jax

from meshwright.ops.attention import documents, fused
from meshwright.ops.attention.block import Block, Call, Gradients, Kernel, Partial
from meshwright.ops.attention.mask import Mask


def _forward(block: Block, mask: Mask, dtype: Any = None) -> Partial:
    if block.q_segments is not None:
        return documents.forward(fused.forward, block, mask.causal)
    return fused.forward(_inputs(block, mask))


def _backward(
    block: Block, mask: Mask, output: Partial, dout: jax.Array, dtype: Any = None
) -> Gradients:
    if block.q_segments is not None:
        return documents.backward(fused.backward, block, mask.causal, output, dout)
    return fused.backward(_inputs(block, mask), output, dout)


def _inputs(block: Block, mask: Mask) -> fused.Inputs:
    return fused.Inputs(block.q, block.k, block.v, causal=mask.causal, window=mask.window)


def _refuses(call: Call) -> str | None:
    if why := fused.refuses(call.platform, call.dtype, call.head_dim):
        return why
    if call.biased:
        return "it adds no bias to the scores"
    if call.dynamic:
        return "it needs the mask at compile time"
    if call.mask.block is not None:
        return "it has no block-causal mask"
    if call.mask.causal and (call.mask.offset or call.queries != call.keys):
        return "its causal masks have no offset"
    if call.segmented and call.mask.window is not None:
        return "it takes a sliding window or packed documents, not both"
    return None


def _lengths(call: Call) -> tuple[int, int]:
    """With packed documents: even lengths that can be halved until the [n, n] bias is small."""
    if not call.segmented:
        return call.lengths
    return documents.padded_length(call.queries), documents.padded_length(call.keys)


cudnn = Kernel(_forward, _backward, _refuses, lengths=_lengths)
