"""Matmuls in 8-bit floats: e4m3 forward, e5m2 for gradients, one scale per tensor.

    y = fp8_einsum("ble,em->blm", x, Fp8Weight(w, scale_of(w)), over=("fsdp",), out_sharding=spec)

Weights stay in their own dtype: each device quantizes its shard, and the all-gather sends 8 bits. A
scale is the power of two with which the largest number of the tensor, on all devices, just fits: so
scaling rounds nothing, and every mesh quantizes to the same numbers. Results are in the dtype of
`x`. Both operands of each matmul have the contracted dim last, as the GPU's fp8 units take them.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from meshwright.errors import MeshwrightError
from meshwright.layouts import axes_of
from meshwright.ops.collectives import (
    current_platform,
    drop_trivial_axes,
    nontrivial_axes,
    spec_of,
    split_axes,
)

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
_LEAST = 2.0**-100  # of a scale, so that dividing by it stays finite
SCALE = "fp8_scale"  # checkpoint_name: a number that takes a pass over a tensor to compute
# of the GPU compiler, which otherwise computes some of what was quantized in bfloat16: in Triton's
# matmuls, and in those that it merges
COMPILER_OPTIONS: Mapping[str, Any] = {
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_dot_merger_threshold_mb": 0,
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fp8Weight:
    """A weight that is multiplied in fp8, as it is stored, and its scale."""

    values: jax.Array  # [*contracted dims, *output dims]; in a stack, with layers first
    scale: jax.Array  # float32, a power of two; of a stack [layers]

    @property
    def ndim(self) -> int:
        return self.values.ndim


def scale_of(x: jax.Array, dims: Sequence[int] | None = None) -> jax.Array:
    """The power of two by which to divide `x`, over these dims (default: all), to use E4M3."""
    largest = jnp.max(jnp.abs(lax.stop_gradient(x)), axis=None if dims is None else tuple(dims))
    return power_of_two(largest, E4M3)


def weight_in_fp8(stacked: jax.Array) -> Fp8Weight:
    """Weights of all layers [layers, ..], each with a scale of its own."""
    return Fp8Weight(stacked, scale_of(stacked, range(1, stacked.ndim)))


def plain_weights(weights: Any) -> Any:
    """A tree of weights without scales, for layers that stay in their own dtype."""

    def plain(weight: Any) -> Any:
        return weight.values if isinstance(weight, Fp8Weight) else weight

    return jax.tree.map(plain, weights, is_leaf=lambda leaf: isinstance(leaf, Fp8Weight))


def fp8_einsum(
    dims: str, x: jax.Array, weight: Fp8Weight, over: Sequence[str], out_sharding: P
) -> jax.Array:
    """jnp.einsum of x [tokens.., contracted..] and a weight [contracted.., outputs..].

    The weight is all-gathered over the axes `over`, in 8 bits; its gradient is reduce-scattered in
    the weight's dtype.
    """
    left, right = dims.partition("->")[0].split(",")
    contracted = [letter for letter in right if letter in left]
    count = len(contracted)
    nontrivial = nontrivial_axes()
    over = tuple(axis for axis in over if axis in nontrivial)
    stored = drop_trivial_axes(spec_of(weight.values), nontrivial)
    values = jax.sharding.reshard(weight.values, stored)
    x_spec = jax.typeof(x).sharding.spec
    held = [axes_of(entry, stored) for entry in stored]
    split = tuple(axis for axes in held[:count] for axis in axes if axis not in over)
    if split != split_axes(spec_of(x)[x.ndim - count :]):
        raise MeshwrightError(
            f"matmul fp8: a weight split as {stored} does not meet an activation split as {x_spec} "
            f"in the dims that '{dims}' sums over; use --compute.matmul auto with these rules"
        )
    everywhere = tuple(sorted({*split_axes(spec_of(x)), *split_axes(stored), *over}))
    all_gathers = tuple(
        (dim, tuple(axis for axis in axes if axis in over)) for dim, axes in enumerate(held)
    )

    def local(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
        matmul = _matmul(tuple(one for one in all_gathers if one[1]), everywhere, count)
        flat = _varying(x, everywhere).reshape(-1, math.prod(x.shape[x.ndim - count :]))
        y = matmul(flat, _varying(w, everywhere), scale)
        outputs = [size * _ways(axes) for size, (_, axes) in zip(w.shape, all_gathers, strict=True)]
        y = y.reshape(*x.shape[: x.ndim - count], *outputs[count:])
        partial = tuple(sorted(out_sharding.unreduced))
        return lax.pcast(y, partial, to="unreduced") if partial else y

    specs = (x_spec, stored, P())
    return jax.shard_map(local, in_specs=specs, out_specs=out_sharding)(x, values, weight.scale)


def _ways(axes: Sequence[str]) -> int:
    """Shards that an all-gather over these axes joins."""
    return math.prod(lax.axis_size(axis) for axis in axes)


def _varying(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Inside shard_map: `x`, varying over all of these axes."""
    kind = jax.typeof(x).manual_axis_type
    for rest in (
        tuple(axis for axis in axes if axis in kind.reduced),
        tuple(axis for axis in axes if axis not in kind.reduced and axis not in kind.varying),
    ):
        x = lax.pcast(x, rest, to="varying") if rest else x
    return x


@functools.lru_cache(maxsize=256)
def _matmul(
    all_gathers: tuple[tuple[int, tuple[str, ...]], ...],
    everywhere: tuple[str, ...],
    contracted: int,
) -> Any:
    """The product of x [tokens, k] and a weight's shard on one device, with its backward pass.

    `all_gathers`: dims of the weight, and the axes over which each is all-gathered. `everywhere`:
    axes over which maxima are taken. `contracted`: how many dims of the weight come first.
    """

    def all_gathered(w: jax.Array, scale: jax.Array) -> jax.Array:
        """[k, n] in 8 bits, of all shards."""
        in_8_bits = once(quantized(w, scale, E4M3))
        for dim, axes in all_gathers:
            each = [(axis,) for axis in reversed(axes)] if current_platform() == "tpu" else [axes]
            for some in each:  # as ops.collectives does
                in_8_bits = lax.all_gather(in_8_bits, some, axis=dim, tiled=True)
        return in_8_bits.reshape(math.prod(in_8_bits.shape[:contracted]), -1)

    def scale_everywhere(x: jax.Array, dtype: Any) -> jax.Array:
        largest = jnp.max(jnp.abs(x))
        over = tuple(a for a in everywhere if a in jax.typeof(largest).manual_axis_type.varying)
        largest = lax.pmax(largest, over) if over else largest
        return checkpoint_name(power_of_two(largest, dtype), SCALE)

    @jax.custom_vjp
    def run(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
        return forward(x, w, scale)[0]

    def forward(x: jax.Array, w: jax.Array, scale: jax.Array) -> Any:
        x_scale = scale_everywhere(x, E4M3)
        in_8_bits = once(quantized(x, x_scale, E4M3))
        y = _dot(in_8_bits, all_gathered(w, scale).T, x_scale, scale, x.dtype)
        return y, (in_8_bits, x_scale, w, scale)

    def backward(kept: Any, g: jax.Array) -> Any:
        in_8_bits, x_scale, w, scale = kept
        g_scale = scale_everywhere(g, E5M2)
        weight = all_gathered(w, scale)
        gradients = once(quantized(g, g_scale, E5M2))
        dx = _dot(gradients, weight, g_scale, scale, g.dtype)
        dw = _dot(in_8_bits.T, gradients.T, x_scale, g_scale, w.dtype)
        joined = dict(all_gathers)
        dw = dw.reshape([size * _ways(joined.get(i, ())) for i, size in enumerate(w.shape)])
        for dim, axes in reversed(all_gathers):
            dw = lax.psum_scatter(dw, axes, scatter_dimension=dim, tiled=True)
        return dx, dw, None

    run.defvjp(forward, backward)
    return run


def power_of_two(largest: jax.Array, dtype: Any) -> jax.Array:
    """The least power of two that brings `largest` into the range of `dtype`."""
    most = float(jnp.finfo(dtype).max)
    wanted = jnp.maximum(largest.astype(jnp.float32) * (1 / most), _LEAST)
    bits = lax.bitcast_convert_type(wanted, jnp.uint32)
    up = (bits + jnp.uint32(0x7FFFFF)) & jnp.uint32(0xFF800000)  # exponent alone, rounded up
    return lax.bitcast_convert_type(up, jnp.float32)


def quantized(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """`x / scale`; exact but for the cast, as scale is a power of two."""
    return (x * (1 / scale).astype(x.dtype)).astype(dtype)


def once(x: jax.Array) -> jax.Array:
    """A barrier on GPUs: XLA would fuse the cast into the transpose that follows.

    Transposing 8 bits is twice as fast as casting and transposing bfloat16 in one kernel.
    """
    on_gpu = current_platform() in ("gpu", "cuda")
    return lax.optimization_barrier(x) if on_gpu else x


def _dot(
    a: jax.Array, b: jax.Array, a_scale: jax.Array, b_scale: jax.Array, dtype: Any
) -> jax.Array:
    """[m, k] × [n, k] → [m, n]."""
    contract = (((1,), (1,)), ((), ()))
    if current_platform() == "tpu":  # whose compiler multiplies in the dtype of the operands
        y = lax.dot_general(a, b, contract, preferred_element_type=jnp.float32)
        return (y * (a_scale * b_scale)).astype(dtype)
    # the GPU compiler makes one fp8 matmul of this, scales included
    left = a.astype(dtype) * a_scale.astype(dtype)
    right = b.astype(dtype) * b_scale.astype(dtype)
    return lax.dot_general(left, right, contract, preferred_element_type=dtype)
