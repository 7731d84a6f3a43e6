"""The product with a matrix of low rank, as two small matmuls on each device."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from meshwright.ops.collectives import reduce_part, spec_of, tie_gradients, varying_like


def low_rank_product(
    dims: str,
    x: jax.Array,
    a: jax.Array,
    b: jax.Array,
    over: Sequence[str],
    target: P,
    mask: jax.Array | None = None,
) -> jax.Array:
    """The einsum `dims` of x and a·b, sharded as `target`.

    The factors are a [inputs ..., r] and b [r, outputs ...]. Devices along the axes `over` have
    partial sums, which are reduced between the two matmuls, where they are small. `mask` [tokens
    ..., r] says which of the columns of a count for a token; all by default.
    """
    operands, out = dims.split("->")
    of_x, of_weight = operands.split(",")
    tokens = of_x[: -(a.ndim - 1)]
    inputs, outputs = of_weight[: a.ndim - 1], of_weight[a.ndim - 1 :]
    small_target = P(*target.partitions[: len(tokens)], None)

    def local(x: jax.Array, a: jax.Array, b: jax.Array, *masks: jax.Array) -> jax.Array:
        x, a = varying_like(x, a, b), varying_like(a, x, b)
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
    if mask is not None:
        arrays.append(reshard(mask, P(*spec_of(x)[: len(tokens)], None)))
    sources = tuple(jax.typeof(array).sharding.spec for array in arrays)
    return jax.shard_map(local, in_specs=sources, out_specs=target)(*arrays)
