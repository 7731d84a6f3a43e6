"""Splash attention: jax's fused kernels for TPUs, forward and backward.

The kernels compute one sequence of one key head and its query heads; vmap adds batch and heads. A
chip with two cores splits mapped dims over them. The kernels do not scale, so queries are scaled
before and their gradients after. A table lists the blocks of keys for each block of queries; masked
blocks are skipped. We compute the table directly, since the keys of a query are contiguous in all
our masks; jax's own way inspects every element of the mask. Results always have the dtype of the
inputs: float32 results are rounded first.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwright.arithmetic import round_up
from meshwright.ops.attention.block import Block, Call, Gradients, Kernel, Partial
from meshwright.ops.attention.mask import Mask
from meshwright.ops.collectives import LANES, untyped

LARGEST = 1024  # tokens in a block
MOST_PADDING = 1 / 4  # of a length, to allow larger blocks; an estimate, not measured on a TPU
COMPUTED = 512  # keys per block whose scores are computed at once
# The table is in scalar memory (1 MiB), 3 bytes per entry; that of dq has twice as many entries,
# since its blocks of keys are half as long (COMPUTED)
LARGEST_TABLE = 2**17
# The fused backward kernel needs fewer matmuls, but writes dq once per block of keys: used up to
# this size. In a zig-zag ring, (half the queries, all keys) and (all queries, half the keys) give
# the same choice, as they must: devices compute either at the same ring step
ONE_KERNEL = 2**16


def splash_kernel(interpret: bool = False) -> Kernel:
    """The kernel; `interpret` runs it on any platform, for tests."""
    return Kernel(
        functools.partial(_forward, interpret=interpret),
        functools.partial(_backward, interpret=interpret),
        _refuses,
        _partial,
        _gradients,
        _lengths,
    )


def _forward(
    block: Block,
    mask: Mask,
    dtype: Any = None,
    *,
    interpret: bool,
    softcap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    kernels = _kernels()
    queries, keys = block.q.shape[1], block.k.shape[1]
    sizes = _sizes(queries, keys, block.q.shape[-1])
    kernel = kernels.SplashAttentionKernel(
        _mask_info(mask, queries, keys, sizes.block_q, sizes.block_kv, by_keys=False),
        None,
        None,
        is_mqa=True,
        block_sizes=sizes,
        save_residuals=True,
        mask_value=kernels.DEFAULT_MASK_VALUE,
        mask_function=_seen(mask),
        attn_logits_soft_cap=softcap,
        residual_checkpoint_name=None,
        interpret=interpret,
    )

    def one(q: Any, k: Any, v: Any, documents: Any) -> Any:
        out, (lse,) = kernel(q, k, v, documents and kernels.SegmentIds(*documents))
        return out, lse

    kv_heads = block.k.shape[2]
    return untyped(
        _over_batch_and_heads(one),
        _by_head(_scaled(block.q), kv_heads), *_keys(block), _documents(block),
    )  # fmt: skip


def _partial(found: tuple[jax.Array, jax.Array]) -> Partial:
    out, lse = found
    # a query without keys: lse is log 0, or all its scores are the mask value
    nothing = lse < float(np.finfo(np.float32).min) / 4
    out = jnp.where(nothing[..., None], jnp.zeros((), out.dtype), out)
    lse = jnp.where(nothing, -jnp.inf, lse)
    return Partial(_by_token(out), _by_token(lse))


def _backward(
    block: Block,
    mask: Mask,
    output: Partial,
    dout: jax.Array,
    dtype: Any = None,
    *,
    interpret: bool,
    softcap: float | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    kernels = _kernels()
    queries, keys = block.q.shape[1], block.k.shape[1]
    sizes = _sizes(queries, keys, block.q.shape[-1])
    info = functools.partial(_mask_info, mask, queries, keys)
    of_keys = info(
        sizes.block_q_dkv, sizes.block_kv_dkv, by_keys=True, whole=sizes.use_fused_bwd_kernel
    )
    of_queries = None
    if not sizes.use_fused_bwd_kernel:
        of_queries = info(sizes.block_q_dq, sizes.block_kv_dq, by_keys=False)
    options = (
        False, kernels.DEFAULT_MASK_VALUE, True, sizes, None, _seen(mask), softcap, interpret,
    )  # fmt: skip

    def one(q: Any, k: Any, v: Any, documents: Any, out: Any, lse: Any, dout: Any) -> Any:
        documents = documents and kernels.SegmentIds(*documents)
        kept = (q, k, v, documents, None, out, lse, of_queries, of_keys)
        gradients = kernels._splash_attention_bwd(*options, kept, dout)
        return gradients[3:6]

    kv_heads = block.k.shape[2]
    # a query without keys: any finite lse works, its weights are all 0
    lse = jnp.where(jnp.isneginf(output.lse), 0.0, output.lse)
    return untyped(
        _over_batch_and_heads(one),
        _by_head(_scaled(block.q), kv_heads), *_keys(block), _documents(block),
        *(_by_head(x, kv_heads) for x in (output.out, lse, dout)),
    )  # fmt: skip


def _gradients(found: tuple[jax.Array, jax.Array, jax.Array]) -> Gradients:
    of_q, of_k, of_v = found
    return Gradients(_scaled(_by_token(of_q)), jnp.swapaxes(of_k, 1, 2), jnp.swapaxes(of_v, 1, 2))


def _kernels() -> Any:
    """jax's kernels, imported when needed, since the import is slow."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    return splash_attention_kernel


def _over_batch_and_heads(one: Callable[..., Any]) -> Callable[..., Any]:
    """vmap over batch and key heads; segment ids (the fourth argument) are shared by all heads."""

    def sequence(q: Any, k: Any, v: Any, documents: Any, *more: Any) -> Any:
        heads = jax.vmap(lambda q, k, v, *more: one(q, k, v, documents, *more))
        return heads(q, k, v, *more)

    return jax.vmap(sequence)


def _scaled(x: jax.Array) -> jax.Array:
    return (x.astype(jnp.float32) * x.shape[-1] ** -0.5).astype(x.dtype)


def _by_head(x: jax.Array, kv_heads: int) -> jax.Array:
    """[batch, queries, heads, ..] as [batch, kv_heads, group, queries, ..]."""
    batch, queries, heads, *rest = x.shape
    grouped = x.reshape(batch, queries, kv_heads, heads // kv_heads, *rest)
    return jnp.moveaxis(grouped, 1, 3)


def _by_token(x: jax.Array) -> jax.Array:
    """The reverse of _by_head."""
    batch, kv_heads, group, queries, *rest = x.shape
    return jnp.moveaxis(x, 3, 1).reshape(batch, queries, kv_heads * group, *rest)


def _keys(block: Block) -> tuple[jax.Array, jax.Array]:
    """Keys and values, [batch, kv_heads, keys, head_dim]."""
    return jnp.swapaxes(block.k, 1, 2), jnp.swapaxes(block.v, 1, 2)


def _documents(block: Block) -> tuple[jax.Array, jax.Array] | None:
    if block.q_segments is None or block.k_segments is None:
        return None
    return block.q_segments, block.k_segments


def padded_length(length: int) -> int:
    """The padded length: a multiple of 128, or of a larger block where that adds little.

    >>> [padded_length(n) for n in (100, 1000, 1100, 3648, 4000, 3712)]
    [128, 1024, 1280, 4096, 4096, 3712]
    """
    if length % LANES == 0:
        return length
    size = LARGEST
    while size > LANES and -length % size > MOST_PADDING * length:
        size //= 2
    return round_up(length, size)


def backward_kernels(length: int) -> int:
    """Number of kernels of the backward pass: 1, or 2 (one for dq, one for dk and dv)."""
    length = padded_length(length)
    return 1 if length // LARGEST * length <= ONE_KERNEL else 2


def query_gradients(length: int) -> int:
    """Arrays of gradients of all queries that the backward pass writes: one kernel, one a block."""
    return padded_length(length) // LARGEST if backward_kernels(length) == 1 else 1


def _lengths(call: Call) -> tuple[int, int]:
    return padded_length(call.queries), padded_length(call.keys)


def _blocks(queries: int, keys: int, head_dim: int) -> tuple[int, int]:
    """Queries and keys of a block."""
    # heads of more than 128 take the room of 256 in vector memory, of which there are 16 MiB
    most = LARGEST if head_dim <= LANES else LARGEST // 2
    return _largest_block(queries, most), _largest_block(keys, LARGEST)


def _sizes(queries: int, keys: int, head_dim: int) -> Any:
    of_q, of_k = _blocks(queries, keys, head_dim)
    computed = _largest_block(of_k, COMPUTED)
    one_kernel = keys // of_k * queries <= ONE_KERNEL
    return _kernels().BlockSizes(
        block_q=of_q, block_kv=of_k, block_kv_compute=computed,
        block_q_dkv=of_q, block_kv_dkv=of_k, block_kv_dkv_compute=computed,
        block_q_dq=None if one_kernel else of_q, block_kv_dq=None if one_kernel else computed,
        use_fused_bwd_kernel=one_kernel,
    )  # fmt: skip


def _largest_block(length: int, most: int) -> int:
    """The largest block of 128, 256, 512 .. tokens up to `most` that divides a length."""
    size = most
    while length % size:
        size //= 2
    return size


@functools.lru_cache(maxsize=64)
def _seen(mask: Mask) -> Callable[..., Any] | None:
    """The mask as an elementwise function of positions; None if nothing is masked."""
    if not mask.causal:
        return None

    def seen(queries: Any, keys: Any) -> Any:
        if mask.block is not None:
            of_queries = lax.div(queries + mask.offset, jnp.int32(mask.block))
            return of_queries >= lax.div(keys, jnp.int32(mask.block))
        ahead = queries - keys + mask.offset
        return ahead >= 0 if mask.window is None else (ahead >= 0) & (ahead < mask.window)

    return seen


def _mask_info(
    mask: Mask, queries: int, keys: int, of_q: int, of_k: int, *, by_keys: bool, whole: bool = False
) -> Any:
    """The kernels' table: for each block of queries (or of keys) the blocks of the others to visit.

    `output`: with a visit_index for every block, seen or not.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import (
        MaskInfo,
    )

    if not mask.causal:
        return MaskInfo(None, None, None, None, None)
    visit, seen = table(mask, queries, keys, of_q, of_k, by_keys=by_keys, whole=whole)
    return MaskInfo(
        data_next=jnp.asarray(visit[None].astype(np.int16)),
        mask_next=None,
        block_mask=jnp.asarray(seen[None].astype(np.int8)),
        partial_mask_blocks=None,
        q_sequence=np.arange(queries, dtype=np.int32),
    )


def table(
    mask: Mask, queries: int, keys: int, of_q: int, of_k: int, *, by_keys: bool, whole: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The blocks of keys that each block of queries visits, and whether they are unmasked.

    Both [blocks of queries, visits]. `by_keys`: the blocks of queries that each block of keys
    visits, both [visits, blocks of keys].
    """
    window, block = mask.window or queries + keys + mask.offset, mask.block or 1
    if by_keys:  # the first and the last query that attend to any key of a block
        own, other, size = np.arange(keys // of_k) * of_k, queries, of_q
        low = own // block * block - mask.offset
        high = own + of_k - 1 + window - 1 - mask.offset
    else:  # the first and the last key that any query of a block attends to
        own, other, size = np.arange(queries // of_q) * of_q + mask.offset, keys, of_k
        low = own - window + 1
        high = (own + of_q - 1) // block * block + block - 1
    first, last = np.maximum(low, 0) // size, np.minimum(high, other - 1) // size
    visits = other // size if whole else max(1, int(np.max(last - first)) + 1)
    visit_index = np.arange(visits)[None]
    # visits end with the last unmasked block; earlier visits prefetch the first one
    at = (
        np.broadcast_to(visit_index, (len(own), visits))
        if whole
        else visit_index + last[:, None] - visits + 1
    )
    seen = (at >= first[:, None]) & (at <= last[:, None])
    visit = np.clip(np.clip(at, first[:, None], last[:, None]), 0, other // size - 1)
    return (visit.T, seen.T) if by_keys else (visit, seen)


def _refuses(call: Call) -> str | None:
    if call.platform != "tpu":
        return "it runs on TPUs"
    if call.dtype not in ("bfloat16", "float32"):
        return f"it computes in bfloat16 and float32, not {call.dtype}"
    if call.biased:
        return "it adds no bias to the scores"
    if call.dynamic:
        return "it needs the mask at compile time"
    if call.mask.causal:
        queries, keys = _lengths(call)
        of_q, of_k = _blocks(queries, keys, call.head_dim)  # no kernel is imported for a plan
        entries = queries // of_q * (keys // of_k)
        if entries > LARGEST_TABLE:
            return (
                f"its table of blocks would have {entries:,} entries, more than {LARGEST_TABLE:,}"
            )
    return None


splash = splash_kernel()
