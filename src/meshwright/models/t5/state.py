"""The attention state of T5's decoder in an engine: pages of its own keys, and of the encoder's."""

import dataclasses

import jax

from meshwright.ops import relative_bias_at
from meshwright.ops.attention import (
    PagedBias,
    PagedKeys,
    PagedTokens,
    attend_to_pages,
    page_size_of,
    paged_attention,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class T5PagedCache:
    """The keys of both are in pages of one pool."""

    layers: list[jax.Array]  # the pool of each layer
    tokens: PagedTokens
    encoded: PagedKeys

    def bias(self, table: jax.Array, max_distance: int) -> PagedBias:
        """Of decode tokens and of chunks to all places of their pages."""
        size = page_size_of(self.layers[0])
        of_decode, of_chunks = (
            relative_bias_at(table, at, tables.shape[1] * size, max_distance=max_distance)
            for at, tables in (
                (self.tokens.positions[:, None], self.tokens.tables),
                (self.tokens.chunk_positions, self.tokens.chunk_tables),
            )
        )
        return of_decode, of_chunks

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, pool: jax.Array, bias: PagedBias
    ) -> tuple[jax.Array, jax.Array]:
        return paged_attention(q, k, v, pool, self.tokens, bias=bias)

    def attend_to_encoded(self, q: jax.Array, pool: jax.Array) -> jax.Array:
        return attend_to_pages(q, pool, self.encoded, self.tokens.length)

    def updated(self, pools: list[jax.Array]) -> "T5PagedCache":
        return dataclasses.replace(self, layers=pools)
