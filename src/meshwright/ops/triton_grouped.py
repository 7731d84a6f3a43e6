"""Grouped matmul on NVIDIA GPUs by Triton, of groups that begin at multiples of 128 rows.

The two products of hopper_grouped.py for other GPUs: a program computes a tile, whose rows are of
one group. In XLA's ragged_dot a GPU multiplies every row with the matrix of every group. Matrices
whose dims are no multiples of 16 are padded.
"""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.ops.attention.paged_triton import unavailable as no_triton
from meshwright.ops.collectives import current_device, untyped
from meshwright.ops.experts_triton import NARROWEST, block
from meshwright.ops.hopper_grouped import ROWS, padded

_WIDEST = 128  # columns of a tile
_DEPTH = 64  # of a block, along the dim that is summed
_STAGES = 3  # blocks that are being read
_OLDER = frozenset({"P100", "V100", "T4", "Tesla"})  # GPUs that do not multiply bfloat16


def unavailable() -> str | None:
    """Why these kernels cannot be used on the current device, None if they can."""
    platform, kind = current_device()
    words = kind.replace("-", " ").split()
    if platform not in ("gpu", "cuda") or "NVIDIA" not in words or _OLDER & set(words):
        return "they run on NVIDIA GPUs from Ampere (A100) on"
    return no_triton()


def rows_product(
    x: jax.Array,
    weights: jax.Array,
    tiles: jax.Array,
    transposed: bool = False,
    *,
    interpret: bool = False,
) -> jax.Array:
    """[rows, out] of x [rows, in] and weights [groups, in, out]; or, transposed, [groups, out, in].

    `tiles` [rows / 128] are their groups; tiles of the group after the last are not written.
    """
    from jax.experimental import pallas as pl

    outputs = weights.shape[1 if transposed else 2]
    of_in, of_out = -x.shape[1] % NARROWEST, -outputs % NARROWEST
    x = padded(x, 0, of_in)
    weights = padded(weights, 0, *((of_out, of_in) if transposed else (of_in, of_out)))
    inputs, width = x.shape[1], block(outputs + of_out, _WIDEST)
    groups = weights.shape[0]
    sides = (width, inputs) if transposed else (inputs, width)
    of_weights = pl.BlockSpec((groups, *sides), lambda t, n: (0, n, 0) if transposed else (0, 0, n))
    kernel = functools.partial(_rows_kernel, groups, block(inputs, _DEPTH), transposed)
    run = _call(
        kernel,
        (x.shape[0] // ROWS, (outputs + of_out) // width),
        [
            pl.BlockSpec((ROWS, inputs), lambda t, n: (t, 0)),
            of_weights,
            pl.BlockSpec((None,), lambda t, n: (t,)),
        ],
        pl.BlockSpec((ROWS, width), lambda t, n: (t, n)),
        jax.ShapeDtypeStruct((x.shape[0], outputs + of_out), x.dtype),
        "experts_rows",
        interpret,
    )
    found: jax.Array = untyped(run, x, weights, tiles)
    return found[:, :outputs] if of_out else found


def weights_product(
    x: jax.Array, y: jax.Array, sizes: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """[groups, in, out]: of each group of rows the product of x [rows, in] and y [rows, out].

    `sizes` [groups] are multiples of 128. A group of no rows gets zeros.
    """
    from jax.experimental import pallas as pl

    inputs, outputs = x.shape[1], y.shape[1]
    x, y = (padded(array, 0, -array.shape[1] % NARROWEST) for array in (x, y))
    rows, groups = x.shape[0], sizes.shape[0]
    height, width = (block(array.shape[1], _WIDEST) for array in (x, y))
    shape = groups, x.shape[1], y.shape[1]
    of_group = pl.BlockSpec((None,), lambda g, i, j: (g,))
    run = _call(
        _weights_kernel,
        (groups, shape[1] // height, shape[2] // width),
        [
            pl.BlockSpec((rows, height), lambda g, i, j: (0, i)),
            pl.BlockSpec((rows, width), lambda g, i, j: (0, j)),
            of_group,
            of_group,
        ],
        pl.BlockSpec((None, height, width), lambda g, i, j: (g, i, j)),
        jax.ShapeDtypeStruct(shape, x.dtype),
        "experts_weights",
        interpret,
    )
    found: jax.Array = untyped(run, x, y, jnp.cumsum(sizes) - sizes, sizes)
    return found[:, :inputs, :outputs] if shape[1:] != (inputs, outputs) else found


def _call(
    kernel: Any,
    grid: tuple[int, ...],
    in_specs: list[Any],
    out_spec: Any,
    out_shape: Any,
    name: str,
    interpret: bool,
) -> Any:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    def run(*arrays: jax.Array) -> Any:
        with warnings.catch_warnings():  # that this backend will be removed
            warnings.simplefilter("ignore", DeprecationWarning)
            return pl.pallas_call(
                kernel,
                grid=grid,
                in_specs=in_specs,
                out_specs=out_spec,
                out_shape=out_shape,
                compiler_params=triton.CompilerParams(num_warps=8, num_stages=_STAGES),
                interpret=interpret,
                name=name,
            )(*arrays)

    return run


def _rows_kernel(
    groups: int, depth: int, transposed: bool, x_ref: Any, weights_ref: Any, tile_ref: Any, out: Any
) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    group = tile_ref[()]

    @pl.when(group < groups)
    def _() -> None:
        def add(index: jax.Array, total: jax.Array) -> jax.Array:
            here = pl.ds(index * depth, depth)
            at = (group, slice(None), here) if transposed else (group, here, slice(None))
            weights = weights_ref[at]
            return total + triton.dot(x_ref[:, here], weights.T if transposed else weights)

        zeros = jnp.zeros(out.shape, jnp.float32)
        total = lax.fori_loop(0, x_ref.shape[1] // depth, add, zeros)
        out[...] = total.astype(out.dtype)


def _weights_kernel(x_ref: Any, y_ref: Any, start_ref: Any, size_ref: Any, out: Any) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    start = start_ref[()]

    def add(index: jax.Array, total: jax.Array) -> jax.Array:
        here = pl.ds(start + index * _DEPTH, _DEPTH)
        return total + triton.dot(x_ref[here, :].T, y_ref[here, :])

    zeros = jnp.zeros(out.shape, jnp.float32)
    out[...] = lax.fori_loop(0, lax.div(size_ref[()], _DEPTH), add, zeros).astype(out.dtype)
