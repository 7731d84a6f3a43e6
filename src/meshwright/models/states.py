"""Attention states: what attention reads besides the keys of its own tokens, and what it keeps.

    hidden, state = forward(params, batch, config, compute, state)

| state | meaning | result |
|---|---|---|
| None | training: sequences from their first to their last token | None |
| KeptKeys | prefill of prompts whose keys go into pages | KeptKeys |
| PagedCache | an engine's step: decode tokens and chunks of prompts, over pages | PagedCache |

A cache stores the key heads, never repeated for the query heads.
"""

import dataclasses
from typing import Any

import jax

from meshwright.ops.attention import PagedTokens, page_size_of, paged_attention


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

    def positions(self) -> jax.Array:
        """Of the new tokens, [1, tokens]."""
        return self.tokens.all_positions()[None]

    def padding(self) -> jax.Array:
        """Which of the new tokens are nobody's, [1, tokens]: they are written to page 0."""
        pages, _ = self.tokens.slots(page_size_of(self.layers[0]))
        return pages[None] == 0

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        pool: jax.Array,
        window: int | None,
        **more: Any,
    ) -> tuple[jax.Array, jax.Array]:
        """The output, sharded as q, and the pool of a layer with the new keys and values.

        `more`: softcap and sinks, as in `attention`.
        """
        return paged_attention(q, k, v, pool, self.tokens, window=window, **more)

    def updated(self, pools: list[jax.Array]) -> "PagedCache":
        """The state after the new tokens."""
        return PagedCache(pools, self.tokens)
