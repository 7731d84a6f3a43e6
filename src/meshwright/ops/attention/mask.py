"""Attention masks: which keys a query attends to, by position.

>>> Mask()                                  # causal
Mask(causal=True, window=None, block=None, offset=0)
>>> Mask(window=4096)                       # causal with a sliding window
Mask(causal=True, window=4096, block=None, offset=0)
>>> Mask(window=8).within(4, 4)             # a window that covers all 4 keys
Mask(causal=True, window=None, block=None, offset=0)
>>> Mask(block=6).within(4, 4)              # a block that covers all 4 keys
Mask(causal=False, window=None, block=None, offset=0)
>>> Mask(offset=4).within(4, 4)             # all queries come after all keys
Mask(causal=False, window=None, block=None, offset=0)
"""

import dataclasses

import jax

from meshwright.arithmetic import whole_number
from meshwright.errors import MeshwrightError


@dataclasses.dataclass(frozen=True)
class Mask:
    causal: bool = True
    window: int | None = None  # sliding window size, including the token itself
    block: int | None = None  # block-causal: attention within a block is bidirectional
    offset: int = 0  # position of the first query minus position of the first key

    def __post_init__(self) -> None:
        for name in ("window", "block"):
            size = getattr(self, name)
            if size is None:
                continue
            if whole_number(size, f"an attention mask's {name}") < 1:
                raise MeshwrightError(f"an attention mask's {name}={size} must be at least 1")
            if not self.causal:
                raise MeshwrightError(
                    f"an attention mask with {name}={size} is causal; leave causal=True"
                )
        if self.window is not None and self.block is not None:
            raise MeshwrightError(
                f"an attention mask takes a window ({self.window}) or a block ({self.block}), "
                "not both"
            )

    def seen(self, queries: jax.Array, keys: jax.Array) -> jax.Array | None:
        """The mask [queries, keys] from their indices; None if nothing is masked."""
        return self.pairs_seen(queries[:, None], keys[None, :])

    def pairs_seen(self, query: jax.Array, key: jax.Array) -> jax.Array | None:
        """Whether each query attends to the key with the same index; None if all do."""
        if not self.causal:
            return None
        query = query + self.offset
        if self.block is not None:
            return query // self.block >= key // self.block
        seen = query >= key
        return seen if self.window is None else seen & (query - key < self.window)

    def within(self, queries: int, keys: int) -> "Mask":
        """The simplest equivalent mask for these numbers of queries and keys."""
        if not self.causal:
            return EVERYTHING
        window = self.window
        if window is not None and window >= self.offset + queries:
            window = None
        if window is None and self._end(0) >= keys:
            return EVERYTHING
        return self if window == self.window else dataclasses.replace(self, window=window)

    def ends_within(self, queries: int, keys: int) -> bool:
        """Whether keys appended after the last one would be masked for every query."""
        return self.causal and self._end(queries - 1) <= keys

    def _end(self, query: int) -> int:
        """The index after the last key that a query attends to; causal masks only."""
        block = self.block or 1
        return (query + self.offset) // block * block + block


EVERYTHING = Mask(causal=False)
