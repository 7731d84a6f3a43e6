"""The token store: one long memory-mapped array of token ids and where its documents start.

books.store/
  tokens.bin            every document's ids and its end-of-document id, one after the other
  offsets.bin           where each document starts, int64, and the total at the end
  saved_tokenizer.json  what encoded and decodes them
  meta.json             counts, sizes and checksums
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.errors import MeshwrightError, count
from meshwright.train.data.tokenizer import Ids, Tokenizer, tokenizer_from_json

FORMAT = "meshwright token store"
VERSION = 1
TOKENS, OFFSETS, TOKENIZER, META = "tokens.bin", "offsets.bin", "saved_tokenizer.json", "meta.json"
OFFSET_DTYPE = np.dtype("<i8")


def token_dtype(vocab: int) -> np.dtype[Any]:
    """Two bytes a token where the vocabulary allows it, else four."""
    return np.dtype("<u2" if vocab <= 1 << 16 else "<u4")


@dataclass(frozen=True, eq=False)
class TokenStore:
    """Packed documents, open for reading.

    >>> from meshwright.train.data.tokenizer import ByteTokenizer
    >>> store = TokenStore.of_documents(["One.", "Two."], ByteTokenizer(), name="numbers")
    >>> store.documents, len(store.tokens), store.text(1)
    (2, 10, 'Two.')
    """

    name: str
    tokens: npt.NDArray[Any]  # [tokens]
    offsets: npt.NDArray[np.int64]  # [documents + 1]
    tokenizer: Tokenizer
    meta: dict[str, Any]
    path: Path | None = None

    @property
    def documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def identity(self) -> str:
        """A hash of the tokens, documents and tokenizer: two stores with it hold the same."""
        return str(self.meta["identity"])

    def document(self, number: int) -> Ids:
        """The ids of one document, its end-of-document id included."""
        if not 0 <= number < self.documents:
            raise MeshwrightError(
                f"store '{self.name}' has no document {number}; it holds "
                f"{count(self.documents, 'document')}, the first is 0"
            )
        start, stop = self.offsets[number : number + 2]
        return np.asarray(self.tokens[start:stop]).astype(np.int32)

    def text(self, number: int) -> str:
        """The text of one document."""
        return self.tokenizer.decode(self.document(number))

    @classmethod
    def open(cls, path: str | Path) -> "TokenStore":
        """Open the store in that folder; sizes are checked here, checksums by `verify`."""
        folder = Path(path)
        meta = read_meta(folder)
        for file, facts in meta["files"].items():
            _check_size(folder / file, facts["bytes"], path)
        tokens, documents = meta["tokens"], meta["documents"]
        dtype = np.dtype(meta["dtype"])
        expected = {
            TOKENS: tokens * dtype.itemsize,
            OFFSETS: (documents + 1) * OFFSET_DTYPE.itemsize,
        }
        for file, size in expected.items():
            if meta["files"][file]["bytes"] != size:
                raise _damaged(path, f"{META} contradicts itself about {file}")
        store = cls(
            name=folder.name or str(path),
            # plain views of the maps: slicing a memmap object costs ten times as much
            tokens=np.asarray(np.memmap(folder / TOKENS, dtype, mode="r")),
            offsets=np.asarray(np.memmap(folder / OFFSETS, OFFSET_DTYPE, mode="r")),
            tokenizer=_read_tokenizer(folder, path),
            meta=meta,
            path=folder,
        )
        if store.offsets[0] != 0 or store.offsets[-1] != tokens:
            raise _damaged(path, f"{OFFSETS} does not span the {tokens:,} tokens")
        if store.tokenizer.identity != meta["tokenizer"]["identity"]:
            raise _damaged(path, f"{TOKENIZER} is not the one the tokens were made with")
        return store

    @classmethod
    def of_documents(cls, texts: Iterable[str], tokenizer: Tokenizer, name: str) -> "TokenStore":
        """A store in memory, nothing written."""
        parts = [
            np.append(ids, np.int32(tokenizer.end_of_document))
            for ids in tokenizer.encode_batch(list(texts))
            if len(ids)
        ]
        if not parts:
            raise MeshwrightError(f"store '{name}' would be empty: no document holds any text")
        tokens = np.concatenate(parts).astype(token_dtype(tokenizer.vocab))
        offsets = np.cumsum([0, *map(len, parts)]).astype(OFFSET_DTYPE)
        digests = [hashlib.sha256(array.tobytes()).hexdigest() for array in (tokens, offsets)]
        meta = describe(tokenizer, len(tokens), len(parts), *digests)
        return cls(name, tokens, offsets, tokenizer, meta)

    def verify(self) -> None:
        """Read everything and compare checksums; a MeshwrightError names the file that differs."""
        if self.path is None:
            return
        for file, facts in self.meta["files"].items():
            with (self.path / file).open("rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
            if found != facts["sha256"]:
                raise _damaged(self.path, f"{file} is not what was packed (its checksum differs)")


def describe(
    tokenizer: Tokenizer, tokens: int, documents: int, tokens_sha256: str, offsets_sha256: str
) -> dict[str, Any]:
    """The part of meta.json that every store has."""
    identity = hashlib.sha256(f"{tokenizer.identity} {tokens_sha256} {offsets_sha256}".encode())
    return {
        "format": FORMAT,
        "version": VERSION,
        "identity": identity.hexdigest()[:32],
        "dtype": token_dtype(tokenizer.vocab).str,
        "tokens": tokens,
        "documents": documents,
        "tokenizer": {
            "kind": tokenizer.kind,
            "identity": tokenizer.identity,
            "vocab": tokenizer.vocab,
            "end_of_document": tokenizer.end_of_document,
        },
    }


def read_meta(folder: Path) -> dict[str, Any]:
    """meta.json of a store; anything else that stands there is a clear error."""
    if not folder.exists():
        raise MeshwrightError(
            f"token store '{folder}' does not exist; make one with: "
            f"meshwright data pack TEXT --out {folder}"
        )
    if not (folder / META).is_file():
        raise MeshwrightError(
            f"'{folder}' is not a token store (it has no {META}); pack text into one with: "
            f"meshwright data pack {folder} --out {folder.name}.store"
        )
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
    except (OSError, ValueError) as reason:
        raise _damaged(folder, f"{META} cannot be read: {reason}") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise MeshwrightError(f"'{folder}' is not a token store: its {META} is of something else")
    if meta.get("version") != VERSION:
        raise MeshwrightError(
            f"token store '{folder}' is of version {meta.get('version')!r}, this meshwright reads "
            f"version {VERSION}; pack it again"
        )
    try:
        sizes = [meta["tokens"], meta["documents"], meta["tokenizer"]["vocab"]]
        sizes += [meta["files"][file]["bytes"] for file in (TOKENS, OFFSETS, TOKENIZER)]
        if not all(type(size) is int and size > 0 for size in sizes):
            raise TypeError
        np.dtype(meta["dtype"])
        int(meta["identity"], 16)
        meta["tokenizer"]["identity"]
    except (KeyError, TypeError, ValueError):
        raise _damaged(folder, f"{META} does not hold what it should") from None
    return meta


def _read_tokenizer(folder: Path, path: str | Path) -> Tokenizer:
    try:
        return tokenizer_from_json(json.loads((folder / TOKENIZER).read_text(encoding="utf-8")))
    except (OSError, KeyError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as reason:
        raise _damaged(path, f"{TOKENIZER} cannot be read: {reason}") from None


def _check_size(file: Path, size: int, path: str | Path) -> None:
    try:
        found = file.stat().st_size
    except OSError as reason:
        raise _damaged(path, f"{file.name} cannot be read: {reason.strerror}") from None
    if found != size:
        what = "it was cut short" if found < size else "something was added"
        raise _damaged(path, f"{file.name} holds {found:,} bytes of {size:,}: {what}")


def _damaged(path: str | Path, what: str) -> MeshwrightError:
    return MeshwrightError(
        f"token store '{path}' is damaged: {what}. Copy it here again, or pack it again with "
        "--overwrite"
    )
