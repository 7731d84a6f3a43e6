"""Kernels that read each row of an array once, for Hopper GPUs (Mosaic GPU).

XLA takes a row's maximum, the sum that needs it, and what needs the sum in one pass over memory
each; here a warpgroup holds what it has read. Rows are [rows, columns]; whoever calls asks
`refuses` first.
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
_CHUNK = 1024  # columns read at a time: 16 bytes of bfloat16 a thread
_AHEAD = 4  # chunks of a long row that are under way at once
_WHOLE = 2 * _CHUNK  # the longest row held at once; longer ones were not measured yet


def refuses(columns: int, dtype: Any, *, whole_row: bool) -> str | None:
    """Why such rows cannot be read here, None if they can; `whole_row`: held at once."""
    why = _why_not(columns, dtype, whole_row)
    say(f"{'norms' if whole_row else 'log-sums'} over {columns} columns", why)
    return why


def _why_not(columns: int, dtype: Any, whole_row: bool) -> str | None:
    why = unavailable(HOPPER)
    if why is not None:
        return why
    if jnp.dtype(dtype).itemsize != 2:
        return f"rows are of bfloat16 or float16, not {jnp.dtype(dtype)}"
    if columns % LANES:
        return f"{columns} columns do not divide by {LANES}"
    if whole_row and (columns > _WHOLE or columns % _CHUNK):
        return f"rows of {columns} are not held at once"
    return None


def log_sum_exp(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of each row its maximum, and the sum of exp(x - maximum); float32."""
    rows, columns = x.shape
    whole = columns // (_AHEAD * _CHUNK)

    def kernel(x_ref: Any, most_ref: Any, total_ref: Any) -> None:
        row = lax.axis_index("row")

        def chunk(start: Any, size: int = _CHUNK) -> jax.Array:
            return _wide(x_ref, row, start, size) * LOG2_E

        def fold(sums: Any, chunks: list[jax.Array]) -> Any:
            """Each thread's own maximum and sum, of the columns it reads."""
            before, total = sums
            most = functools.reduce(jnp.maximum, chunks, before)
            total = total * jnp.exp2(before - most)
            return most, sum((jnp.exp2(part - most) for part in chunks), total)

        def step(i: Any, sums: Any) -> Any:
            first = i * (_AHEAD * _CHUNK)
            return fold(sums, [chunk(first + j * _CHUNK) for j in range(_AHEAD)])

        # less than any logit, and still a number: -inf less itself would not be
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
    each = math.gcd(rows, 4)  # rows that a warpgroup takes one after the other

    def kernel(x_ref: Any, update_ref: Any, scale_ref: Any, sum_ref: Any, normed_ref: Any) -> None:
        group, whole = lax.axis_index("row"), pallas().ds(0, columns)
        weight = _load(scale_ref.at[whole], columns)

        def one(i: Any, _: Any) -> None:
            row = group * each + i
            x_row, update_row = (_load(ref.at[row, whole], columns) for ref in (x_ref, update_ref))
            total = x_row + update_row
            sum_ref[row, whole] = total
            wide = total.astype(jnp.float32)
            shrink = lax.rsqrt(jnp.sum(wide * wide) / columns + eps)
            normed_ref[row, whole] = (wide * shrink * weight).astype(normed_ref.dtype)

        lax.fori_loop(0, each, one, None)

    like = (x.shape, x.dtype)
    arrays = x, update, scale.astype(jnp.float32)
    total, normed = _call(kernel, rows // each, (like, like), *arrays)
    return total, normed


def norm_gradient(
    x: jax.Array, scale: jax.Array, eps: float, through: jax.Array | None, *given: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Gradients of x and of scale, where x goes on and into an rms norm beside.

    `through` is the gradient of x as it goes on, None where it does not; `given` those of its norm,
    one for each use.
    """
    rows, columns = x.shape
    each = math.gcd(rows, 32)  # rows that a warpgroup takes one after the other

    def kernel(x_ref: Any, scale_ref: Any, *refs: Any) -> None:
        *gradient_refs, x_gradient_ref, scale_gradient_ref = refs
        through_refs, given_refs = gradient_refs[: -len(given)], gradient_refs[-len(given) :]
        group = lax.axis_index("row")
        weight = _load(scale_ref.at[pallas().ds(0, columns)], columns)

        def one(i: Any, scale_gradient: jax.Array) -> jax.Array:
            row = group * each + i
            wide, *on = (_wide(ref, row, 0, columns) for ref in (x_ref, *through_refs))
            gradient = functools.reduce(
                jnp.add, (_wide(ref, row, 0, columns) for ref in given_refs)
            )
            weighted = gradient * weight
            squares, product = jnp.sum(wide * wide), jnp.sum(weighted * wide)
            shrink = lax.rsqrt(squares / columns + eps)
            turned = weighted - wide * (product * shrink * shrink / columns)
            x_gradient = functools.reduce(jnp.add, on, shrink * turned)
            x_gradient_ref[row, pallas().ds(0, columns)] = x_gradient.astype(x_gradient_ref.dtype)
            return scale_gradient + gradient * wide * shrink

        total = lax.fori_loop(0, each, one, _full(0.0, columns))
        scale_gradient_ref[group, pallas().ds(0, columns)] = total

    groups = rows // each
    out = (x.shape, x.dtype), ((groups, columns), jnp.float32)
    gradients = given if through is None else (through, *given)
    x_gradient, parts = _call(kernel, groups, out, x, scale.astype(jnp.float32), *gradients)
    return x_gradient, jnp.sum(parts, axis=0)


def _rest(columns: int, start: int) -> list[tuple[int, int]]:
    """From `start` on in pieces of _CHUNK columns, then of halves of it."""
    pieces, size = [], _CHUNK
    while start < columns:
        while size > columns - start:
            size //= 2
        pieces.append((start, size))
        start += size
    return pieces


def _call(kernel: Any, groups: int, out: tuple[tuple[Any, Any], ...], *arrays: jax.Array) -> Any:
    """The kernel, once for each group of rows; results differ wherever an array does."""
    arrays = tuple(varying_like(x, *arrays) for x in arrays)
    results = mosaic().kernel(
        kernel,
        out_type=tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in out),
        grid=(groups,),
        grid_names=("row",),
        compiler_params=mosaic().CompilerParams(approx_math=True),
    )(*arrays)
    return tuple(varying_like(x, *arrays) for x in results)  # inside, types are not looked at


def _wide(ref: Any, row: Any, start: Any, size: int) -> jax.Array:
    return _load(ref.at[row, pallas().ds(start, size)], size).astype(jnp.float32)


def _load(ref: Any, size: int) -> jax.Array:
    return load(ref, _layout(size))


def _full(value: float, size: int) -> jax.Array:
    return mosaic().layout_cast(jnp.full((size,), value, jnp.float32), _layout(size))


def _layout(size: int) -> Any:
    """Columns in order over the threads, up to 8 side by side in one."""
    return mosaic().Layout.WG_STRIDED((size,), vec_size=min(8, size // LANES))
