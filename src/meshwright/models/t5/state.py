"""Attention states of T5's decoder: a cache or pages of its own keys, and of the encoder's."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.models.compute import Compute
from meshwright.models.states import Bias, Cache
from meshwright.ops import relative_bias_at
from meshwright.ops.attention import (
    EVERYTHING,
    PagedKeys,
    PagedTokens,
    attend_to_pages,
    attention,
    page_size_of,
    paged_attention,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class T5State:
    cache: Cache  # of the decoder's tokens, of each sequence equally many
    encoded_keys: jax.Array  # [layers, batch, encoder_length, kv_heads, head_dim]
    encoded_values: jax.Array
    encoder_segments: jax.Array  # [batch, encoder_length]: 1, padding 0
    position: jax.Array  # of the next token

    @property
    def lengths(self) -> jax.Array:
        return self.cache.lengths

    @property
    def layers(self) -> tuple[jax.Array, ...]:
        return *self.cache.layers, self.encoded_keys, self.encoded_values

    def bias(self, table: jax.Array, max_distance: int) -> Bias:
        """Of the next token to those in the cache, and to itself."""
        room = self.cache.keys.shape[3]
        to_cache, to_itself = (
            relative_bias_at(table, at[None], keys, max_distance=max_distance)
            for at, keys in ((self.position, room), (jnp.zeros((), jnp.int32), 1))
        )
        return to_cache, to_itself

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, layer: Any, bias: Bias) -> Any:
        return self.cache.attend(q, k, v, layer[:2], bias=bias)

    def attend_to_encoded(self, q: jax.Array, layer: Any, compute: Compute) -> jax.Array:
        """Attention of q [batch, 1, heads, head_dim] to the encoder's output."""
        segments = jnp.ones_like(self.encoder_segments[:, :1]), self.encoder_segments
        keys, values = layer[2:]
        return attention(q, keys, values, segments, EVERYTHING, kernel=compute.kernel)

    def updated(self, kept: Any) -> "T5State":
        cache = self.cache.updated(kept)
        return dataclasses.replace(self, cache=cache, position=self.position + 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class T5PagedState:
    """Of an engine's step: the keys of both are in pages of one pool."""

    layers: list[jax.Array]  # the pool of each layer
    tokens: PagedTokens
    encoded: PagedKeys

    def bias(self, table: jax.Array, max_distance: int) -> Bias:
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

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, layer: Any, bias: Bias) -> Any:
        return paged_attention(q, k, v, layer, self.tokens, bias=bias)

    def attend_to_encoded(self, q: jax.Array, layer: Any, compute: Compute) -> jax.Array:
        return attend_to_pages(q, layer, self.encoded, self.tokens.length)

    def updated(self, kept: list[jax.Array]) -> "T5PagedState":
        return dataclasses.replace(self, layers=kept)
