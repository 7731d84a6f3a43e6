"""cuDNN's fused attention as a kernel; packed documents as a bias of the scores.

cuDNN also has a packed layout, which takes the offsets of documents. It is not used: the memory of
its backward pass grows with the number of documents that it has room for (4 sequences of 8192
tokens, 32 heads of 128: 4 GiB for 4 documents in each, 16 GiB for 16), that number must be known at
compile time, and only Hopper GPUs and later have it, where our kernel is faster
(benchmarks/attention_steps.py).
"""

from typing import Any

import jax
import jax.numpy as jnp

from meshwright.arithmetic import round_up
from meshwright.ops.attention import fused
from meshwright.ops.attention.block import Block, Call, Gradients, Kernel, Partial
from meshwright.ops.attention.mask import Mask

BIAS_UP_TO = 2**30  # pairs of a query and a key in a sequence: 2 GiB of bfloat16


def _forward(block: Block, mask: Mask, dtype: Any = None) -> Partial:
    return fused.forward(_inputs(block, mask))


def _backward(
    block: Block, mask: Mask, output: Partial, dout: jax.Array, dtype: Any = None
) -> Gradients:
    return fused.backward(_inputs(block, mask), output, dout)


def _inputs(block: Block, mask: Mask) -> fused.Inputs:
    bias = None
    if block.q_segments is not None and block.k_segments is not None:
        dtype = block.q.dtype
        same = block.q_segments[:, None, :, None] == block.k_segments[:, None, None, :]
        # finite, since cuDNN subtracts masked scores from each other
        never = jnp.asarray(-(2.0**15) if dtype == jnp.float16 else -(2.0**41), dtype)
        bias = jnp.where(same, jnp.zeros((), dtype), never)
    return fused.Inputs(block.q, block.k, block.v, mask.causal, mask.window, bias)


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
    if call.segmented and call.queries * call.keys > BIAS_UP_TO:
        return (
            f"packed documents are a bias of the scores, too large for {call.queries:,} queries "
            f"and {call.keys:,} keys"
        )
    return None


def _lengths(call: Call) -> tuple[int, int]:
    """A bias needs even lengths."""
    if not call.segmented:
        return call.lengths
    return round_up(call.queries, 2), round_up(call.keys, 2)


cudnn = Kernel(_forward, _backward, _refuses, lengths=_lengths)
