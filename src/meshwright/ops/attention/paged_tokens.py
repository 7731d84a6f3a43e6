"""Where the tokens of a step are in the pages of a KV cache.

A pool holds the pages of one layer; page 0 receives what is written for padding.
"""

import dataclasses

import jax
import jax.numpy as jnp

Pool = jax.Array


Slots = tuple[jax.Array, jax.Array]
"""The pages of tokens, and their places in them."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedTokens:
    """The tokens of a step: `decode` single tokens, then `chunks` of `length` tokens each."""

    tables: jax.Array  # [decode, width]: the pages of each sequence in order, unused ones 0
    positions: jax.Array  # [decode]: of the token in its sequence
    chunk_tables: jax.Array  # [chunks, width]
    starts: jax.Array  # [chunks]: position of the chunk's first token
    counts: jax.Array  # [chunks]: tokens of the chunk, the rest is padding
    length: int = dataclasses.field(metadata={"static": True})
    first: bool = dataclasses.field(metadata={"static": True})  # every chunk starts at position 0
    kernel: str = dataclasses.field(metadata={"static": True})  # see choose_paged

    @property
    def chunk_positions(self) -> jax.Array:
        return self.starts[:, None] + jnp.arange(self.length, dtype=jnp.int32)[None]

    @property
    def inside(self) -> jax.Array:
        """[chunks, length]: False for padding."""
        return jnp.arange(self.length)[None] < self.counts[:, None]

    def all_positions(self) -> jax.Array:
        """[tokens], of padding as well."""
        return jnp.concatenate([self.positions, self.chunk_positions.reshape(-1)])

    def slots(self, page_size: int) -> Slots:
        """The page of each token and its place in it, [tokens] each; padding is in page 0."""
        positions = self.positions[:, None], self.chunk_positions
        inside = self.inside
        pages = [
            jnp.take_along_axis(tables, at // page_size, axis=1, mode="clip")
            for tables, at in zip((self.tables, self.chunk_tables), positions, strict=True)
        ]
        pages[1] = jnp.where(inside, pages[1], 0)
        flat = [jnp.concatenate([x.reshape(-1) for x in pair]) for pair in (pages, positions)]
        return flat[0], flat[1] % page_size


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedKeys:
    """Keys that every token of a sequence sees: where they are, for each sequence of a step."""

    tables: jax.Array  # [decode, width]
    lengths: jax.Array  # [decode]
    chunk_tables: jax.Array  # [chunks, width]
    chunk_lengths: jax.Array  # [chunks]


PagedBias = tuple[jax.Array, jax.Array]
"""Of decode tokens [decode, heads, 1, keys] and of chunks [chunks, heads, length, keys]."""


def page_size_of(pool: Pool) -> int:
    """Tokens of a page."""
    return pool.shape[1]
