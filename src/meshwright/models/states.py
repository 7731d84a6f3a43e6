"""Attention states: what attention reads besides the keys of its own tokens, and what it keeps.

    hidden, state = forward(params, batch, config, compute, state)

| state | meaning | result |
|---|---|---|
| None | training: sequences from their first to their last token | None |
| EmptyCache | prefill: the same, and their keys are kept | Cache |
| Cache | decode: one more token per sequence, over a contiguous cache | Cache |
| KeptKeys | prefill of prompts whose keys go into pages | KeptKeys |
| PagedCache | an engine's step: decode tokens and chunks of prompts, over pages | PagedCache |

A cache stores the key heads, never repeated for the query heads. Sequences may differ in length;
positions >= length are uninitialized.
"""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from meshwright.models.activations import ActivationLayouts
from meshwright.ops import spec_of
from meshwright.ops.attention import PagedTokens, cached_attention, paged_attention

Bias = tuple[jax.Array, jax.Array]


class AttentionState(Protocol):
    """What a forward pass needs of a state."""

    @property
    def layers(self) -> Any:
        """What each layer reads: stacked, or a list with an entry per layer."""
        ...

    def positions(self, tokens: jax.Array) -> jax.Array:
        """The positions of new tokens [batch, length], of the same shape."""
        ...

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, layer: Any, window: int | None
    ) -> tuple[jax.Array, Any]:
        """The output, sharded as q, and what is kept of the layer."""
        ...

    def updated(self, kept: Any) -> Any:
        """The state after the new tokens, from what each layer kept."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of the tokens so far."""

    keys: jax.Array  # [layers, batch, kv_heads, room, head_dim]
    values: jax.Array
    lengths: jax.Array  # [batch] tokens of each sequence in the cache

    @property
    def layers(self) -> tuple[jax.Array, jax.Array]:
        return self.keys, self.values

    def positions(self, tokens: jax.Array) -> jax.Array:
        return self.lengths[:, None]

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        layer: tuple[jax.Array, jax.Array],
        window: int | None = None,
        bias: Bias | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        mixed = cached_attention(q, k, v, *layer, self.lengths, window=window, bias=bias)
        return mixed, (k, v)

    def updated(self, kept: tuple[jax.Array, jax.Array]) -> "Cache":
        """The cache with one more token per sequence: [layers, batch, 1, kv_heads, head_dim]."""
        spec = spec_of(self.keys)
        layers, batch, kv_heads, _, head_dim = spec.partitions

        def write(cache: jax.Array, new: jax.Array, at: jax.Array) -> jax.Array:
            sequences = jnp.arange(at.shape[0])
            # jax puts the dims of index arrays first: [batch, layers, kv_heads, head_dim]
            new = jnp.swapaxes(new[:, :, 0], 0, 1)
            return cache.at[:, sequences, :, at].set(new, unique_indices=True)

        write = jax.shard_map(
            write,
            in_specs=(spec, P(layers, batch, None, kv_heads, head_dim), P(batch)),
            out_specs=spec,
        )
        keys, values = (
            write(cache, new, self.lengths) for cache, new in zip(self.layers, kept, strict=True)
        )
        return Cache(keys, values, self.lengths + 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EmptyCache:
    """A cache to be filled with prompts of these lengths, padded at their ends."""

    lengths: jax.Array  # [batch]
    room: int = dataclasses.field(metadata={"static": True})  # tokens per sequence

    def filled(self, keys: jax.Array, values: jax.Array, layouts: ActivationLayouts) -> Cache:
        """The cache with these keys and values [layers, batch, length, kv_heads, head_dim]."""
        batch, length, kv_heads, head_dim = layouts.kv_heads.partitions
        free = ((0, 0), (0, 0), (0, 0), (0, max(self.room - keys.shape[2], 0)), (0, 0))
        target = P(None, batch, kv_heads, length, head_dim)
        keys, values = (
            reshard(jnp.pad(jnp.swapaxes(x, 2, 3), free), target) for x in (keys, values)
        )
        return Cache(keys, values, reshard(self.lengths, P(batch)))


@dataclasses.dataclass(frozen=True)
class KeptKeys:
    """Keys and values [batch, length, kv_heads, head_dim] of each layer, which does not scan."""

    layers: list[tuple[jax.Array, jax.Array]] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedCache:
    """Keys and values in pages; the batch is one sequence [1, tokens] of all tokens of a step."""

    layers: list[jax.Array]  # the pool of each layer
    tokens: PagedTokens

    def positions(self, tokens: jax.Array) -> jax.Array:
        return self.tokens.all_positions()[None]

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        layer: jax.Array,
        window: int | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        return paged_attention(q, k, v, layer, self.tokens, window=window)

    def updated(self, kept: list[jax.Array]) -> "PagedCache":
        return PagedCache(kept, self.tokens)
