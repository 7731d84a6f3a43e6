"""Weights of 8 bits with a scale per output channel.

A decode step is limited by the bytes of its weights, so it reads half of them. Where a GPU has fp8
units, fp8 weights meet activations of fp8, which get a scale per token: that is up to twice as fast
as bfloat16 for many tokens. Elsewhere the values are converted inside the matmul. The scale of the
weight multiplies the result. The dims that a matmul sums over are the last ones of both operands:
in another order a Hopper GPU reaches two thirds of the speed.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.machines import chip_of_kind
from meshwright.ops.collectives import current_device, spec_of, split_axes

# name → dtype, and the largest value that is used of it
QUANTIZED_DTYPES: dict[str, tuple[Any, float]] = {
    "int8": (jnp.int8, 127.0),
    "fp8": (jnp.float8_e4m3fn, 448.0),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """values · scale."""

    values: jax.Array  # [outputs ..., inputs ...]: a matmul sums over the inputs
    scale: jax.Array  # float32 [outputs ...]

    @property
    def ndim(self) -> int:
        return self.values.ndim


def quantize(weight: jax.Array, inputs: int, name: str) -> Quantized:
    """A weight [inputs ..., outputs ...] in 8 bits; a matmul sums over the first `inputs` dims."""
    if name not in QUANTIZED_DTYPES:
        raise MeshwrightError(
            f"{name!r} is not a dtype of quantized weights{did_you_mean(name, QUANTIZED_DTYPES)}"
        )
    dtype, most = QUANTIZED_DTYPES[name]
    order = (*range(inputs, weight.ndim), *range(inputs))
    numbers = jnp.transpose(weight, order).astype(jnp.float32)
    values, scale = _rounded(numbers, inputs, dtype, most)
    return Quantized(values, scale)


def einsum(dims: str, x: jax.Array, weight: jax.Array | Quantized, **options: Any) -> jax.Array:
    """jnp.einsum; of a quantized weight without its scale, which `scaled` multiplies after sums.

    The dims are those of a weight that is not quantized.
    """
    if not isinstance(weight, Quantized):
        return jnp.einsum(dims, x, weight, **options)
    operands, out = dims.split("->")
    of_x, of_weight = operands.split(",")
    inputs = "".join(dim for dim in of_weight if dim not in out)
    stored = "".join(dim for dim in of_weight if dim in out) + inputs
    dims = f"{of_x},{stored}->{out}"
    over = spec_of(x)[x.ndim - len(inputs) :]
    if weight.values.dtype == jnp.float8_e4m3fn and _has_fp8() and not split_axes(over):
        return _fp8_einsum(dims, len(inputs), x, weight.values, **options)
    return jnp.einsum(dims, x, weight.values.astype(x.dtype), **options)


def _fp8_einsum(
    dims: str, inputs: int, x: jax.Array, values: jax.Array, **options: Any
) -> jax.Array:
    """The product with x in fp8, whose last `inputs` dims are summed over."""
    dtype, most = QUANTIZED_DTYPES["fp8"]
    rounded, scale = _rounded(x.astype(jnp.float32), inputs, dtype, most)
    wanted = options.setdefault("preferred_element_type", x.dtype)
    y = jnp.einsum(dims, rounded, values, **options)
    scale = scale.reshape(*scale.shape, *(1,) * (y.ndim - scale.ndim))
    return (y.astype(jnp.float32) * scale).astype(wanted)


def _rounded(
    numbers: jax.Array, inputs: int, dtype: Any, most: float
) -> tuple[jax.Array, jax.Array]:
    """Values in 8 bits and their scales, of which the last `inputs` dims share one."""
    largest = jnp.max(jnp.abs(numbers), axis=tuple(range(-inputs, 0)))
    scale = jnp.where(largest == 0, 1.0, largest / most)
    scaled = numbers / scale.reshape(*scale.shape, *(1,) * inputs)
    return (jnp.round(scaled) if dtype == jnp.int8 else scaled).astype(dtype), scale


def _has_fp8() -> bool:
    """Whether the current device is a GPU that multiplies in fp8, by the catalogue of machines."""
    platform, kind = current_device()
    if platform not in ("gpu", "cuda"):
        return False
    try:
        return chip_of_kind(kind, platform).fp8_flops is not None
    except MeshwrightError:  # a chip that the catalogue does not have
        return False


def scaled(y: jax.Array, weight: jax.Array | Quantized) -> jax.Array:
    """The result of `einsum` with the scale of its weight, which y's last dims match."""
    if not isinstance(weight, Quantized):
        return y
    spec = jax.typeof(y).sharding.spec.partitions[y.ndim - weight.scale.ndim :]
    scale = jax.sharding.reshard(weight.scale, jax.sharding.PartitionSpec(*spec))
    return (y.astype(jnp.float32) * scale[(None,) * (y.ndim - scale.ndim)]).astype(y.dtype)
