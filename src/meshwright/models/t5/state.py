"""The attention state of T5's decoder: its own cache, and the keys of the encoder's output."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.models.states import Cache
from meshwright.ops import relative_bias_at


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

    def bias(self, table: jax.Array, max_distance: int) -> tuple[jax.Array, jax.Array]:
        """Of the next token to those in the cache, and to itself."""
        room = self.cache.keys.shape[3]
        to_cache, to_itself = (
            relative_bias_at(table, at[None], keys, max_distance=max_distance)
            for at, keys in ((self.position, room), (jnp.zeros((), jnp.int32), 1))
        )
        return to_cache, to_itself

    def updated(self, kept: Any) -> "T5State":
        cache = self.cache.updated(kept)
        return dataclasses.replace(self, cache=cache, position=self.position + 1)
