"""cuDNN's fused attention as a kernel; packed documents as a bias of the scores.

cuDNN also has a packed layout, which takes the offsets of documents. It is not used: the memory of
its backward pass grows with the number of documents that it has room for, and that number must be
known at compile time. Whole steps are as fast with our kernel, which has no such limit
(docs/decisions.md, benchmarks/attention_steps.py).
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.arithmetic import round_up
from meshwright.ops.attention import fused
from meshwright.ops.attention.block import Block, Call, Gradients, Kernel, Partial
from meshwright.ops.attention.mask import Mask

BIAS_UP_TO = 2**26  # numbers: 128 MiB of bfloat16
_MOST_BLOCKS = 16  # of queries, so that programs stay small


def _block_of(batch: int, queries: int, keys: int) -> int:
    """Queries that have one bias: all if it is small enough, or a block of them."""
    least = -(-queries // _MOST_BLOCKS)
    return round_up(max(BIAS_UP_TO // (batch * keys), least), 128)


def _forward(block: Block, mask: Mask, dtype: Any = None) -> Partial:
    found = [fused.forward(inputs) for _, inputs in _calls(block, mask)]
    if len(found) == 1:
        return found[0]
    return Partial(*(jnp.concatenate(arrays, axis=1) for arrays in zip(*found, strict=True)))


def _backward(
    block: Block, mask: Mask, output: Partial, dout: jax.Array, dtype: Any = None
) -> Gradients:
    found = []
    for queries, inputs in _calls(block, mask):
        some = Partial(output.out[:, queries], output.lse[:, queries])
        found.append(fused.backward(inputs, some, dout[:, queries]))
    if len(found) == 1:
        return found[0]
    of_q = jnp.concatenate([one.q for one in found], axis=1)
    of_k = _sum([one.k for one in found], block.k.shape[1])
    of_v = _sum([one.v for one in found], block.k.shape[1])
    return Gradients(of_q, of_k.astype(block.k.dtype), of_v.astype(block.v.dtype))


def _sum(gradients: list[jax.Array], keys: int) -> jax.Array:
    """In float32; a gradient that is shorter is of the first keys."""
    padded = (
        jnp.pad(x.astype(jnp.float32), ((0, 0), (0, keys - x.shape[1]), (0, 0), (0, 0)))
        for x in gradients
    )
    return sum(padded, start=jnp.float32(0))


def _calls(block: Block, mask: Mask) -> Iterator[tuple[slice, fused.Inputs]]:
    """The calls of cuDNN, and the queries of each."""
    q, k, v = block[:3]
    (batch, queries), keys = q.shape[:2], k.shape[1]
    if block.q_segments is None:
        yield slice(queries), fused.Inputs(q, k, v, mask.causal, mask.window)
        return
    assert block.k_segments is not None
    size = _block_of(batch, queries, keys)
    if size >= queries:
        same = _same(block.q_segments, block.k_segments)
        yield slice(queries), fused.Inputs(q, k, v, mask.causal, bias=_bias(same, q.dtype))
        return
    for start in range(0, queries, size):
        some = slice(start, min(start + size, queries))
        seen = some.stop if mask.causal else keys  # later keys are not sent to the kernel
        same = _same(block.q_segments[:, some], block.k_segments[:, :seen])
        if mask.causal:
            later = jnp.arange(some.start, some.stop)[:, None] < jnp.arange(seen)[None]
            same &= ~later[None, None]
        yield some, fused.Inputs(q[:, some], k[:, :seen], v[:, :seen], bias=_bias(same, q.dtype))


def _same(q_segments: jax.Array, k_segments: jax.Array) -> jax.Array:
    """[batch, 1, queries, keys]"""
    return q_segments[:, None, :, None] == k_segments[:, None, None, :]


def _bias(seen: jax.Array, dtype: Any) -> jax.Array:
    # finite, since cuDNN subtracts masked scores from each other
    never = jnp.asarray(-(2.0**15) if dtype == jnp.float16 else -(2.0**41), dtype)
    return jnp.where(seen, jnp.zeros((), dtype), never)


def _refuses(call: Call) -> str | None:
    if why := fused.refuses(call.platform, call.dtype, call.head_dim):
        return why
    if call.biased:
        return "it adds no bias to the scores"
    if call.softcapped:
        return "it does not cap scores"
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
    """A bias needs even lengths."""
    if not call.segmented:
        return call.lengths
    return round_up(call.queries, 2), round_up(call.keys, 2)


cudnn = Kernel(_forward, _backward, _refuses, lengths=_lengths)
