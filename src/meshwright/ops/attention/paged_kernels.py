"""The kernels of attention over pages: how they write keys and values, and attend to them.

They apply under conditions and give a reason when they do not, as in kernels.py:

| kernel | platform | conditions |
|---|---|---|
| cudnn | NVIDIA | bfloat16 or float16, head_dim a multiple of 8 up to 128; no window, bias, sinks |
| triton | NVIDIA | as cudnn, also windows, sinks, 8-bit pages; head_dim and page size 16 to 128 |
| ragged | TPU | head_dim a multiple of 128, no bias, no sinks, no 8-bit pages |
| plain | all | none; it copies the pages of each sequence |

Where cudnn is chosen, up to 16 sequences are decoded by triton, which is faster then.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.files import log_once
from meshwright.ops.attention import fused, paged_triton
from meshwright.ops.attention.block import Partial, merge, with_sinks
from meshwright.ops.attention.paged_tokens import (
    PagedBias,
    PagedTokens,
    Pool,
    Slots,
    page_size_of,
)
from meshwright.ops.collectives import untyped

_NO_SINKS = "it returns no sum of weights, which attention sinks take part in"
_FEW_SEQUENCES = 16  # of more, cuDNN's decode is as fast as Triton's


@dataclasses.dataclass(frozen=True)
class PagedCall:
    """The static description of a call; a kernel accepts or refuses it."""

    platform: str
    dtype: str
    head_dim: int
    window: int | None
    biased: bool = False  # a bias is added to the scores
    pages: str | None = None  # their dtype, if it is another one
    page_size: int = 64
    softcapped: bool = False  # scores are capped
    sinks: bool = False  # each head sees one more key, see `attention`


@dataclasses.dataclass(frozen=True)
class PagedKernel:
    refuses: Callable[[PagedCall], str | None]
    attend: Callable[..., jax.Array]  # q, k, v [tokens, ..], pool, tokens, window → [tokens, ..]
    write: Callable[[Pool, jax.Array, jax.Array, Slots], Pool]  # k and v [tokens, ..] into pages
    merged: bool = False  # keys and values alternate along the heads; else values come after keys


def _write(pool: Pool, k: jax.Array, v: jax.Array, slots: Slots) -> Pool:
    """The pool with keys and values [tokens, ..] at pages and places in them."""
    page, place = slots
    # one scatter for both, into the pool as it is: of another shape of it XLA's CPU compiler copies
    pages = jnp.concatenate(_with_values(pool, page))
    return pool.at[pages, jnp.tile(place, 2)].set(jnp.concatenate([k, v]))


def _write_on_gpu(pool: Pool, k: jax.Array, v: jax.Array, slots: Slots) -> Pool:
    """By a kernel: of many tokens XLA's scatter takes several times as long."""
    if paged_triton.unavailable() is not None:
        return _write(pool, k, v, slots)
    found: Pool = untyped(paged_triton.write_pages, pool, k, v, *slots)
    return found


def _write_merged(pool: Pool, k: jax.Array, v: jax.Array, slots: Slots) -> Pool:
    """The key and the value of each head, [tokens, 2 · kv_heads, head_dim]."""
    return pool.at[slots].set(jnp.stack([k, v], axis=2).reshape(k.shape[0], -1, k.shape[-1]))


def _with_values(pool: Pool, tables: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The pages of keys, which are those of the tables, and of values."""
    return tables, tables + pool.shape[0] // 2


def by_kind(q: jax.Array, decode: int, length: int) -> tuple[jax.Array, jax.Array]:
    """Queries [tokens, ..] of decode tokens [decode, 1, ..] and of chunks [chunks, length, ..]."""
    chunks = (q.shape[0] - decode) // max(length, 1)
    of_chunks = q[decode:].reshape(chunks, length, *q.shape[1:])
    return q[:decode, None], of_chunks


def pool_shape(
    kernel: str, pages: int, page_size: int, kv_heads: int, head_dim: int
) -> tuple[int, int, int, int]:
    """The pool of a layer: pages of keys and then of values, or pages of both."""
    if KERNELS[kernel].merged:
        return pages, page_size, 2 * kv_heads, head_dim
    return 2 * pages, page_size, kv_heads, head_dim


def most_pages(kernel: str, pages: int, page: int, itemsize: int) -> int:
    """Of so many pages of `page` numbers of keys on a device, those that a kernel can address.

    Pallas computes with 32-bit offsets in arrays of up to 2**32 bytes; of 8-bit numbers there are
    more than such offsets reach.
    """
    numbers = 2 * pages * page
    if kernel != "triton" or numbers <= 2**31 or numbers * itemsize > 2**32:
        return pages
    return 2**31 // (2 * page)


def choose_paged(call: PagedCall, kernel: str = "auto") -> str:
    """The first kernel that supports the call, or the named one; logs once why others do not."""
    if kernel not in ("auto", *KERNELS):
        raise MeshwrightError(
            f"paged attention {kernel!r} is not a kernel{did_you_mean(kernel, ['auto', *KERNELS])}"
        )
    reasons: list[str] = []
    for name in KERNELS if kernel == "auto" else [kernel]:
        why = KERNELS[name].refuses(call)
        if why is None:
            # of another machine's kernels nothing is to be said
            reasons = [] if call.platform == "cpu" else reasons
            log_once(f"paged attention: {name}" + (f" ({'; '.join(reasons)})" if reasons else ""))
            return name
        reasons.append(f"not {name}: {why}")
    reason = reasons[0].removeprefix(f"not {kernel}: ")
    raise MeshwrightError(f"paged attention {kernel!r} does not support this: {reason}")


def _plain(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: Pool,
    tokens: PagedTokens,
    window: int | None,
    bias: PagedBias | tuple[None, None] = (None, None),
    **more: Any,
) -> jax.Array:
    def attend(
        q: jax.Array, tables: jax.Array, positions: jax.Array, bias: jax.Array | None
    ) -> jax.Array:
        return over_pages(q, tables, _visible(pool, tables, positions, window), pool, bias, **more)

    parts: Any = zip(
        by_kind(q, tokens.positions.shape[0], tokens.length),
        (tokens.tables, tokens.chunk_tables),
        (tokens.positions[:, None], tokens.chunk_positions),
        bias,
        strict=True,
    )
    return jnp.concatenate(
        [attend(part, *of).reshape(-1, *q.shape[1:]) for part, *of in parts if part.size]
    )


def _visible(pool: Pool, tables: jax.Array, positions: jax.Array, window: int | None) -> jax.Array:
    """[n, length, keys]: which keys of the tables the tokens at positions [n, length] see."""
    places = jnp.arange(tables.shape[1] * page_size_of(pool))
    distance = positions[:, :, None] - places[None, None]
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


def over_pages(
    q: jax.Array,
    tables: jax.Array,
    visible: jax.Array,
    pool: Pool,
    bias: jax.Array | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """q [n, length, heads, head_dim] over the pages of tables [n, width], softmax in float32.

    `visible` is [n, length or 1, keys], the bias [n, heads, length, keys].
    """
    n, length, _, head_dim = q.shape
    keys, values = _contiguous(pool, tables, q.dtype)
    grouped = q.reshape(n, length, keys.shape[2], -1, head_dim)
    scores = jnp.einsum("nlkgd,nskd->nkgls", grouped, keys, preferred_element_type=jnp.float32)
    scores *= head_dim**-0.5
    if bias is not None:
        scores += bias.reshape(scores.shape)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1)
    if sinks is not None:
        lse = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
        by_head = sinks.astype(jnp.float32).reshape(1, *scores.shape[1:3], 1, 1)
        weights *= jax.nn.sigmoid(lse - by_head)
    weights = weights.astype(values.dtype)
    return jnp.einsum("nkgls,nskd->nlkgd", weights, values).reshape(q.shape)


def _contiguous(pool: Pool, tables: jax.Array, dtype: Any) -> list[jax.Array]:
    """Keys and values [n, width · page_size, kv_heads, head_dim] of each sequence, copied."""
    return [
        pool[pages].reshape(tables.shape[0], -1, *pool.shape[2:]).astype(dtype)
        for pages in _with_values(pool, tables)
    ]


def _on_gpu(
    decode: Callable[..., jax.Array],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: Pool,
    tokens: PagedTokens,
    window: int | None,
    **more: jax.Array,
) -> jax.Array:
    """Decode tokens by the function `decode`, chunks by cuDNN; `more` may be `sinks`."""
    count = tokens.positions.shape[0]
    out = [decode(q[:count], pool, tokens, window, **more)] if count else []
    if tokens.starts.shape[0]:
        out.append(_chunks(q[count:], k[count:], v[count:], pool, tokens, window, **more))
    return jnp.concatenate(out)


def _cudnn_decode(q: jax.Array, pool: Pool, tokens: PagedTokens, window: int | None) -> jax.Array:
    """By Triton where sequences are few, of which cuDNN's kernels take most of their time alone."""
    if q.shape[0] <= _FEW_SEQUENCES and not_for_triton(q.shape[2], page_size_of(pool)) is None:
        return _triton_decode(q, pool, tokens, window)
    pages = fused.Inputs(
        q[:, None], pool, pool,
        counts=(jnp.ones_like(tokens.positions), tokens.positions + 1),
        tables=_with_values(pool, tokens.tables),
    )  # fmt: skip
    return fused.output(pages)[:, 0]


def _triton_decode(
    q: jax.Array,
    pool: Pool,
    tokens: PagedTokens,
    window: int | None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    run = functools.partial(paged_triton.paged_decode, window=window)
    output = untyped(run, q, pool, tokens.tables, tokens.positions + 1)
    return with_sinks(Partial(*output), sinks).out


def _chunks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: Pool,
    tokens: PagedTokens,
    window: int | None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attention of chunks, by cuDNN: to their own tokens, and to what precedes them."""
    shape = tokens.starts.shape[0], tokens.length
    of_q, of_k, of_v = (x.reshape(*shape, *x.shape[1:]) for x in (q, k, v))
    own = fused.Inputs(of_q, of_k, of_v, causal=True, window=window)
    if tokens.first and sinks is None:
        mixed = fused.output(own)
    elif tokens.first:
        mixed = with_sinks(fused.forward(own), sinks).out
    elif window is None:
        both = merge(fused.forward(own), _to_past(of_q, pool, tokens))
        mixed = with_sinks(both, sinks).out.astype(q.dtype)
    else:  # cuDNN's windows end at the last key
        visible = _visible(pool, tokens.chunk_tables, tokens.chunk_positions, window)
        mixed = over_pages(of_q, tokens.chunk_tables, visible, pool, sinks=sinks)
    return mixed.reshape(-1, *q.shape[1:])


def _to_past(q: jax.Array, pool: Pool, tokens: PagedTokens) -> Partial:
    """Attention of chunks to what precedes them."""
    keys, values = _contiguous(pool, tokens.chunk_tables, q.dtype)
    queries = jnp.full_like(tokens.starts, tokens.length)
    past = fused.Inputs(q, keys, values, counts=(queries, jnp.maximum(tokens.starts, 1)))
    out, lse = fused.forward(past)
    any_past = (tokens.starts > 0)[:, None, None]
    return Partial(
        jnp.where(any_past[..., None], out, jnp.zeros((), out.dtype)),
        jnp.where(any_past, lse, -jnp.inf),
    )


def _ragged(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: Pool,
    tokens: PagedTokens,
    window: int | None,
    softcap: float | None = None,
) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    # Chunks count without their padding: with it, the last chunk of a long sequence would end
    # beyond its page table. Chunks that are empty come last, and the kernel does not see them: it
    # expects a query in each sequence.
    counts = jnp.concatenate([jnp.ones_like(tokens.positions), tokens.counts])
    lengths = jnp.concatenate([tokens.positions, tokens.starts]) + counts
    ends = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    tables = jnp.concatenate([tokens.tables, tokens.chunk_tables])
    used = jnp.sum(counts > 0, keepdims=True, dtype=jnp.int32)

    # jax looks its tuned block sizes up for the TPU of this process; without one, for an absent
    # machine, any will do
    size, width = page_size_of(pool), tables.shape[1]
    blocks = {}
    if jax.default_backend() != "tpu":
        blocks["num_kv_pages_per_block"] = max(min(1024 // size, width), 1)
        blocks["num_queries_per_block"] = 32

    def run(q: jax.Array, pages: jax.Array) -> jax.Array:
        out: jax.Array = ragged_paged_attention(
            q, pages, lengths, tables, ends, used,
            sm_scale=q.shape[-1] ** -0.5, sliding_window=window, soft_cap=softcap, **blocks,
        )  # fmt: skip
        return out

    mixed: jax.Array
    if not tokens.length:
        mixed = untyped(run, q, pool)
        return mixed
    # The kernel takes the queries of all sequences without gaps, so padding moves to the end, and
    # back. It leaves the outputs of padding undefined; here they are 0, as NaN would reach page 0.
    real = jnp.concatenate([jnp.ones_like(tokens.positions, bool), tokens.inside.reshape(-1)])
    mixed = untyped(run, q[jnp.argsort(~real, stable=True)], pool)
    mixed = mixed[jnp.maximum(jnp.cumsum(real) - 1, 0)]
    return jnp.where(real[:, None, None], mixed, jnp.zeros((), mixed.dtype))


def _cudnn_refuses(call: PagedCall) -> str | None:
    if call.window is not None:
        return "it has no sliding window over pages"
    if call.pages is not None:
        return "it reads pages in the dtype of the queries"
    if call.sinks:
        return _changed_scores(call) or _NO_SINKS
    return _changed_scores(call) or fused.refuses(call.platform, call.dtype, call.head_dim)


def _triton_refuses(call: PagedCall) -> str | None:
    refused = _changed_scores(call) or fused.refuses(call.platform, call.dtype, call.head_dim)
    return refused or not_for_triton(call.head_dim, call.page_size)


def _changed_scores(call: PagedCall) -> str | None:
    if call.biased:
        return "it adds no bias to scores over pages"
    return "it does not cap scores" if call.softcapped else None


def not_for_triton(head_dim: int, page_size: int) -> str | None:
    """Why Triton's kernels cannot read such pages, or None."""
    sizes = (16, 32, 64, 128)
    if head_dim not in sizes:
        return f"head_dim {head_dim} is not 16, 32, 64 or 128"
    if page_size not in sizes:
        return f"pages have {page_size} tokens, not 16, 32, 64 or 128"
    return paged_triton.unavailable()


def _ragged_refuses(call: PagedCall) -> str | None:
    if call.platform != "tpu":
        return "it runs on TPUs"
    if call.head_dim % 128:
        return f"head_dim {call.head_dim} is not a multiple of 128"
    if call.pages is not None:
        return "it was not tried with 8-bit pages"
    if call.sinks:
        return _NO_SINKS
    return "it adds no bias to scores" if call.biased else None


KERNELS: dict[str, PagedKernel] = {
    "cudnn": PagedKernel(_cudnn_refuses, functools.partial(_on_gpu, _cudnn_decode), _write_on_gpu),
    "triton": PagedKernel(
        _triton_refuses, functools.partial(_on_gpu, _triton_decode), _write_on_gpu
    ),
    "ragged": PagedKernel(_ragged_refuses, _ragged, _write_merged, merged=True),
    "plain": PagedKernel(lambda call: None, _plain, _write),
}
