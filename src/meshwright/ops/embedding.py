"""Embedding lookup, with a table that may be sharded over the vocabulary."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from meshwright.layouts import axes_of
from meshwright.ops.collectives import (
    current_platform,
    partial_sums,
    reduce_to,
    spec_of,
    split_axes,
)


def embed(table: jax.Array, tokens: jax.Array, target: P) -> jax.Array:
    """Table [vocab, embed] at tokens [batch, length]: [batch, length, embed] sharded as `target`.

    Each device looks up the tokens in its part of the vocabulary, with zeros for the others; a
    reduction over the axes that shard the vocabulary adds them.
    """
    over = axes_of(spec_of(table)[0], "table")
    tokens_spec = spec_of(tokens)
    # where `target` shards tokens further, the reduction is a reduce-scatter
    out = partial_sums(P(*tokens_spec, spec_of(table)[1]), over)

    def local_lookup(table: jax.Array, tokens: jax.Array) -> jax.Array:
        lookup = _lookup(table.shape, table.dtype, split_axes(tokens_spec.partitions), over)
        if not over:
            return lookup(table, tokens)
        size = table.shape[0]
        tokens = tokens - lax.axis_index(over) * size
        local = (tokens >= 0) & (tokens < size)
        vectors = lookup(table, jnp.where(local, tokens, 0))
        vectors = jnp.where(local[..., None], vectors, jnp.zeros((), table.dtype))
        return lax.pcast(vectors, over, to="unreduced")

    table_spec = jax.typeof(table).sharding.spec
    looked_up = jax.shard_map(local_lookup, in_specs=(table_spec, tokens_spec), out_specs=out)(
        table, tokens
    )
    return reduce_to(looked_up, over, target) if over else jax.sharding.reshard(looked_up, target)


def _lookup(
    shape: tuple[int, ...], dtype: Any, tokens_over: tuple[str, ...], vocab_over: tuple[str, ...]
) -> Any:
    """table[tokens], whose gradient is summed in float32.

    In bfloat16, the many small contributions to the gradient of a frequent token would be lost.
    """

    @jax.custom_vjp
    def lookup(table: jax.Array, tokens: jax.Array) -> jax.Array:
        return table[tokens]

    def forward(table: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        return table[tokens], tokens

    def backward(tokens: jax.Array, gradient: jax.Array) -> tuple[jax.Array, None]:
        zero = jnp.float32(0)
        if tokens_over or vocab_over:
            zero = lax.pcast(zero, (*tokens_over, *vocab_over), to="varying")
        if current_platform() != "tpu":
            # without the barrier, zeros may be allocated before the backward pass of the layers
            zero, gradient = lax.optimization_barrier((zero, gradient))
        sums = jnp.full(shape, zero).at[tokens].add(gradient.astype(jnp.float32)).astype(dtype)
        return (lax.pcast(sums, tokens_over, to="unreduced") if tokens_over else sums), None

    lookup.defvjp(forward, backward)
    return lookup
