"""Attention over a paged KV cache: write new keys and values into pages, attend over page tables.

    out, pool = paged_attention(q, k, v, pool, tokens)

A pool holds the pages of one layer; page 0 receives what is written for padding. A step has decode
tokens, one per sequence, and then chunks of prompts: see PagedTokens. Pages may also hold keys that
are no token's of these sequences, such as those of an encoder: see PagedKeys. Kernels apply under
conditions and give a reason when they do not, as in kernels.py:

| kernel | platform | conditions |
|---|---|---|
| cudnn | NVIDIA | bfloat16 or float16, head_dim a multiple of 8 up to 128, no window, no bias |
| ragged | TPU | head_dim a multiple of 128, no bias |
| plain | all | none; it copies the pages of each sequence |
"""

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.ops.attention import fused
from meshwright.ops.attention.block import Partial, merge
from meshwright.ops.collectives import spec_of, untyped

_log = logging.getLogger("meshwright")

Pool = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedTokens:
    """The tokens of a step: `decode` single tokens, then `chunks` of `length` tokens each."""

    tables: jax.Array  # [decode, width]: the pages of each sequence in order, unused ones 0
    positions: jax.Array  # [decode]: of the token in its sequence
    chunk_tables: jax.Array  # [chunks, width]
    starts: jax.Array  # [chunks]: position of the chunk's first token
    counts: jax.Array  # [chunks]: tokens of the chunk, the rest is padding
    length: int = dataclasses.field(metadata={"static": True})
    first: bool = dataclasses.field(metadata={"static": True})  # every chunk starts at position 0
    kernel: str = dataclasses.field(metadata={"static": True})  # see choose_paged

    @property
    def chunk_positions(self) -> jax.Array:
        return self.starts[:, None] + jnp.arange(self.length, dtype=jnp.int32)[None]

    @property
    def inside(self) -> jax.Array:
        """[chunks, length]: False for padding."""
        return jnp.arange(self.length)[None] < self.counts[:, None]

    def all_positions(self) -> jax.Array:
        """[tokens], of padding as well."""
        return jnp.concatenate([self.positions, self.chunk_positions.reshape(-1)])

    def slots(self, page_size: int) -> tuple[jax.Array, jax.Array]:
        """The page of each token and its place in it, [tokens] each; padding is in page 0."""
        positions = self.positions[:, None], self.chunk_positions
        inside = self.inside
        pages = [
            jnp.take_along_axis(tables, at // page_size, axis=1, mode="clip")
            for tables, at in zip((self.tables, self.chunk_tables), positions, strict=True)
        ]
        pages[1] = jnp.where(inside, pages[1], 0)
        flat = [jnp.concatenate([x.reshape(-1) for x in pair]) for pair in (pages, positions)]
        return flat[0], flat[1] % page_size


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedKeys:
    """Keys that every token of a sequence sees: where they are, for each sequence of a step."""

    tables: jax.Array  # [decode, width]
    lengths: jax.Array  # [decode]
    chunk_tables: jax.Array  # [chunks, width]
    chunk_lengths: jax.Array  # [chunks]


Bias = tuple[jax.Array, jax.Array]
"""Of decode tokens [decode, heads, 1, keys] and of chunks [chunks, heads, length, keys]."""


@dataclasses.dataclass(frozen=True)
class PagedCall:
    """The static description of a call; a kernel accepts or refuses it."""

    platform: str
    dtype: str
    head_dim: int
    window: int | None
    biased: bool = False  # a bias is added to the scores


@dataclasses.dataclass(frozen=True)
class PagedKernel:
    refuses: Callable[[PagedCall], str | None]
    attend: Callable[..., jax.Array]  # q, k, v [tokens, ..], pool, tokens, window → [tokens, ..]
    merged: bool = False  # keys and values alternate along the heads of one array


def paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: Pool,
    tokens: PagedTokens,
    *,
    window: int | None = None,
    bias: Bias | None = None,
) -> tuple[jax.Array, Pool]:
    """Causal attention of q [1, tokens, heads, head_dim], and the pool with these keys and values.

    The pool's arrays are those of `pool_shapes` for the kernel of the tokens. A bias, split over
    heads as q is, is added to the scores; only the plain kernel does that.
    """
    kernel = KERNELS[tokens.kernel]

    def local(
        q: jax.Array, k: jax.Array, v: jax.Array, pool: Pool, tokens: PagedTokens, more: Any
    ) -> Any:
        q, k, v = q[0], k[0], v[0]
        pool = _written(pool, k, v, tokens.slots(page_size_of(pool)), kernel.merged)
        return kernel.attend(q, k, v, pool, tokens, window, **more)[None], pool

    heads, kv_heads = spec_of(q), spec_of(k)
    pools = jax.tree.map(spec_of, pool)
    more = {} if bias is None else {"bias": bias}
    by_head = jax.tree.map(lambda _: P(None, heads[2], None, None), more)
    specs = (heads, kv_heads, kv_heads, pools, jax.tree.map(lambda _: P(), tokens), by_head)
    run = jax.shard_map(local, in_specs=specs, out_specs=(heads, pools))
    return run(q, k, v, pool, tokens, more)


def attend_to_pages(q: jax.Array, pool: Pool, keys: PagedKeys, length: int) -> jax.Array:
    """Attention of q [1, tokens, heads, head_dim] to all of `keys`; `length`: tokens of a chunk."""

    def local(q: jax.Array, pool: Pool, keys: PagedKeys) -> jax.Array:
        def attend(q: jax.Array, tables: jax.Array, lengths: jax.Array) -> jax.Array:
            places = jnp.arange(tables.shape[1] * page_size_of(pool))
            return _over_pages(q, tables, places[None, None] < lengths[:, None, None], pool)

        sides = (keys.tables, keys.lengths), (keys.chunk_tables, keys.chunk_lengths)
        parts = zip(_by_kind(q[0], keys.lengths.shape[0], length), sides, strict=True)
        return jnp.concatenate(
            [attend(part, *of).reshape(-1, *q.shape[2:]) for part, of in parts if part.size]
        )[None]

    heads = spec_of(q)
    specs = (heads, jax.tree.map(spec_of, pool), jax.tree.map(lambda _: P(), keys))
    return jax.shard_map(local, in_specs=specs, out_specs=heads)(q, pool, keys)


def fill_pages(
    pool: Pool, k: jax.Array, v: jax.Array, tables: jax.Array, lengths: jax.Array, kernel: str
) -> Pool:
    """The pool with keys and values [n, length, kv_heads, head_dim], from the first place on.

    Those from `lengths` [n] on are padding and go to page 0. Sequence i has the pages tables[i].
    """
    merged = KERNELS[kernel].merged

    def local(pool: Pool, k: jax.Array, v: jax.Array, tables: jax.Array, lengths: jax.Array) -> Any:
        size = page_size_of(pool)
        places = jnp.arange(k.shape[1])
        pages = tables[:, jnp.minimum(places // size, tables.shape[1] - 1)]
        pages = jnp.where(places[None] < lengths[:, None], pages, 0).reshape(-1)
        slots = pages, jnp.tile(places % size, k.shape[0])
        k, v = (x.reshape(-1, *x.shape[2:]) for x in (k, v))
        return _written(pool, k, v, slots, merged)

    pools, heads = jax.tree.map(spec_of, pool), spec_of(k)
    run = jax.shard_map(local, in_specs=(pools, heads, heads, P(), P()), out_specs=pools)
    return run(pool, k, v, tables, lengths)


def page_size_of(pool: Pool) -> int:
    """Tokens of a page."""
    return next(iter(pool.values())).shape[1]


def _written(
    pool: Pool, k: jax.Array, v: jax.Array, slots: tuple[jax.Array, jax.Array], merged: bool
) -> Pool:
    """The pool with keys and values [tokens, ..] at pages and places in them."""
    new = {"pages": _alternating(k, v)} if merged else {"keys": k, "values": v}
    return {name: pool[name].at[slots].set(x) for name, x in new.items()}


def _by_kind(q: jax.Array, decode: int, length: int) -> tuple[jax.Array, jax.Array]:
    """Queries [tokens, ..] of decode tokens [decode, 1, ..] and of chunks [chunks, length, ..]."""
    chunks = (q.shape[0] - decode) // max(length, 1)
    of_chunks = q[decode:].reshape(chunks, length, *q.shape[1:])
    return q[:decode, None], of_chunks


def pool_shapes(
    kernel: str, pages: int, page_size: int, kv_heads: int, head_dim: int
) -> dict[str, tuple[int, ...]]:
    """The arrays of a layer's pool, each [pages, page_size, heads, head_dim]."""
    if KERNELS[kernel].merged:
        return {"pages": (pages, page_size, 2 * kv_heads, head_dim)}
    shape = (pages, page_size, kv_heads, head_dim)
    return {"keys": shape, "values": shape}


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
            _say(f"paged attention: {name}" + (f" ({'; '.join(reasons)})" if reasons else ""))
            return name
        reasons.append(f"not {name}: {why}")
    raise MeshwrightError(f"paged attention {kernel!r} does not support this: {reasons[0]}")


@functools.lru_cache(maxsize=64)
def _say(text: str) -> None:
    _log.info(text)


def _alternating(k: jax.Array, v: jax.Array) -> jax.Array:
    """[tokens, 2 · kv_heads, head_dim]: the key and the value of each head."""
    return jnp.stack([k, v], axis=2).reshape(k.shape[0], -1, k.shape[-1])


def _plain(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: Pool,
    tokens: PagedTokens,
    window: int | None,
    bias: Bias | tuple[None, None] = (None, None),
) -> jax.Array:
    def attend(
        q: jax.Array, tables: jax.Array, positions: jax.Array, bias: jax.Array | None
    ) -> jax.Array:
        places = jnp.arange(tables.shape[1] * page_size_of(pool))
        distance = positions[:, :, None] - places[None, None]  # [n, length, keys]
        visible = distance >= 0
        if window is not None:
            visible &= distance < window
        return _over_pages(q, tables, visible, pool, bias)

    parts: Any = zip(
        _by_kind(q, tokens.positions.shape[0], tokens.length),
        (tokens.tables, tokens.chunk_tables),
        (tokens.positions[:, None], tokens.chunk_positions),
        bias,
        strict=True,
    )
    return jnp.concatenate(
        [attend(part, *of).reshape(-1, *q.shape[1:]) for part, *of in parts if part.size]
    )


def _over_pages(
    q: jax.Array,
    tables: jax.Array,
    visible: jax.Array,
    pool: Pool,
    bias: jax.Array | None = None,
) -> jax.Array:
    """q [n, length, heads, head_dim] over the pages of tables [n, width], softmax in float32.

    `visible` is [n, length or 1, keys], the bias [n, heads, length, keys].
    """
    n, length, _, head_dim = q.shape
    keys, values = (_contiguous(pool[name], tables) for name in ("keys", "values"))
    grouped = q.reshape(n, length, keys.shape[2], -1, head_dim)
    scores = jnp.einsum("nlkgd,nskd->nkgls", grouped, keys, preferred_element_type=jnp.float32)
    scores *= head_dim**-0.5
    if bias is not None:
        scores += bias.reshape(scores.shape)
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    return jnp.einsum("nkgls,nskd->nlkgd", weights, values).reshape(q.shape)


def _contiguous(pages: jax.Array, tables: jax.Array) -> jax.Array:
    """[n, width · page_size, kv_heads, head_dim]: the pages of each sequence, copied."""
    return pages[tables].reshape(tables.shape[0], -1, *pages.shape[2:])


def _cudnn(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: Pool,
    tokens: PagedTokens,
    window: int | None,
) -> jax.Array:
    decode, chunks = tokens.positions.shape[0], tokens.starts.shape[0]
    out = []
    if decode:
        pages = fused.Inputs(
            q[:decode, None], pool["keys"], pool["values"],
            counts=(jnp.ones_like(tokens.positions), tokens.positions + 1), tables=tokens.tables,
        )  # fmt: skip
        out.append(fused.output(pages)[:, 0])
    if chunks:
        shape = (chunks, tokens.length)
        of_q, of_k, of_v = (x[decode:].reshape(*shape, *x.shape[1:]) for x in (q, k, v))
        own = fused.Inputs(of_q, of_k, of_v, causal=True)
        if tokens.first:
            mixed = fused.output(own)
        else:
            mixed = merge(fused.forward(own), _to_past(of_q, pool, tokens)).out.astype(q.dtype)
        out.append(mixed.reshape(-1, *q.shape[1:]))
    return jnp.concatenate(out)


def _to_past(q: jax.Array, pool: Pool, tokens: PagedTokens) -> Partial:
    """Attention of chunks to what precedes them."""
    keys, values = (_contiguous(pool[name], tokens.chunk_tables) for name in ("keys", "values"))
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
    size, width = pool["pages"].shape[1], tables.shape[1]
    blocks = {}
    if jax.default_backend() != "tpu":
        blocks["num_kv_pages_per_block"] = max(min(1024 // size, width), 1)
        blocks["num_queries_per_block"] = 32

    def run(q: jax.Array, pages: jax.Array) -> jax.Array:
        out: jax.Array = ragged_paged_attention(
            q, pages, lengths, tables, ends, used,
            sm_scale=q.shape[-1] ** -0.5, sliding_window=window, **blocks,
        )  # fmt: skip
        return out

    mixed: jax.Array
    if not tokens.length:
        mixed = untyped(run, q, pool["pages"])
        return mixed
    # The kernel takes the queries of all sequences without gaps, so padding moves to the end, and
    # back. It leaves the outputs of padding undefined; here they are 0, as NaN would reach page 0.
    real = jnp.concatenate([jnp.ones_like(tokens.positions, bool), tokens.inside.reshape(-1)])
    mixed = untyped(run, q[jnp.argsort(~real, stable=True)], pool["pages"])
    mixed = mixed[jnp.maximum(jnp.cumsum(real) - 1, 0)]
    return jnp.where(real[:, None, None], mixed, jnp.zeros((), mixed.dtype))


def _cudnn_refuses(call: PagedCall) -> str | None:
    if call.window is not None:
        return "it has no sliding window over pages"
    if call.biased:
        return "it adds no bias to scores over pages"
    return fused.refuses(call.platform, call.dtype, call.head_dim)


def _ragged_refuses(call: PagedCall) -> str | None:
    if call.platform != "tpu":
        return "it runs on TPUs"
    if call.head_dim % 128:
        return f"head_dim {call.head_dim} is not a multiple of 128"
    return "it adds no bias to scores" if call.biased else None


KERNELS: dict[str, PagedKernel] = {
    "cudnn": PagedKernel(_cudnn_refuses, _cudnn),
    "ragged": PagedKernel(_ragged_refuses, _ragged, merged=True),
    "plain": PagedKernel(lambda call: None, _plain),
}
