"""Attention in plain JAX, one block of queries at a time: the reference and the fallback.

Softmax in float32. The backward pass recomputes the scores of a block, so memory grows linearly
with the number of keys. `dense` is the same with all queries at once.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.ops.attention.block import Block, Call, Gradients, Kernel, Partial
from meshwright.ops.attention.mask import Mask
from meshwright.ops.collectives import varying_like

BLOCK_QUERIES = 512  # queries per block


class _Queries(NamedTuple):
    """A block of queries, and what determines the keys they attend to."""

    q: jax.Array  # [batch, queries, heads, head_dim]
    segments: jax.Array | None  # [batch, queries]
    k_end: jax.Array | None  # [1, queries]
    bias: jax.Array | None  # [heads, queries, keys]
    first: jax.Array  # index of the first query


_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def _forward(
    block: Block,
    mask: Mask,
    dtype: Any = None,
    *,
    size: int | None,
    softcap: float | None = None,
) -> Partial:
    dtype = dtype or block.q.dtype

    def some(part: _Queries) -> Partial:
        q, grouped = part.q, _grouped(part.q, block.k)
        scores = _scores(grouped, part, block, mask, softcap)
        most = jnp.max(scores, axis=-1, keepdims=True)
        most = jnp.where(jnp.isneginf(most), 0.0, most)  # a query without keys
        weights = jnp.exp(scores - most)
        total = jnp.sum(weights, axis=-1, keepdims=True)  # [batch, queries, kv_heads, group, 1]
        out = _product("bqkgs,bskd->bqkgd", weights.astype(block.v.dtype), block.v)
        out = out / jnp.where(total == 0, 1.0, total)
        lse = jnp.log(total) + most
        return Partial(out.reshape(q.shape).astype(dtype), lse.reshape(q.shape[:3]))

    length = block.q.shape[1]
    found = lax.map(some, _queries(block, size))
    return jax.tree.map(lambda x: _joined(x, length), found)


def _backward(
    block: Block,
    mask: Mask,
    output: Partial,
    dout: jax.Array,
    dtype: Any = None,
    *,
    size: int | None,
    softcap: float | None = None,
) -> Gradients:
    dtype = dtype or block.q.dtype
    delta = jnp.sum(output.out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)

    def some(carry: Any, part: Any) -> Any:
        of_k, of_v = carry
        queries, lse, dout, delta = part
        q = queries.q
        grouped, dout = _grouped(q, block.k), _grouped(dout, block.k)
        lse, delta = (x.reshape(*grouped.shape[:4], 1) for x in (lse, delta))
        scores = _scores(grouped, queries, block, mask, softcap)
        weights = jnp.where(jnp.isneginf(scores), 0.0, jnp.exp(scores - lse))
        of_weights = _product("bqkgd,bskd->bqkgs", dout, block.v)
        of_biased = weights * (of_weights - delta)
        if softcap is not None:  # the derivative of tanh; masked scores have no weight
            capped = jnp.where(jnp.isneginf(scores), 0.0, scores)
            of_biased *= 1 - (capped / softcap) ** 2
        of_scores = (of_biased * q.shape[-1] ** -0.5).astype(q.dtype)
        of_q = _product("bqkgs,bskd->bqkgd", of_scores, block.k).reshape(q.shape)
        of_k += _product("bqkgs,bqkgd->bskd", of_scores, grouped)
        of_v += _product("bqkgs,bqkgd->bskd", weights.astype(q.dtype), dout)
        of_bias = None if block.bias is None else _sum_over_batch(of_biased)
        return (of_k, of_v), (of_q.astype(dtype), of_bias)

    length = block.q.shape[1]
    zero = varying_like(jnp.zeros(block.k.shape, jnp.float32), block.q, block.k, dout)
    parts = tuple(_cut(x, size) for x in (output.lse, dout, delta))
    (of_k, of_v), by_block = lax.scan(some, (zero, zero), (_queries(block, size), *parts))
    of_q, of_bias = jax.tree.map(lambda x: _joined(x, length), by_block)
    return Gradients(of_q, of_k.astype(dtype), of_v.astype(dtype), of_bias)


def _scores(
    grouped: jax.Array, queries: _Queries, block: Block, mask: Mask, softcap: float | None
) -> jax.Array:
    """[batch, queries, kv_heads, group, keys], -inf where masked."""
    number, head_dim = grouped.shape[1], grouped.shape[-1]
    scores = _product("bqkgd,bskd->bqkgs", grouped, block.k) * head_dim**-0.5
    if queries.bias is not None:
        bias = jnp.moveaxis(queries.bias, 0, 1)  # [queries, heads, keys]
        scores += bias.reshape(1, *scores.shape[1:]).astype(jnp.float32)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    keys = jnp.arange(block.k.shape[1])
    seen = mask.seen(queries.first + jnp.arange(number), keys)
    seen = None if seen is None else seen[None]
    if queries.k_end is not None:
        before = keys[None, None] < queries.k_end[:, :, None]
        seen = before if seen is None else seen & before
    if queries.segments is not None and block.k_segments is not None:
        same = queries.segments[:, :, None] == block.k_segments[:, None, :]
        seen = same if seen is None else seen & same
    return scores if seen is None else jnp.where(seen[:, :, None, None], scores, -jnp.inf)


def _sum_over_batch(of_biased: jax.Array) -> jax.Array:
    """[batch, queries, kv_heads, group, keys] to the gradient of the bias."""
    total = jnp.sum(of_biased, axis=0)
    return jnp.moveaxis(total.reshape(total.shape[0], -1, total.shape[-1]), 0, 1)


def _grouped(x: jax.Array, k: jax.Array) -> jax.Array:
    """[batch, queries, heads, head_dim] as [batch, queries, kv_heads, group, head_dim]."""
    batch, queries, heads, head_dim = x.shape
    return x.reshape(batch, queries, k.shape[2], heads // k.shape[2], head_dim)


def _queries(block: Block, size: int | None) -> _Queries:
    """All queries, in blocks."""
    q = _cut(block.q, size)
    segments = None if block.q_segments is None else _cut(block.q_segments, size)
    k_end = None if block.k_end is None else _cut(block.k_end[None], size)
    bias = None if block.bias is None else _cut(block.bias, size)
    return _Queries(q, segments, k_end, bias, jnp.arange(q.shape[0]) * q.shape[2])


def _cut(x: jax.Array, size: int | None) -> jax.Array:
    """[batch, length, ..] to [blocks, batch, size, ..], zero-padded."""
    batch, length, *rest = x.shape
    size = length if size is None else min(size, length)
    missing = ((0, 0), (0, -length % size), *((0, 0),) * len(rest))
    return jnp.moveaxis(jnp.pad(x, missing).reshape(batch, -1, size, *rest), 1, 0)


def _joined(x: jax.Array, length: int) -> jax.Array:
    """The reverse of _cut."""
    blocks, batch, size, *rest = x.shape
    return jnp.moveaxis(x, 0, 1).reshape(batch, blocks * size, *rest)[:, :length]


def _dense_refuses(call: Call) -> str | None:
    if call.queries > 2 * BLOCK_QUERIES:
        return f"its scores grow with the square of the length ({call.queries})"
    return None


dense = Kernel(
    functools.partial(_forward, size=None), functools.partial(_backward, size=None), _dense_refuses
)
blockwise = Kernel(
    functools.partial(_forward, size=BLOCK_QUERIES),
    functools.partial(_backward, size=BLOCK_QUERIES),
    lambda call: None,
)
