"""Which keys a query may see, by their places in the row.

>>> Mask()                                  # causal: itself and those before
Mask(causal=True, window=None, block=None, offset=0)
>>> Mask(window=4096)                       # causal, the nearest 4096
Mask(causal=True, window=4096, block=None, offset=0)
>>> Mask(window=8).within(4, 4)             # of 4 queries and 4 keys it leaves nothing out
Mask(causal=True, window=None, block=None, offset=0)
>>> Mask(block=6).within(4, 4)              # nor does a block that holds them all
Mask(causal=False, window=None, block=None, offset=0)
>>> Mask(offset=4).within(4, 4)             # queries behind all keys see them all
Mask(causal=False, window=None, block=None, offset=0)
"""

import dataclasses

import jax

from meshwright.arithmetic import whole_number
from meshwright.errors import MeshwrightError


@dataclasses.dataclass(frozen=True)
class Mask:
    causal: bool = True
    window: int | None = None  # the nearest so many, itself counted
    block: int | None = None  # block-causal: a token sees its own block of so many whole
    offset: int = 0  # how many places the first query stands behind the first key

    def __post_init__(self) -> None:
        for name in ("window", "block"):
            size = getattr(self, name)
            if size is None:
                continue
            if whole_number(size, f"an attention mask's {name}") < 1:
                raise MeshwrightError(f"an attention mask's {name}={size} must be at least 1")
            if not self.causal:
                raise MeshwrightError(
                    f"an attention mask with {name}={size} looks back only; leave causal=True"
                )
        if self.window is not None and self.block is not None:
            raise MeshwrightError(
                f"an attention mask takes a window ({self.window}) or a block ({self.block}), "
                "not both"
            )

    def seen(self, queries: jax.Array, keys: jax.Array) -> jax.Array | None:
        """[queries, keys], from their places in their own arrays; None if all are seen."""
        return self.pairs_seen(queries[:, None], keys[None, :])

    def pairs_seen(self, query: jax.Array, key: jax.Array) -> jax.Array | None:
        """Whether each of these queries sees the key beside it; None if all do."""
        if not self.causal:
            return None
        query = query + self.offset
        if self.block is not None:
            return query // self.block >= key // self.block
        seen = query >= key
        return seen if self.window is None else seen & (query - key < self.window)

    def within(self, queries: int, keys: int) -> "Mask":
        """The simplest mask that says the same of so many queries and keys."""
        if not self.causal:
            return EVERYTHING
        window = self.window
        if window is not None and window >= self.offset + queries:
            window = None
        if window is None and self._end(0) >= keys:
            return EVERYTHING
        return dataclasses.replace(self, window=window)

    def ends_within(self, queries: int, keys: int) -> bool:
        """Whether no query would see past the last key if there were more of them."""
        return self.causal and self._end(queries - 1) <= keys

    def _end(self, query: int) -> int:
        """The index of the first key after those that a query sees; causal masks only."""
        block = self.block or 1
        return (query + self.offset) // block * block + block


EVERYTHING = Mask(causal=False)
