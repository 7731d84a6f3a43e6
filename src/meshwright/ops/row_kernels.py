"""Kernels that read each row of an array once, for Hopper GPUs (Mosaic GPU).

XLA reads a row once for its maximum, once for the sum and once for the result; here a warpgroup
keeps it in registers. Arrays are [rows, columns]; callers must check `refuses` first.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.ops.collectives import varying_like
from meshwright.ops.mosaic import HOPPER, LOG2_E, load, mosaic, pallas, say, unavailable

LANES = 128  # threads of a warpgroup
_CHUNK = 1024  # columns per read: 16 bytes of bfloat16 per thread
_AHEAD = 4  # chunks of a long row in flight
_WHOLE = 2 * _CHUNK  # the longest row kept in registers; longer ones are not measured yet


def refuses(columns: int, dtype: Any, *, whole_row: bool) -> str | None:
    """Why these kernels cannot be used, None if they can; `whole_row`: keep a row in registers."""
    why = _why_not(columns, dtype, whole_row)
    say(f"{'norms' if whole_row else 'log-sum-exp'} over {columns} columns", why)
    return why


def _why_not(columns: int, dtype: Any, whole_row: bool) -> str | None:
    why = unavailable(HOPPER)
    if why is not None:
        return why
    if jnp.dtype(dtype).itemsize != 2:
        return f"it reads bfloat16 or float16, not {jnp.dtype(dtype)}"
    if columns % LANES:
        return f"{columns} columns are not divisible by {LANES}"
    if whole_row and (columns > _WHOLE or columns % _CHUNK):
        return f"rows of {columns} columns do not fit into registers"
    return None


def log_sum_exp(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The maximum of each row, and the sum of exp(x - maximum); float32."""
    rows, columns = x.shape
    whole = columns // (_AHEAD * _CHUNK)

    def kernel(x_ref: Any, most_ref: Any, total_ref: Any) -> None:
        row = lax.axis_index("row")

        def chunk(start: Any, size: int = _CHUNK) -> jax.Array:
            return _float32(x_ref, row, start, size) * LOG2_E

        def fold(sums: Any, chunks: list[jax.Array]) -> Any:
            """Running maximum and sum of each thread, over the columns it reads."""
            before, total = sums
            most = functools.reduce(jnp.maximum, chunks, before)
            total = total * jnp.exp2(before - most)
            return most, sum((jnp.exp2(part - most) for part in chunks), total)

        def step(i: Any, sums: Any) -> Any:
            first = i * (_AHEAD * _CHUNK)
            return fold(sums, [chunk(first + j * _CHUNK) for j in range(_AHEAD)])

        # smaller than any logit, but finite: -inf - -inf is NaN
        nothing = _full(-1e30, _CHUNK), _full(0.0, _CHUNK)
        sums = lax.fori_loop(0, whole, step, nothing)
        rest = [chunk(start, size) for start, size in _rest(columns, whole * _AHEAD * _CHUNK)]
        sums = fold(sums, [part for part in rest if part.size == _CHUNK])
        rest = [part for part in rest if part.size < _CHUNK]
        most = functools.reduce(jnp.maximum, (jnp.max(part) for part in rest), jnp.max(sums[0]))
        total = jnp.sum(sums[1] * jnp.exp2(sums[0] - most))
        most_ref[row] = most / LOG2_E
        total_ref[row] = sum((jnp.sum(jnp.exp2(part - most)) for part in rest), total)

    each = ((rows,), jnp.float32)
    most, total = _call(kernel, rows, (each, each), x)
    return most, total


def add_and_norm(
    x: jax.Array, update: jax.Array, scale: jax.Array, eps: float
) -> tuple[jax.Array, jax.Array]:
    """`x + update`, rounded to their dtype, and the rms norm of that sum times scale."""
    rows, columns = x.shape
    each = math.gcd(rows, 4)  # rows per warpgroup

    def kernel(x_ref: Any, update_ref: Any, scale_ref: Any, sum_ref: Any, normed_ref: Any) -> None:
        group, whole = lax.axis_index("row"), pallas().ds(0, columns)
        weight = _load(scale_ref.at[whole], columns)

        def one(i: Any, _: Any) -> None:
            row = group * each + i
            x_row, update_row = (_load(ref.at[row, whole], columns) for ref in (x_ref, update_ref))
            total = x_row + update_row
            sum_ref[row, whole] = total
            x32 = total.astype(jnp.float32)
            shrink = lax.rsqrt(jnp.sum(x32 * x32) / columns + eps)
            normed_ref[row, whole] = (x32 * shrink * weight).astype(normed_ref.dtype)

        lax.fori_loop(0, each, one, None)

    like = (x.shape, x.dtype)
    arrays = x, update, scale.astype(jnp.float32)
    total, normed = _call(kernel, rows // each, (like, like), *arrays)
    return total, normed


def norm_gradient(
    x: jax.Array, scale: jax.Array, eps: float, dsum: jax.Array | None, *dnormed: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Gradients of x and scale, where both x and its rms norm are used.

    `dsum` is the cotangent of x itself, None if x has no other use; `dnormed` are the cotangents of
    its norm, one per use.
    """
    rows, columns = x.shape
    each = math.gcd(rows, 32)  # rows per warpgroup

    def kernel(x_ref: Any, scale_ref: Any, *refs: Any) -> None:
        *gradient_refs, x_gradient_ref, scale_gradient_ref = refs
        dsum_refs, dnormed_refs = gradient_refs[: -len(dnormed)], gradient_refs[-len(dnormed) :]
        group = lax.axis_index("row")
        weight = _load(scale_ref.at[pallas().ds(0, columns)], columns)

        def one(i: Any, scale_gradient: jax.Array) -> jax.Array:
            row = group * each + i
            x32, *on = (_float32(ref, row, 0, columns) for ref in (x_ref, *dsum_refs))
            gradient = functools.reduce(
                jnp.add, (_float32(ref, row, 0, columns) for ref in dnormed_refs)
            )
            weighted = gradient * weight
            squares, product = jnp.sum(x32 * x32), jnp.sum(weighted * x32)
            shrink = lax.rsqrt(squares / columns + eps)
            projected = weighted - x32 * (product * shrink * shrink / columns)
            x_gradient = functools.reduce(jnp.add, on, shrink * projected)
            x_gradient_ref[row, pallas().ds(0, columns)] = x_gradient.astype(x_gradient_ref.dtype)
            return scale_gradient + gradient * x32 * shrink

        total = lax.fori_loop(0, each, one, _full(0.0, columns))
        scale_gradient_ref[group, pallas().ds(0, columns)] = total

    groups = rows // each
    out = (x.shape, x.dtype), ((groups, columns), jnp.float32)
    gradients = dnormed if dsum is None else (dsum, *dnormed)
    x_gradient, parts = _call(kernel, groups, out, x, scale.astype(jnp.float32), *gradients)
    return x_gradient, jnp.sum(parts, axis=0)


def _rest(columns: int, start: int) -> list[tuple[int, int]]:
    """Columns from `start` in pieces of _CHUNK, then of halves of it."""
    pieces, size = [], _CHUNK
    while start < columns:
        while size > columns - start:
            size //= 2
        pieces.append((start, size))
        start += size
    return pieces


def _call(kernel: Any, groups: int, out: tuple[tuple[Any, Any], ...], *arrays: jax.Array) -> Any:
    """Run the kernel, once per group of rows."""
    arrays = tuple(varying_like(x, *arrays) for x in arrays)
    results = mosaic().kernel(
        kernel,
        out_type=tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in out),
        grid=(groups,),
        grid_names=("row",),
        compiler_params=mosaic().CompilerParams(approx_math=True),
    )(*arrays)
    return tuple(
        varying_like(x, *arrays) for x in results
    )  # kernels drop the varying axes of types


def _float32(ref: Any, row: Any, start: Any, size: int) -> jax.Array:
    return _load(ref.at[row, pallas().ds(start, size)], size).astype(jnp.float32)


def _load(ref: Any, size: int) -> jax.Array:
    return load(ref, _layout(size))


def _full(value: float, size: int) -> jax.Array:
    return mosaic().layout_cast(jnp.full((size,), value, jnp.float32), _layout(size))


def _layout(size: int) -> Any:
    """Columns in order over the threads, up to 8 consecutive ones per thread."""
    return mosaic().Layout.WG_STRIDED((size,), vec_size=min(8, size // LANES))
