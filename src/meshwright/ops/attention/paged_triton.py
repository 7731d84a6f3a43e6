"""Decode attention over pages on NVIDIA GPUs, and new tokens written into pages, by Triton.

cuDNN reads pages in the dtype of the queries only, and without a sliding window. Here a program
reads the pages of one sequence and one key head once, and serves all queries that share the head.
Pages of 8 bits are converted to float16 in registers, which is one instruction for two numbers (to
bfloat16 it is several). A long sequence is split over several programs, whose outputs are merged:
program s has pages s, s + splits and so on, so that a short one in a long table is split too.
"""

import dataclasses
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwright.ops.collectives import untyped
from meshwright.ops.split_norm import PartialSums, Squares

QUERIES = 16  # fewest that a tensor core's matmul takes
_PROGRAMS = 528  # four on each of an H100's multiprocessors
_FEWEST_PAGES = 1  # of a program, of the longest sequence
_MOST_SPLITS = 128  # whose outputs a program merges in registers
_COLUMNS = 128  # at least, of the matrix that a program of `product_of_parts` reads
_LOWEST = -1e30  # less than any score


def unavailable() -> str | None:
    """Why this kernel cannot be used, None if it can."""
    try:
        from jax.experimental.pallas import triton  # noqa: F401
    except ImportError:
        return f"jax {jax.__version__} has no Triton backend of Pallas"
    return None


def paged_decode(
    q: jax.Array,
    pool: jax.Array,
    tables: jax.Array,
    lengths: jax.Array,
    *,
    window: int | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """A query per sequence: q [batch, heads, head_dim] over pages [2 · pages, size, kv_heads, ..].

    `tables` [batch, width] are the pages of each sequence with keys; values are as many pages after
    them. `lengths` [batch] are its tokens, at least 1. With a window, the last tokens only. The
    result is the output and the log-sum-exp of its scores [batch, heads].
    """
    parts = decode_parts(q, pool, tables, lengths, window=window, interpret=interpret)
    return _merged(parts, q.dtype, interpret)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Parts:
    """What the programs of a sequence found, each of its own pages."""

    out: jax.Array  # [splits, batch, heads, head_dim]
    lse: jax.Array  # [splits, batch, heads]: the log-sum-exp of their scores


def decode_parts(
    q: jax.Array,
    pool: jax.Array,
    tables: jax.Array,
    lengths: jax.Array,
    *,
    window: int | None = None,
    interpret: bool = False,
) -> Parts:
    """`paged_decode` before the outputs of several programs for a sequence are merged."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    batch, heads, head_dim = q.shape
    pages, size, kv_heads, _ = pool.shape
    width, group = tables.shape[1], heads // kv_heads
    queries = max(QUERIES, pl.next_power_of_2(group))
    splits = _splits(batch * kv_heads, width)
    grouped = q.reshape(batch, kv_heads, group, head_dim)
    of_query = pl.BlockSpec((None, None, queries, head_dim), lambda h, b, s: (b, h, 0, 0))
    of_pool = pl.BlockSpec((pages, size, None, head_dim), lambda h, b, s: (0, 0, h, 0))
    out_shape = [
        jax.ShapeDtypeStruct((splits, *grouped.shape), q.dtype if splits == 1 else jnp.float32),
        jax.ShapeDtypeStruct((splits, *grouped.shape[:3]), jnp.float32),
    ]
    with warnings.catch_warnings():  # that this backend will be removed
        warnings.simplefilter("ignore", DeprecationWarning)
        out, lse = pl.pallas_call(
            functools.partial(_kernel, window, group),
            grid=(kv_heads, batch, splits),
            in_specs=[
                of_query,
                of_pool,
                pl.BlockSpec((None, width), lambda h, b, s: (b, 0)),
                pl.BlockSpec((None,), lambda h, b, s: (b,)),
            ],
            out_specs=[
                pl.BlockSpec(
                    (None, None, None, queries, head_dim), lambda h, b, s: (s, b, h, 0, 0)
                ),
                pl.BlockSpec((None, None, None, queries), lambda h, b, s: (s, b, h, 0)),
            ],
            out_shape=out_shape,
            compiler_params=triton.CompilerParams(num_warps=2, num_stages=2),
            interpret=interpret,
            name="paged_decode",
        )(grouped, pool, tables, lengths)
    out, lse = (x.reshape(splits, batch, heads, *x.shape[4:]) for x in (out, lse))
    return Parts(out, lse)


def _merged(parts: Parts, dtype: Any, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """The output [batch, heads, head_dim] and its log-sum-exp, of all parts; by one kernel."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    splits, batch, heads, head_dim = parts.out.shape
    if splits == 1:
        return parts.out[0], parts.lse[0]
    many = pl.next_power_of_2(splits)

    def kernel(out_ref: Any, lse_ref: Any, merged_ref: Any, total_ref: Any) -> None:
        merged, total_ref[()] = _of_parts(out_ref, lse_ref, splits)
        merged_ref[...] = merged.astype(merged_ref.dtype)

    with warnings.catch_warnings():  # that this backend will be removed
        warnings.simplefilter("ignore", DeprecationWarning)
        merged, total = pl.pallas_call(
            kernel,
            grid=(batch, heads),
            in_specs=[
                pl.BlockSpec((many, None, None, head_dim), lambda b, h: (0, b, h, 0)),
                pl.BlockSpec((many, None, None), lambda b, h: (0, b, h)),
            ],
            out_specs=[
                pl.BlockSpec((None, None, head_dim), lambda b, h: (b, h, 0)),
                pl.BlockSpec((None, None), lambda b, h: (b, h)),
            ],
            out_shape=[
                jax.ShapeDtypeStruct((batch, heads, head_dim), dtype),
                jax.ShapeDtypeStruct((batch, heads), jnp.float32),
            ],
            compiler_params=triton.CompilerParams(num_warps=max(1, many // 16), num_stages=1),
            interpret=interpret,
            name="paged_decode_merged",
        )(parts.out, parts.lse)
    return merged, total


def _of_parts(out: Any, lse: Any, splits: int, *token: Any) -> tuple[jax.Array, jax.Array]:
    """In a kernel: the output and the log-sum-exp of one head, of the refs of its parts.

    With a token, refs have a dim of tokens after that of parts.
    """
    from jax.experimental.pallas import triton

    inside = jnp.arange(out.shape[0]) < splits
    each = triton.load(lse.at[(slice(None), *token)], mask=inside, other=_LOWEST)
    most = jnp.max(each, axis=0)
    weights = jnp.where(inside, jnp.exp(each - most), 0.0)
    total = jnp.sum(weights, axis=0)
    # parts without a key are not read
    has_keys = jnp.broadcast_to((weights > 0)[:, None], (out.shape[0], out.shape[-1]))
    values = triton.load(out.at[(slice(None), *token)], mask=has_keys, other=0.0)
    merged = jnp.sum(values.astype(jnp.float32) * weights[:, None], axis=0)
    return merged / total, most + jnp.log(total)


def product_of_parts(parts: Parts, weight: jax.Array, interpret: bool = False) -> PartialSums:
    """What heads add to a few tokens: of each head its product with `weight` [heads, .., embed].

    The parts of a head are merged by every program that multiplies them.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    splits, batch, heads, head_dim = parts.out.shape
    embed, many = weight.shape[-1], pl.next_power_of_2(splits)
    # fewer programs merge the same parts
    columns = 2 * _COLUMNS if embed % (2 * _COLUMNS) == 0 else _COLUMNS

    def kernel(out_ref: Any, lse_ref: Any, weight_ref: Any, sum_ref: Any) -> None:
        matrix = weight_ref[...]  # first, as it takes the longest
        places = jnp.arange(QUERIES)[:, None]
        merged = jnp.zeros((QUERIES, head_dim), jnp.float32)
        for token in map(np.int32, range(batch)):
            one, _ = _of_parts(out_ref, lse_ref, splits, token)
            merged = jnp.where(places == token, one[None], merged)
        product = triton.dot(merged.astype(matrix.dtype), matrix)
        mask = jnp.broadcast_to(places < batch, product.shape)
        triton.store(sum_ref.at[...], product, mask=mask)

    with warnings.catch_warnings():  # that this backend will be removed
        warnings.simplefilter("ignore", DeprecationWarning)
        sums = pl.pallas_call(
            kernel,
            grid=(heads, embed // columns),
            in_specs=[
                pl.BlockSpec((many, batch, None, head_dim), lambda h, n: (0, 0, h, 0)),
                pl.BlockSpec((many, batch, None), lambda h, n: (0, 0, h)),
                pl.BlockSpec((None, head_dim, columns), lambda h, n: (h, 0, n)),
            ],
            out_specs=pl.BlockSpec((None, QUERIES, columns), lambda h, n: (h, 0, n)),
            out_shape=jax.ShapeDtypeStruct((heads, batch, embed), jnp.float32),
            compiler_params=triton.CompilerParams(num_warps=max(4, many // 16), num_stages=1),
            interpret=interpret,
            name="product_of_parts",
        )(parts.out, parts.lse, weight)
    return PartialSums(sums)


def write_pages(
    pool: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: jax.Array,
    places: jax.Array,
    interpret: bool = False,
) -> jax.Array:
    """The pool, which is overwritten, with keys and values [tokens, kv_heads, head_dim].

    `pages` [tokens] are those of keys; values are as many pages after them. A program copies one
    token.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    tokens, *of_token = k.shape
    heads, width = (pl.next_power_of_2(size) for size in of_token)
    of_tokens = pl.BlockSpec((None, heads, width), lambda t: (t, 0, 0))
    number = pl.BlockSpec((None,), lambda t: (t,))
    of_pool = pl.BlockSpec((*pool.shape[:2], heads, width), lambda t: (0,) * 4)

    def kernel(k_ref: Any, v_ref: Any, page_ref: Any, place_ref: Any, _: Any, out_ref: Any) -> None:
        inside = (jnp.arange(heads) < of_token[0])[:, None] & (jnp.arange(width) < of_token[1])[
            None
        ]
        page, place = page_ref[()], place_ref[()]
        for ref, at in ((k_ref, page), (v_ref, page + pool.shape[0] // 2)):
            value = triton.load(ref.at[...], mask=inside, other=0)
            triton.store(out_ref.at[at, place], value, mask=inside)

    with warnings.catch_warnings():  # that this backend will be removed
        warnings.simplefilter("ignore", DeprecationWarning)
        written: jax.Array = pl.pallas_call(
            kernel,
            grid=(tokens,),
            in_specs=[of_tokens, of_tokens, number, number, of_pool],
            out_specs=of_pool,
            out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
            input_output_aliases={4: 0},
            compiler_params=triton.CompilerParams(num_warps=2, num_stages=1),
            interpret=interpret,
            name="write_pages",
        )(k, v, pages, places, pool)
    return written


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Heads:
    """Queries, keys and values of tokens, as products with what `scale_for_norm` gives."""

    products: jax.Array  # [tokens, kv_heads, group + 2, head_dim]: queries, the key, the value
    squares: Squares  # by which the norm divides
    tables: tuple[jax.Array, jax.Array]  # of rotary positions: cosines, sines [tokens, .. / 2]
    norms: tuple[jax.Array, ...]  # the scales of norms of queries and keys, if there are any


def write_heads(
    heads: Heads, pool: jax.Array, pages: jax.Array, places: jax.Array, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Queries [tokens, heads, head_dim], and the pool, which is overwritten, with keys and values.

    They have their norms and rotary positions. `pages` and `places` as in `write_pages`. A program
    has one head of one token.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    tokens, kv_heads, members, head_dim = heads.products.shape
    group, half, squares = members - 2, head_dim // 2, heads.squares
    arrays = [heads.products, squares.parts, *heads.tables, *heads.norms, pages, places, pool]

    def kernel(product_ref: Any, square_ref: Any, cos_ref: Any, sin_ref: Any, *refs: Any) -> None:
        *norm_refs, page_ref, place_ref, _, q_ref, pool_ref = refs
        member, head = pl.program_id(0), pl.program_id(1)
        is_query, is_value = member < group, member == group + 1
        factor, cos, sin = squares.factor(square_ref), cos_ref[...], sin_ref[...]
        dims = [pl.ds(0, half), pl.ds(half, half)]
        x = [product_ref[dim].astype(jnp.float32) * factor for dim in dims]
        normed = x
        if norm_refs:
            total = functools.reduce(jnp.add, [jnp.sum(part * part, axis=0) for part in x])
            root = lax.rsqrt(total / head_dim + squares.eps)
            scales = [
                jnp.where(is_query, *(ref[dim].astype(jnp.float32) for ref in norm_refs))
                for dim in dims
            ]
            normed = [part * root * scale for part, scale in zip(x, scales, strict=True)]
        first, second = normed
        rotated = first * cos - second * sin, second * cos + first * sin
        page = page_ref[()] + is_value.astype(jnp.int32) * (pool.shape[0] // 2)
        for part, plain, dim in zip(rotated, x, dims, strict=True):
            value = jnp.where(is_value, plain, part).astype(pool.dtype)
            masks = [
                jnp.broadcast_to(kind, value.shape) for kind in (member < group, member >= group)
            ]
            triton.store(q_ref.at[jnp.minimum(member, group - 1), dim], value, mask=masks[0])
            triton.store(pool_ref.at[page, place_ref[()], head, dim], value, mask=masks[1])

    def run(*arrays: jax.Array) -> Any:
        number = pl.BlockSpec((None,), lambda m, h, t: (t,))
        of_squares = pl.next_power_of_2(squares.parts.shape[0]), None
        of_pool = pl.BlockSpec(pool.shape, lambda m, h, t: (0,) * 4)
        return pl.pallas_call(
            kernel,
            grid=(members, kv_heads, tokens),
            in_specs=[
                pl.BlockSpec((None, None, None, head_dim), lambda m, h, t: (t, h, m, 0)),
                pl.BlockSpec(of_squares, lambda m, h, t: (0, t)),
                *(pl.BlockSpec((None, half), lambda m, h, t: (t, 0)) for _ in heads.tables),
                *(pl.BlockSpec((head_dim,), lambda m, h, t: (0,)) for _ in heads.norms),
                number,
                number,
                of_pool,
            ],
            out_specs=[
                pl.BlockSpec((None, None, group, head_dim), lambda m, h, t: (t, h, 0, 0)),
                of_pool,
            ],
            out_shape=[
                jax.ShapeDtypeStruct((tokens, kv_heads, group, head_dim), pool.dtype),
                jax.ShapeDtypeStruct(pool.shape, pool.dtype),
            ],
            input_output_aliases={len(arrays) - 1: 1},
            compiler_params=triton.CompilerParams(num_warps=1, num_stages=1),
            interpret=interpret,
            name="write_heads",
        )(*arrays)

    with warnings.catch_warnings():  # that this backend will be removed
        warnings.simplefilter("ignore", DeprecationWarning)
        q, written = untyped(run, *arrays)
    return q.reshape(tokens, -1, head_dim), written


def _splits(programs: int, width: int) -> int:
    """Into how many programs the pages of a sequence are split, to keep the device busy."""
    return max(1, min(-(-_PROGRAMS // programs), width // _FEWEST_PAGES, _MOST_SPLITS))


def _kernel(
    window: int | None,
    group: int,
    q_ref: Any,
    pool_ref: Any,
    table_ref: Any,
    length_ref: Any,
    out_ref: Any,
    lse_ref: Any,
) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    queries, head_dim = q_ref.shape
    half, size = pool_ref.shape[0] // 2, pool_ref.shape[1]
    # of every so many pages one is this program's
    own, splits, length = pl.program_id(2), pl.num_programs(2), length_ref[()]
    is_small = pool_ref.dtype.itemsize == 1
    dtype = jnp.float16 if is_small else pool_ref.dtype
    is_query = jnp.arange(queries) < group
    of_queries = jnp.broadcast_to(is_query[:, None], q_ref.shape)
    q = triton.load(q_ref.at[...], mask=of_queries, other=0).astype(dtype)

    def page(index: jax.Array, carry: Any) -> Any:
        out, most, total = carry
        number = own + index * splits
        here = table_ref[number]
        keys, values = (pool_ref[at].astype(dtype) for at in (here, here + half))
        scores = triton.dot(q, keys.T) * head_dim**-0.5
        position = number * size + jnp.arange(size)
        visible = position < length
        if window is not None:
            visible &= position >= length - window
        scores = jnp.where(visible[None], scores, -jnp.inf)
        highest = jnp.maximum(most, jnp.max(scores, axis=1))
        weights = jnp.exp(scores - highest[:, None])
        shrunk = jnp.exp(most - highest)
        total = total * shrunk + jnp.sum(weights, axis=1)
        return out * shrunk[:, None] + triton.dot(weights.astype(dtype), values), highest, total

    start: Any = 0
    if window is not None:
        before = jnp.maximum((length - window) // size - own, 0)  # pages
        start = pl.cdiv(before, splits)
    pages = jnp.minimum(pl.cdiv(length, size), table_ref.shape[0])
    stop = pl.cdiv(jnp.maximum(pages - own, 0), splits)
    zeros = jnp.zeros(queries, jnp.float32)
    carry = jnp.zeros((queries, head_dim), jnp.float32), zeros + _LOWEST, zeros
    out, most, total = lax.fori_loop(start, stop, page, carry)
    total = jnp.where(total > 0, total, 1.0)  # no key here
    triton.store(out_ref.at[...], (out / total[:, None]).astype(out_ref.dtype), mask=of_queries)
    triton.store(lse_ref.at[...], most + jnp.log(total), mask=is_query)
