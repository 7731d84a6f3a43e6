"""Rows of the embedding table for tokens, with the table split over the vocabulary."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from meshwright.layout.layout import axes_of
from meshwright.ops.exchange import add_up, partial_sums, spec_of


def embed(table: jax.Array, tokens: jax.Array, target: P) -> jax.Array:
    """Table [vocab, embed] at tokens [batch, length]: [batch, length, embed] laid out as `target`.

    Each device looks up the tokens whose rows it holds and gives zeros for others; adding up over
    the axes that split the vocabulary makes them whole.
    """
    over = axes_of(spec_of(table)[0], "table")
    tokens_spec = spec_of(tokens)
    # tokens may be split more finely in `target`: the sum then scatters
    out = partial_sums(P(*tokens_spec, None), over)

    def local(table: jax.Array, tokens: jax.Array) -> jax.Array:
        if not over:
            return table[tokens]
        rows = table.shape[0]
        tokens = tokens - lax.axis_index(over) * rows
        here = (tokens >= 0) & (tokens < rows)
        found = table[jnp.where(here, tokens, 0)]
        found = jnp.where(here[..., None], found, jnp.zeros((), table.dtype))
        return lax.pcast(found, over, to="unreduced")

    table_spec = jax.typeof(table).sharding.spec
    looked_up = jax.shard_map(local, in_specs=(table_spec, tokens_spec), out_specs=out)(
        table, tokens
    )
    return add_up(looked_up, over, target) if over else jax.sharding.reshard(looked_up, target)
