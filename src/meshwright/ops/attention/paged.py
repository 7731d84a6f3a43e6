"""Attention over a paged KV cache: write new keys and values into pages, attend over page tables.

    out, pool = paged_attention(q, k, v, pool, tokens)

Pages of 8 bits (fp8) hold rounded keys and values, and all attention is to those, so it does not
matter in which chunk a token was computed. A step has decode tokens, one per sequence, and then
chunks of prompts: see PagedTokens. Pages may also hold keys that are no token's of these sequences,
such as those of an encoder: see PagedKeys.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from meshwright.ops.attention.paged_kernels import KERNELS, by_kind, over_pages
from meshwright.ops.attention.paged_tokens import (
    PagedBias,
    PagedKeys,
    PagedTokens,
    Pool,
    page_size_of,
)
from meshwright.ops.collectives import spec_of

CACHE_DTYPES = {"fp8": jnp.dtype(jnp.float8_e4m3fn)}


def paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: Pool,
    tokens: PagedTokens,
    *,
    window: int | None = None,
    bias: PagedBias | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, Pool]:
    """Causal attention of q [1, tokens, heads, head_dim], and the pool with these keys and values.

    The pool has the shape `pool_shape` for the kernel of the tokens. A bias, split over heads as q
    is, is added to the scores; only the plain kernel does that. `softcap` and `sinks` as in
    `attention`.
    """
    kernel = KERNELS[tokens.kernel]
    capped = {} if softcap is None else {"softcap": softcap}

    def local(
        q: jax.Array, k: jax.Array, v: jax.Array, pool: Pool, tokens: PagedTokens, more: Any
    ) -> Any:
        q, k, v = q[0], _rounded(k[0], pool), _rounded(v[0], pool)
        pool = kernel.write(pool, k, v, tokens.slots(page_size_of(pool)))
        k, v = k.astype(q.dtype), v.astype(q.dtype)
        return kernel.attend(q, k, v, pool, tokens, window, **more, **capped)[None], pool

    heads, kv_heads = spec_of(q), spec_of(k)
    pools = spec_of(pool)
    more: dict[str, Any] = {} if bias is None else {"bias": bias}
    by_head: dict[str, Any] = jax.tree.map(lambda _: P(None, heads[2], None, None), more)
    if sinks is not None:
        more["sinks"], by_head["sinks"] = sinks, P(heads[2])
    specs = (heads, kv_heads, kv_heads, pools, jax.tree.map(lambda _: P(), tokens), by_head)
    run = jax.shard_map(local, in_specs=specs, out_specs=(heads, pools))
    return run(q, k, v, pool, tokens, more)


def attend_to_pages(q: jax.Array, pool: Pool, keys: PagedKeys, length: int) -> jax.Array:
    """Attention of q [1, tokens, heads, head_dim] to all of `keys`; `length`: tokens of a chunk."""

    def local(q: jax.Array, pool: Pool, keys: PagedKeys) -> jax.Array:
        def attend(q: jax.Array, tables: jax.Array, lengths: jax.Array) -> jax.Array:
            places = jnp.arange(tables.shape[1] * page_size_of(pool))
            return over_pages(q, tables, places[None, None] < lengths[:, None, None], pool)

        sides = (keys.tables, keys.lengths), (keys.chunk_tables, keys.chunk_lengths)
        parts = zip(by_kind(q[0], keys.lengths.shape[0], length), sides, strict=True)
        return jnp.concatenate(
            [attend(part, *of).reshape(-1, *q.shape[2:]) for part, of in parts if part.size]
        )[None]

    heads = spec_of(q)
    specs = (heads, spec_of(pool), jax.tree.map(lambda _: P(), keys))
    return jax.shard_map(local, in_specs=specs, out_specs=heads)(q, pool, keys)


def fill_pages(
    pool: Pool, k: jax.Array, v: jax.Array, tables: jax.Array, lengths: jax.Array, kernel: str
) -> Pool:
    """The pool with keys and values [n, length, kv_heads, head_dim], from the first place on.

    Those from `lengths` [n] on are padding and go to page 0. Sequence i has the pages tables[i].
    """

    def local(pool: Pool, k: jax.Array, v: jax.Array, tables: jax.Array, lengths: jax.Array) -> Any:
        size = page_size_of(pool)
        places = jnp.arange(k.shape[1])
        pages = tables[:, jnp.minimum(places // size, tables.shape[1] - 1)]
        pages = jnp.where(places[None] < lengths[:, None], pages, 0).reshape(-1)
        slots = pages, jnp.tile(places % size, k.shape[0])
        k, v = (_rounded(x.reshape(-1, *x.shape[2:]), pool) for x in (k, v))
        return KERNELS[kernel].write(pool, k, v, slots)

    pools, heads = spec_of(pool), spec_of(k)
    run = jax.shard_map(local, in_specs=(pools, heads, heads, P(), P()), out_specs=pools)
    return run(pool, k, v, tables, lengths)


def _rounded(x: jax.Array, pool: Pool) -> jax.Array:
    """x in the dtype of the pages; what fp8 cannot represent becomes its largest number."""
    if pool.dtype in CACHE_DTYPES.values():
        most = float(jnp.finfo(pool.dtype).max)
        x = jnp.clip(x, -most, most)
    return x.astype(pool.dtype)
