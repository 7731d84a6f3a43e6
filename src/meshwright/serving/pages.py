"""The pages of a KV cache: which are free, who uses them, and which hold a known prefix.

    pool = PagePool(pages=1024, page_size=16)
    pages = pool.match(prompt)            # pages whose keys are there already; now used once more
    page = pool.take()                    # an empty one, None if there is none
    pool.remember(pages, tokens)          # the full pages of a sequence, for later prompts
    pool.release(pages)

A page may be used by several sequences; only full pages are shared, so no one writes into a shared
page. A page that no one uses keeps its prefix until its place is needed: the least recently used
goes first. Page 0 is never given out: padding is written there.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

Digest = bytes


class PagePool:
    def __init__(self, pages: int, page_size: int, *, remember: bool = True) -> None:
        self.page_size = page_size
        self.total = pages - 1
        self._free = list(range(pages - 1, 0, -1))
        self._uses = [0] * pages
        self._digests: dict[int, Digest] = {}  # of pages with a known prefix
        self._pages: dict[Digest, int] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()  # known prefix, no user; oldest first
        self._remembers = remember

    @property
    def available(self) -> int:
        """Pages that `take` can return."""
        return len(self._free) + len(self._unused)

    @property
    def used(self) -> int:
        return self.total - self.available

    def take(self) -> int | None:
        """An empty page with one user."""
        if self._free:
            page = self._free.pop()
        elif self._unused:
            page, _ = self._unused.popitem(last=False)
            del self._pages[self._digests.pop(page)]
        else:
            return None
        self._uses[page] = 1
        return page

    def release(self, pages: Sequence[int]) -> None:
        """One user less for each page; the last pages of a sequence are forgotten first."""
        for page in reversed(pages):
            self._uses[page] -= 1
            if self._uses[page] == 0:
                if page in self._digests:
                    self._unused[page] = None
                else:
                    self._free.append(page)

    def match(self, tokens: Sequence[int], salt: str = "") -> list[int]:
        """The pages that hold the longest known prefix of full pages, with one more user each.

        Only prefixes that were remembered with the same salt are known. At least one token is left
        to compute: its logits are needed.
        """
        pages: list[int] = []
        if not self._remembers:
            return pages
        for digest in self._chain(tokens, (len(tokens) - 1) // self.page_size, salt):
            page = self._pages.get(digest)
            if page is None:
                break
            self._unused.pop(page, None)
            self._uses[page] += 1
            pages.append(page)
        return pages

    def remember(self, pages: Sequence[int], tokens: Sequence[int], salt: str = "") -> None:
        """Note what the full pages of a sequence hold; a prefix that is known stays as it is."""
        if not self._remembers:
            return
        full = min(len(tokens) // self.page_size, len(pages))
        if not full or pages[full - 1] in self._digests:
            return
        for page, digest in zip(pages, self._chain(tokens, full, salt), strict=False):
            if page not in self._digests and digest not in self._pages:
                self._digests[page] = digest
                self._pages[digest] = page

    def forget(self) -> None:
        """No page has a known prefix any more: the keys are those of other weights."""
        self._free += self._unused
        for known in (self._unused, self._digests, self._pages):
            known.clear()

    def _chain(self, tokens: Sequence[int], pages: int, salt: str) -> list[Digest]:
        """A digest per page, of its tokens and all before, and of the salt."""
        numbers = np.asarray(tokens[: pages * self.page_size], np.int32)
        digests, before = [], _digest(salt.encode(), b"salt") if salt else b""
        for part in numbers.reshape(pages, self.page_size):
            before = _digest(before + part.tobytes())
            digests.append(before)
        return digests


def _digest(data: bytes, person: bytes = b"") -> Digest:
    """`person` keeps a salt from being taken for the digest of a page."""
    return hashlib.blake2b(data, digest_size=16, person=person).digest()
