"""The product with a matrix of low rank, as two small matmuls on each device; its dropout.

What dropout drops is a hash of numbers: the seed, the step, the sequence in the step's batch, the
position in it, the matrix and the input feature. So it is the same on every mesh, in a layer that
is recomputed, and in a run that is resumed.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from meshwright.ops.collectives import reduce_part, spec_of, tie_gradients, varying_like

_GOLDEN = 0x9E3779B9  # 2^32 / the golden ratio


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dropout:
    """Which inputs of a product are dropped, by chance: those of each token of `noise`."""

    noise: jax.Array  # uint32 [batch, length], maybe with dims before
    rate: float = dataclasses.field(metadata={"static": True})

    def kept(self, features: jax.Array) -> jax.Array:
        """Which inputs are kept [batch, length, inputs ...], of features of these numbers."""
        noise = self.noise.reshape(*self.noise.shape, *(1,) * features.ndim)
        return hashed(noise, features[None, None]) >= np.uint32(round(self.rate * 2**32))


def hashed(noise: jax.Array | int, *numbers: jax.Array | int) -> jax.Array:
    """Noise (uint32) that depends on other noise and on numbers, in their order."""

    def add(noise: jax.Array, number: jax.Array | int) -> jax.Array:
        x = noise + (jnp.asarray(number, jnp.uint32) + np.uint32(1)) * np.uint32(_GOLDEN)
        x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)  # MurmurHash3's last step
        x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
        return x ^ (x >> 16)

    return functools.reduce(add, numbers, jnp.asarray(noise, jnp.uint32))


def low_rank_product(
    dims: str,
    x: jax.Array,
    a: jax.Array,
    b: jax.Array,
    over: Sequence[str],
    target: P,
    mask: jax.Array | None = None,
    dropout: Dropout | None = None,
) -> jax.Array:
    """The einsum `dims` of x and a·b, sharded as `target`.

    The factors are a [inputs ..., r] and b [r, outputs ...]. Devices along the axes `over` have
    partial sums, which are reduced between the two matmuls, where they are small. `mask` [tokens
    ..., r] says which of the columns of a count for a token; all by default. With `dropout` some of
    x count as 0, and the rest as they are.
    """
    operands, out = dims.split("->")
    of_x, of_weight = operands.split(",")
    tokens = of_x[: -(a.ndim - 1)]
    inputs, outputs = of_weight[: a.ndim - 1], of_weight[a.ndim - 1 :]
    small_target = P(*target.partitions[: len(tokens)], None)

    def local(x: jax.Array, a: jax.Array, b: jax.Array, *others: jax.Array) -> jax.Array:
        x, a = varying_like(x, a, b), varying_like(a, x, b)
        masks = list(others)
        if dropout is not None:
            noise, features = (varying_like(masks.pop(0), x) for _ in range(2))
            kept = dataclasses.replace(dropout, noise=noise).kept(features)
            x = jnp.where(kept, x, jnp.zeros_like(x))
        small = jnp.einsum(f"{of_x},{inputs}r->{tokens}r", x, a)
        for mask in masks:
            small = jnp.where(varying_like(mask, small), small, jnp.zeros_like(small))
        small = reduce_part(small, over, small_target)
        small, b = varying_like(small, b), varying_like(b, small)
        return jnp.einsum(f"{tokens}r,r{outputs}->{out}", small, b)

    # a scheduler may delay the gradients of the factors, and hold the large arrays they are made of
    x, a = tie_gradients(x, a)
    x, b = tie_gradients(x, b)
    arrays = [x, a, b]
    of_tokens, of_inputs = spec_of(x)[: len(tokens)], spec_of(x)[len(tokens) :]
    if dropout is not None:
        sizes = x.shape[len(tokens) :]
        features = jnp.arange(math.prod(sizes), dtype=jnp.uint32).reshape(sizes)
        arrays += [reshard(dropout.noise, P(*of_tokens)), reshard(features, P(*of_inputs))]
    if mask is not None:
        arrays.append(reshard(mask, P(*of_tokens, None)))
    sources = tuple(jax.typeof(array).sharding.spec for array in arrays)
    return jax.shard_map(local, in_specs=sources, out_specs=target)(*arrays)
