"""Grouped matmul: rows in groups, each group multiplied with a matrix of its own.

>>> rows, weights = jnp.ones((5, 2)), jnp.stack([jnp.eye(2), 2 * jnp.eye(2)])
>>> grouped_matmul(rows, weights, jnp.array([3, 2]))[:, 0].tolist()
[1.0, 1.0, 1.0, 2.0, 2.0]
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from meshwright.ops import fp8, hopper_grouped, triton_grouped
from meshwright.ops.collectives import current_platform, untyped
from meshwright.ops.mosaic import HOPPER, unavailable
from meshwright.ops.quantized import Quantized, round_to_8_bits

_TPU_ROWS, _TPU_COLUMNS = 128, 1024  # of a kernel's tiles: rows at least, columns at most


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fp8Groups:
    """Matrices of groups that are multiplied in fp8, and the array that gets their gradient.

    Of `weights` nothing is read: where it is all-gathered, XLA leaves that out and keeps the
    reduce-scatter of the gradient.
    """

    weights: jax.Array  # [groups, in, out]
    values: jax.Array  # the same in e4m3, divided by the scale
    scale: jax.Array  # float32, a power of two


def fp8_groups(weight: fp8.Fp8Weight, gather: Callable[[jax.Array], jax.Array]) -> Fp8Groups:
    """Matrices of groups, all-gathered by `gather`: in 8 bits."""
    values = fp8.once(fp8.quantized(lax.stop_gradient(weight.values), weight.scale, fp8.E4M3))
    return Fp8Groups(gather(weight.values), gather(values), weight.scale)


def group_alignment(dtype: Any) -> tuple[int, str]:
    """At multiples of how many rows groups begin, for the kernel that will multiply them.

    Beside it why that is not the one for Hopper GPUs, if it is not. 1: by XLA, which on GPUs
    multiplies every row with the matrix of every group.
    """
    why = _not_by_hoppers(dtype)
    if why is None or _by_triton(dtype):
        return hopper_grouped.ROWS, why or ""
    if triton_grouped.unavailable() is None:
        why = f"kernels are for 16 bits, not {jnp.dtype(dtype).name}"
    return 1, why


def _not_by_hoppers(dtype: Any) -> str | None:
    """Why the kernel for Hopper GPUs does not multiply, None if it does."""
    why = unavailable(HOPPER)
    if why is None and jnp.dtype(dtype) != jnp.bfloat16:
        why = f"it is for bfloat16, not {jnp.dtype(dtype).name}"
    return why


def _by_triton(dtype: Any) -> bool:
    """Whether Triton's kernels multiply: where they can, and the one for Hopper GPUs does not."""
    is_possible = triton_grouped.unavailable() is None and jnp.dtype(dtype).itemsize == 2
    return is_possible and _not_by_hoppers(dtype) is not None


def _kernels(dtype: Any) -> Any:
    """The module of the two products: of rows, and of the gradient of weights."""
    return triton_grouped if _by_triton(dtype) else hopper_grouped


def grouped_matmul(
    x: jax.Array, weights: jax.Array | Quantized | Fp8Groups, sizes: jax.Array, alignment: int = 1
) -> jax.Array:
    """[rows, out] of x [rows, in] and weights [groups, in, out]; `sizes` [groups] of the groups.

    The rows of a group are together, in the order of the groups, and groups have a multiple of
    `alignment` rows; those that are none are zero. Rows after the last group are of none: what is
    computed of them means nothing. Weights of 8 bits are for serving: they have no gradient.
    """
    sizes = sizes.astype(jnp.int32)
    if isinstance(weights, Quantized):
        return _of_8_bits(x, weights, sizes, alignment)
    if isinstance(weights, Fp8Groups):
        return _in_fp8(x, weights.weights, weights.values, weights.scale, sizes, alignment)
    if alignment > 1:
        return _in_tiles(x, weights, sizes)
    if current_platform() == "tpu" and x.shape[0] % _TPU_ROWS == 0:
        return _on_tpu(x, weights, sizes)
    return lax.ragged_dot(x, weights, sizes)


def grouped_low_rank(
    x: jax.Array, a: jax.Array, b: jax.Array, sizes: jax.Array, alignment: int = 1
) -> jax.Array:
    """`grouped_matmul` of x and a·b, for a [groups, in, rank] and b [groups, rank, out]."""
    return grouped_matmul(grouped_matmul(x, a, sizes, alignment), b, sizes, alignment)


def _of_8_bits(x: jax.Array, weights: Quantized, sizes: jax.Array, alignment: int) -> jax.Array:
    """In fp8, with a scale for each row, on Hopper GPUs; else all are converted to x's dtype."""
    groups = jnp.repeat(_groups_of_tiles(x, sizes, alignment), alignment)
    scale = weights.scale.at[groups].get(mode="clip")
    if alignment > 1 and _by_triton(x.dtype):
        tiles, values = _groups_of_tiles(x, sizes), weights.values.astype(x.dtype)
        y = triton_grouped.rows_product(x, values, tiles, True)
    elif alignment > 1:
        rows, values, dtype = x, weights.values, x.dtype
        if values.dtype == jnp.float8_e4m3fn:
            rows, of_rows = round_to_8_bits(x.astype(jnp.float32), 1, "fp8")
            scale *= of_rows[:, None]
        tiles = _groups_of_tiles(x, sizes)
        y = hopper_grouped.rows_product(rows, values.astype(rows.dtype), tiles, True, dtype)
    else:
        y = grouped_matmul(x, weights.values.astype(x.dtype).swapaxes(1, 2), sizes, alignment)
    return (y.astype(jnp.float32) * scale).astype(x.dtype)


@jax.custom_vjp
def _on_tpu(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """XLA for TPUs has kernels for rows; for gradients of weights it would multiply all rows with
    those of every group (libtpu 0.0.42)."""
    return lax.ragged_dot(x, weights, sizes)


def _on_tpu_forward(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> tuple[jax.Array, Any]:
    return _on_tpu(x, weights, sizes), (x, weights, sizes)


def _on_tpu_backward(saved: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, weights, sizes = saved
    _, of_rows = jax.vjp(lambda x: lax.ragged_dot(x, weights, sizes), x)
    return of_rows(gradient)[0], weights_product_on_tpu(x, gradient, sizes), None


_on_tpu.defvjp(_on_tpu_forward, _on_tpu_backward)


def weights_product_on_tpu(
    x: jax.Array, y: jax.Array, sizes: jax.Array, interpret: bool = False
) -> jax.Array:
    """[groups, in, out]: of each group of rows the product of x [rows, in] and y [rows, out]."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    rows = next(n for n in (4 * _TPU_ROWS, 2 * _TPU_ROWS, _TPU_ROWS) if x.shape[0] % n == 0)
    tiles = rows, min(x.shape[1], _TPU_COLUMNS), min(y.shape[1], _TPU_COLUMNS)

    def run(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
        with jax.numpy_dtype_promotion("standard"):
            found: jax.Array = tgmm(x.T, y, sizes, x.dtype, tiles, interpret=interpret)
        return found

    found: jax.Array = untyped(run, x, y, sizes)
    return found


@jax.custom_vjp
def _in_tiles(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    found: jax.Array = _kernels(x.dtype).rows_product(x, weights, _groups_of_tiles(x, sizes))
    return found


def _in_tiles_forward(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> tuple[jax.Array, Any]:
    return _in_tiles(x, weights, sizes), (x, weights, sizes)


def _in_tiles_backward(saved: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, weights, sizes = saved
    kernels, tiles = _kernels(x.dtype), _groups_of_tiles(x, sizes)
    of_x = kernels.rows_product(gradient, weights, tiles, True)
    return of_x, kernels.weights_product(x, gradient, sizes), None


_in_tiles.defvjp(_in_tiles_forward, _in_tiles_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _in_fp8(
    x: jax.Array,
    weights: jax.Array,
    values: jax.Array,
    scale: jax.Array,
    sizes: jax.Array,
    alignment: int,
) -> jax.Array:
    """In e4m3, gradients in e5m2. Only kernels for Hopper GPUs multiply 8 bits; others convert."""
    return _in_fp8_forward(x, weights, values, scale, sizes, alignment)[0]


def _in_fp8_forward(
    x: jax.Array,
    weights: jax.Array,
    values: jax.Array,
    scale: jax.Array,
    sizes: jax.Array,
    alignment: int,
) -> tuple[jax.Array, Any]:
    rows, of_rows = _rows_in_8_bits(x, sizes, fp8.E4M3)
    saved = rows, of_rows, values, scale, sizes
    if alignment == 1 or _by_triton(x.dtype):
        inputs = _plain(rows, of_rows, x), _plain(values, scale, x)
        return grouped_matmul(*inputs, sizes, alignment), saved
    tiles, scales = _groups_of_tiles(x, sizes), of_rows * scale
    transposed = fp8.once(values).swapaxes(1, 2)
    return hopper_grouped.rows_product(rows, transposed, tiles, True, x.dtype, scales), saved


def _in_fp8_backward(
    alignment: int, saved: Any, gradient: jax.Array
) -> tuple[jax.Array, jax.Array, None, None, None]:
    rows, of_rows, values, scale, sizes = saved
    arrived, of_arrived = _rows_in_8_bits(gradient, sizes, fp8.E5M2)
    if alignment == 1 or _by_triton(gradient.dtype):
        inputs = _plain(rows, of_rows, gradient), _plain(values, scale, gradient)
        _, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, alignment), *inputs)
        return *pull(_plain(arrived, of_arrived, gradient)), None, None, None
    dtype, tiles = gradient.dtype, _groups_of_tiles(rows, sizes)
    of_x = hopper_grouped.rows_product(arrived, values, tiles, True, dtype, of_arrived * scale)
    of_weights = hopper_grouped.weights_product(
        rows.T, arrived.T, sizes, dtype, of_rows * of_arrived
    )
    return of_x, of_weights, None, None, None


_in_fp8.defvjp(_in_fp8_forward, _in_fp8_backward)


def _rows_in_8_bits(x: jax.Array, sizes: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Rows of groups, divided by a power of two, and that. Rows of none may hold anything."""
    x = fp8.once(x)  # XLA would index tokens anew for each of what follows, and transposed
    is_row = lax.broadcasted_iota(jnp.int32, (x.shape[0], 1), 0) < jnp.sum(sizes)
    largest = jnp.max(jnp.abs(jnp.where(is_row, x, jnp.zeros_like(x))))
    scale = checkpoint_name(fp8.power_of_two(largest, dtype), fp8.SCALE)
    return fp8.once(fp8.quantized(x, scale, dtype)), scale


def _plain(values: jax.Array, scale: jax.Array, like: jax.Array) -> jax.Array:
    return values.astype(like.dtype) * scale.astype(like.dtype)


def _groups_of_tiles(x: jax.Array, sizes: jax.Array, tile: int = hopper_grouped.ROWS) -> jax.Array:
    """The group of each tile of rows; after the last, their number."""
    ends = jnp.cumsum(sizes)[None] // tile
    tiles = jnp.arange(x.shape[0] // tile)[:, None]
    return jnp.sum(tiles >= ends, axis=1, dtype=jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def repeat_rows(x: jax.Array, order: jax.Array, inverse: jax.Array, times: int) -> jax.Array:
    """Each row of x [n, d] so many times, then in this order [n · times]; `inverse` undoes it.

    A number from n · times on is of no row: of zeros. Its gradient is read and summed, where
    that of indexing would be scattered.
    """
    return x.at[order // times].get(mode="fill", fill_value=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def sum_rows(y: jax.Array, order: jax.Array, inverse: jax.Array, times: int) -> jax.Array:
    """The transpose of `repeat_rows`: the sums [n, d] of the copies of each row."""
    return jnp.sum(y[inverse].reshape(-1, times, y.shape[-1]), axis=1)


def _repeat(
    x: jax.Array, order: jax.Array, inverse: jax.Array, times: int
) -> tuple[jax.Array, Any]:
    return repeat_rows(x, order, inverse, times), (order, inverse)


def _repeat_gradient(times: int, saved: Any, gradient: jax.Array) -> tuple[jax.Array, None, None]:
    return sum_rows(gradient, *saved, times), None, None


def _sum(y: jax.Array, order: jax.Array, inverse: jax.Array, times: int) -> tuple[jax.Array, Any]:
    return sum_rows(y, order, inverse, times), (order, inverse)


def _sum_gradient(times: int, saved: Any, gradient: jax.Array) -> tuple[jax.Array, None, None]:
    return repeat_rows(gradient, *saved, times), None, None


repeat_rows.defvjp(_repeat, _repeat_gradient)
sum_rows.defvjp(_sum, _sum_gradient)
