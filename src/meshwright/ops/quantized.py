"""Weights of 8 bits with a scale per output channel, multiplied in the dtype of activations.

A decode step is limited by the bytes of its weights, so it reads half of them. The values are
converted inside the matmul; the scale multiplies its result.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.errors import MeshwrightError, did_you_mean

# name → dtype, and the largest value that is used of it
QUANTIZED_DTYPES: dict[str, tuple[Any, float]] = {
    "int8": (jnp.int8, 127.0),
    "fp8": (jnp.float8_e4m3fn, 448.0),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """values · scale; the scale has the output dims of the values, which come last."""

    values: jax.Array
    scale: jax.Array  # float32

    @property
    def ndim(self) -> int:
        return self.values.ndim


def quantize(weight: jax.Array, inputs: int, name: str) -> Quantized:
    """A weight whose first `inputs` dims a matmul sums over, in 8 bits."""
    if name not in QUANTIZED_DTYPES:
        raise MeshwrightError(
            f"{name!r} is not a dtype of quantized weights{did_you_mean(name, QUANTIZED_DTYPES)}"
        )
    dtype, most = QUANTIZED_DTYPES[name]
    numbers = weight.astype(jnp.float32)
    largest = jnp.max(jnp.abs(numbers), axis=tuple(range(inputs)))
    scale = jnp.where(largest == 0, 1.0, largest / most)
    scaled = numbers / scale[(None,) * inputs]
    rounded = jnp.round(scaled) if name == "int8" else scaled
    return Quantized(rounded.astype(dtype), scale)


def einsum(dims: str, x: jax.Array, weight: jax.Array | Quantized, **options: Any) -> jax.Array:
    """jnp.einsum; of a quantized weight without its scale, which `scaled` multiplies after sums."""
    if isinstance(weight, Quantized):
        weight = weight.values.astype(x.dtype)
    return jnp.einsum(dims, x, weight, **options)


def scaled(y: jax.Array, weight: jax.Array | Quantized) -> jax.Array:
    """The result of `einsum` with the scale of its weight, which y's last dims match."""
    if not isinstance(weight, Quantized):
        return y
    spec = jax.typeof(y).sharding.spec.partitions[y.ndim - weight.scale.ndim :]
    scale = jax.sharding.reshard(weight.scale, jax.sharding.PartitionSpec(*spec))
    return (y.astype(jnp.float32) * scale[(None,) * (y.ndim - scale.ndim)]).astype(y.dtype)
