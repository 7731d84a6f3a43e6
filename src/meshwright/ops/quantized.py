"""Weights of 8 bits with a scale per output channel, or of 4 bits with one per block of inputs.

A decode step is limited by the bytes of its weights, so it reads half of them. Where a GPU has fp8
units, fp8 weights meet activations of fp8, which get a scale per token: that is up to twice as fast
as bfloat16 for many tokens. Of few tokens, and elsewhere, the values are converted inside the
matmul. The scale of the weight multiplies the result. The dims that a matmul sums over are the last
ones of both operands: in another order a Hopper GPU reaches two thirds of the speed.

`nf4` is the 4-bit NormalFloat of QLoRA, for weights that a training step leaves as they are: 64
inputs share a float32 scale, their largest absolute value, and each is the nearest of 16 levels, so
a weight takes 4.5 bits. Bytes and scales are those of bitsandbytes.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.layouts import ArraySpec, Constant
from meshwright.machines import chip_of_kind
from meshwright.ops.collectives import current_device, spec_of, split_axes

# name → dtype, and the largest value that is used of it
QUANTIZED_DTYPES: dict[str, tuple[Any, float]] = {
    "int8": (jnp.int8, 127.0),
    "fp8": (jnp.float8_e4m3fn, 448.0),
}


# fewest tokens that are rounded to fp8. On an H200 the matmuls of a layer of 8B take 97 us with two
# tokens that are, 77 with two that are not, and as long either way with 16 (bfloat16: 121, 124);
# benchmarks/serve_parts.py
_FEWEST_ROUNDED = 16

NF4 = "nf4"
NF4_BLOCK = 64  # inputs that share a scale
NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip

_NF4_PAIRS = np.array([*itertools.product(NF4_LEVELS, repeat=2)], np.float32)  # by byte


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """values · scale.

    | | values | scale, in float32 |
    |---|---|---|
    | int8, fp8 | [outputs ..., inputs ...] | [outputs ...] |
    | the same, of experts | [experts, outputs, inputs] | [experts, outputs] |
    | nf4 | uint8 [outputs ..., inputs / 2]: two levels each | [outputs ..., inputs / 64] |

    A matmul sums over the inputs; those of nf4 are one dim.
    """

    values: Any  # an array, or its ArraySpec
    scale: Any

    @property
    def ndim(self) -> int:
        return int(self.values.ndim)

    @property
    def is_nf4(self) -> bool:
        return bool(self.values.dtype == jnp.uint8)


def quantize(weight: jax.Array, inputs: int, name: str, groups: int = 0) -> Quantized:
    """A weight [inputs ..., outputs ...] in 8 or 4 bits.

    A matmul sums over the first `inputs` dims. `name` is one of QUANTIZED_DTYPES, or nf4. Of 8 bits
    there may be so many dims of `groups` before them, such as experts.
    """
    if name == NF4:
        return _quantize_nf4(weight, inputs)
    if name not in QUANTIZED_DTYPES:
        raise MeshwrightError(
            f"{name!r} is not a dtype of quantized weights{did_you_mean(name, QUANTIZED_DTYPES)}"
        )
    first = groups + inputs
    order = (*range(groups), *range(first, weight.ndim), *range(groups, first))
    numbers = jnp.transpose(weight, order).astype(jnp.float32)
    return Quantized(*round_to_8_bits(numbers, inputs, name))


def _quantize_nf4(weight: jax.Array, inputs: int) -> Quantized:
    outputs = weight.shape[inputs:]
    order = (*range(inputs, weight.ndim), *range(inputs))
    numbers = jnp.transpose(weight, order).astype(jnp.float32)
    blocks = numbers.reshape(*outputs, -1, NF4_BLOCK)
    scale = jnp.max(jnp.abs(blocks), axis=-1)
    scaled_blocks = blocks * (1 / jnp.where(scale == 0, 1.0, scale))[..., None]
    between = [(low + high) / 2 for low, high in itertools.pairwise(NF4_LEVELS)]
    codes = sum((scaled_blocks > middle).astype(jnp.uint8) for middle in between)
    pairs = jnp.asarray(codes).reshape(*outputs, -1, 2)
    return Quantized(pairs[..., 0] << 4 | pairs[..., 1], scale)


def quantized_spec(spec: ArraySpec, name: str) -> Quantized:
    """The ArraySpecs of a stack of weights [layers, inputs ..., outputs ...] that is quantized.

    A scale per output channel is small, and not split. Random ones have the spread of the weights.
    """
    first = 1 + spec.inputs
    layers, inputs, outputs = spec.shape[:1], spec.shape[1:first], spec.shape[first:]
    dims = tuple(spec.dims)

    def part(
        shape: tuple[int, ...], dims: Sequence[str | None], dtype: Any, init: Any = _random_bytes
    ) -> ArraySpec:
        # without inputs: it is not cast for matmuls
        return ArraySpec((*layers, *shape), ("layers", *dims), dtype, init, trained=False)

    spread = np.arange(-128, 128) if name != NF4 else np.array(NF4_LEVELS)
    scale = Constant(spec.init.std / float(spread.std()))

    if name != NF4:
        values = part(
            (*outputs, *inputs), (*dims[first:], *dims[1:first]), QUANTIZED_DTYPES[name][0]
        )
        return Quantized(values, part(outputs, (None,) * len(outputs), jnp.float32, scale))
    width = math.prod(inputs)
    split = (*dims[first:], dims[1])
    return Quantized(
        part((*outputs, width // 2), split, jnp.uint8),
        part((*outputs, width // NF4_BLOCK), split, jnp.float32, scale),
    )


def _random_bytes(key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
    return jax.lax.bitcast_convert_type(jax.random.bits(key, tuple(shape), jnp.uint8), dtype)


def dequantize_nf4(weight: Quantized, inputs: Sequence[int], dtype: Any) -> jax.Array:
    """The weight [outputs ..., inputs ...], rounded to a dtype."""
    spec = spec_of(weight.values)
    parts = (jax.sharding.reshard(part, spec) for part in (weight.values, weight.scale))

    def unpack(values: jax.Array, scale: jax.Array) -> jax.Array:
        # [outputs ..., inputs / 2, 2]
        levels = jnp.asarray(_NF4_PAIRS).at[values].get(mode="promise_in_bounds")
        numbers = levels.reshape(*scale.shape, NF4_BLOCK) * scale[..., None]
        return numbers.astype(dtype).reshape(*values.shape[:-1], -1, *inputs[1:])

    target = P(*spec, *(None,) * (len(inputs) - 1))
    found: jax.Array = jax.shard_map(unpack, in_specs=(spec, spec), out_specs=target)(*parts)
    return found


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
    if weight.is_nf4:
        sizes = x.shape[x.ndim - len(inputs) :]
        return jnp.einsum(dims, x, dequantize_nf4(weight, sizes, x.dtype), **options)
    first = x.ndim - len(inputs)
    is_fp8 = (
        weight.values.dtype == jnp.float8_e4m3fn and math.prod(x.shape[:first]) >= _FEWEST_ROUNDED
    )
    if is_fp8 and _has_fp8() and not split_axes(spec_of(x)[first:]):
        return rounded_einsum(dims, len(inputs), x, weight.values, **options)
    return jnp.einsum(dims, x, weight.values.astype(x.dtype), **options)


def rounded_einsum(
    dims: str, inputs: int, x: jax.Array, values: jax.Array, **options: Any
) -> jax.Array:
    """The product with x in fp8, whose last `inputs` dims are summed over."""
    rounded, scale = round_to_8_bits(x.astype(jnp.float32), inputs, "fp8")
    wanted = options.setdefault("preferred_element_type", x.dtype)
    y = jnp.einsum(dims, rounded, values, **options)
    scale = scale.reshape(*scale.shape, *(1,) * (y.ndim - scale.ndim))
    return (y.astype(jnp.float32) * scale).astype(wanted)


def round_to_8_bits(numbers: jax.Array, inputs: int, name: str) -> tuple[jax.Array, jax.Array]:
    """Values in 8 bits and their scales, of which the last `inputs` dims share one."""
    dtype, most = QUANTIZED_DTYPES[name]
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
    if not isinstance(weight, Quantized) or weight.is_nf4:
        return y
    spec = jax.typeof(y).sharding.spec.partitions[y.ndim - weight.scale.ndim :]
    scale = jax.sharding.reshard(weight.scale, P(*spec))
    return (y.astype(jnp.float32) * scale[(None,) * (y.ndim - scale.ndim)]).astype(y.dtype)
