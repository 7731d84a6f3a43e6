"""The token store: one long array of token ids, and the offsets of its documents.

books.store/
  tokens.bin            the ids of all documents, each followed by its end-of-document id
  offsets.bin           the start of each document, int64, and the total at the end
  tokens.crc            a checksum for each block of tokens.bin; see blocks.py
  offsets.crc           the same for offsets.bin
  weights.bin           of examples: the loss weight of each token, uint8 (a mask) or float32
  weights.crc           its checksums
  saved_tokenizer.json  the tokenizer that encoded them
  meta.json             counts, the size and hash of each file, and a hash of itself

A store of examples (conversations, prompts with completions) has weights; one of texts has none.
An example is never cut into two sequences, and ends with the last of its own tokens.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.data.blocks import BlockArray, checksum_name, damaged, unreadable
from meshwright.data.tokenizers import Ids, Tokenizer, tokenizer_from_json
from meshwright.errors import MeshwrightError
from meshwright.present import count

FORMAT = "meshwright token store"
VERSION = 2  # of texts; version 1 had no checksums of blocks
WITH_WEIGHTS = 3  # the same with weights
TOKENS, OFFSETS, TOKENIZER, META = "tokens.bin", "offsets.bin", "saved_tokenizer.json", "meta.json"
WEIGHTS = "weights.bin"
OFFSET_DTYPE = np.dtype("<i8")
MASK_DTYPE, WEIGHT_DTYPE = np.dtype("|u1"), np.dtype("<f4")
LARGEST_WEIGHT = 1 << 20


def block_files(weights: bool) -> tuple[str, ...]:
    """The files of a store that are read in blocks."""
    return (TOKENS, OFFSETS, WEIGHTS) if weights else (TOKENS, OFFSETS)


def token_dtype(vocab: int) -> np.dtype[Any]:
    """uint16 where the vocabulary allows it, else uint32."""
    return np.dtype("<u2" if vocab <= 1 << 16 else "<u4")


@dataclass(frozen=True, eq=False)
class TokenStore:
    """Packed documents, open for reading.

    >>> from meshwright.data.tokenizers import ByteTokenizer
    >>> store = TokenStore.of_documents(["One.", "Two."], ByteTokenizer(), name="numbers")
    >>> store.documents, len(store.tokens), store.text(1)
    (2, 10, 'Two.')
    """

    name: str
    tokens: npt.NDArray[Any] | BlockArray  # [tokens]
    offsets: npt.NDArray[np.int64] | BlockArray  # [documents + 1]
    tokenizer: Tokenizer
    meta: dict[str, Any]
    path: Path | None = None
    weights: npt.NDArray[Any] | BlockArray | None = None  # [tokens], of examples

    @property
    def is_weighted(self) -> bool:
        """Whether tokens have weights other than 0 and 1."""
        return self.weights is not None and self.weights.dtype == WEIGHT_DTYPE

    @property
    def holds_pairs(self) -> bool:
        """Whether documents 2i and 2i + 1 are the chosen and the rejected answer of a pair."""
        return bool(self.meta.get("examples", {}).get("pairs"))

    @property
    def documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def identity(self) -> str:
        """A hash of the tokens, documents and tokenizer: equal for stores with equal content."""
        return str(self.meta["identity"])

    def document(self, number: int) -> Ids:
        """The ids of one document, including its end-of-document id."""
        if not 0 <= number < self.documents:
            raise MeshwrightError(
                f"store '{self.name}' has no document {number}; it holds "
                f"{count(self.documents, 'document')}, the first is 0"
            )
        start, stop = self.offsets[number : number + 2].tolist()
        return self.tokens[start:stop].astype(np.int32)

    def document_weights(self, number: int) -> npt.NDArray[Any]:
        """The loss weight of each token of a document: 1 for all, or those of an example."""
        if self.weights is None:
            return np.ones(len(self.document(number)), MASK_DTYPE)
        start, stop = self.offsets[number : number + 2].tolist()
        return self.weights[start:stop]

    def share_with_loss(self) -> float:
        """The fraction of tokens whose weight is not 0."""
        if self.weights is None:
            return 1.0
        with_loss = 0
        for start in range(0, len(self.tokens), 1 << 20):
            with_loss += int(np.count_nonzero(self.weights[start : start + (1 << 20)]))
        return with_loss / len(self.tokens)

    def offsets_between(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """From the last offset <= `start` to the first >= `stop`.

        Needs 0 <= start < stop <= len(tokens).
        """
        if isinstance(self.offsets, BlockArray):
            return self.offsets.between(start, stop)
        begin = int(np.searchsorted(self.offsets, start, side="right")) - 1
        return self.offsets[begin : int(np.searchsorted(self.offsets, stop)) + 1]

    def text(self, number: int) -> str:
        """The text of one document."""
        return self.tokenizer.decode(self.document(number))

    @classmethod
    def open(cls, path: str | Path) -> "TokenStore":
        """Open the store in that folder.

        The hashes of the small files are checked here. The two large files are verified block by
        block whenever a part of them is read.
        """
        folder = Path(path)
        meta = read_meta(folder)
        for name, facts in meta["files"].items():
            _check_size(folder / name, facts["bytes"])
            if name.endswith(".crc"):
                check_hash(folder / name, facts["sha256"])
        tokenizer = read_tokenizer(folder / TOKENIZER, meta["files"][TOKENIZER]["sha256"])
        if describe_tokenizer(tokenizer) != meta["tokenizer"]:
            raise damaged(folder / META, f"{TOKENIZER} is not the tokenizer that made the tokens")
        dtype = token_dtype(tokenizer.vocab)
        tokens, documents = meta["tokens"], meta["documents"]
        weight_dtype = None if WEIGHTS not in meta["files"] else _weight_dtype(folder, meta)
        sizes = {TOKENS: tokens * dtype.itemsize, OFFSETS: (documents + 1) * 8}
        if weight_dtype is not None:
            sizes[WEIGHTS] = tokens * weight_dtype.itemsize
        for name, size in sizes.items():
            if meta["files"][name]["bytes"] != size:
                raise damaged(folder / META, f"{META} contradicts itself about {name}")
        vocab = tokenizer.vocab
        store = cls(
            name=folder.name or str(path),
            tokens=BlockArray(
                folder / TOKENS, dtype, "token id", vocab, f"the vocabulary of {vocab:,}"
            ),
            offsets=BlockArray(
                folder / OFFSETS,
                OFFSET_DTYPE,
                "document offset",
                tokens + 1,
                f"the {tokens:,} tokens",
                increasing=True,
            ),
            tokenizer=tokenizer,
            meta=meta,
            path=folder,
            weights=None if weight_dtype is None else _open_weights(folder, weight_dtype),
        )
        if store.offsets[:1][0] != 0 or store.offsets[documents:][0] != tokens:
            raise damaged(folder / OFFSETS, f"{OFFSETS} does not span the {tokens:,} tokens")
        return store

    @classmethod
    def of_documents(cls, texts: Iterable[str], tokenizer: Tokenizer, name: str) -> "TokenStore":
        """An in-memory store; nothing is written."""
        parts = [
            np.append(ids, np.int32(tokenizer.end_of_document))
            for ids in tokenizer.encode_batch(list(texts))
            if len(ids)
        ]
        if not parts:
            raise MeshwrightError(f"store '{name}' would be empty: no document holds any text")
        return cls._in_memory(name, tokenizer, parts, None)

    @classmethod
    def of_examples(
        cls,
        examples: Sequence[tuple[npt.ArrayLike, npt.ArrayLike]],
        tokenizer: Tokenizer,
        name: str,
    ) -> "TokenStore":
        """An in-memory store of examples: pairs of token ids and their loss weights."""
        if not examples:
            raise MeshwrightError(f"store '{name}' would be empty: there is no example")
        parts = [np.asarray(ids, np.int32) for ids, _ in examples]
        weights = np.concatenate([np.asarray(each) for _, each in examples])
        is_mask = bool(((weights == 0) | (weights == 1)).all())
        dtype = MASK_DTYPE if is_mask else WEIGHT_DTYPE
        return cls._in_memory(name, tokenizer, parts, weights.astype(dtype))

    @classmethod
    def _in_memory(
        cls, name: str, tokenizer: Tokenizer, parts: list[Ids], weights: npt.NDArray[Any] | None
    ) -> "TokenStore":
        tokens = as_tokens(np.concatenate(parts), tokenizer)
        offsets = np.cumsum([0, *map(len, parts)]).astype(OFFSET_DTYPE)
        arrays = (tokens, offsets) if weights is None else (tokens, offsets, weights)
        digests = [hashlib.sha256(array.tobytes()).hexdigest() for array in arrays]
        meta = describe(tokenizer, len(tokens), len(parts), *digests)
        return cls(name, tokens, offsets, tokenizer, meta, weights=weights)

    def verify(self) -> None:
        """Read the whole store; a MeshwrightError names the block or file that differs."""
        if self.path is None:
            return
        for array in (self.tokens, self.offsets, self.weights):
            if isinstance(array, BlockArray):
                array.verify()
        for name, facts in self.meta["files"].items():
            check_hash(self.path / name, facts["sha256"])


def as_tokens(ids: Ids, tokenizer: Tokenizer) -> npt.NDArray[Any]:
    """The ids in the store's dtype; an id outside the tokenizer's vocabulary is an error."""
    outside = (ids < 0) | (ids >= tokenizer.vocab)
    if outside.any():
        raise MeshwrightError(
            f"the {tokenizer.kind} tokenizer returned the id {ids[outside][0]}, outside its "
            f"vocabulary of {tokenizer.vocab:,}; use a tokenizer whose files match"
        )
    return ids.astype(token_dtype(tokenizer.vocab))


def describe(tokenizer: Tokenizer, tokens: int, documents: int, *sha256: str) -> dict[str, Any]:
    """The fields of meta.json that every store has; hashes are of tokens, offsets and weights."""
    identity = hashlib.sha256(" ".join((tokenizer.identity, *sha256)).encode())
    return {
        "format": FORMAT,
        "version": VERSION if len(sha256) == 2 else WITH_WEIGHTS,
        "identity": identity.hexdigest()[:32],
        "dtype": token_dtype(tokenizer.vocab).str,
        "tokens": tokens,
        "documents": documents,
        "tokenizer": describe_tokenizer(tokenizer),
    }


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """The tokenizer's entry in meta.json."""
    return {
        "kind": tokenizer.kind,
        "identity": tokenizer.identity,
        "vocab": tokenizer.vocab,
        "end_of_document": tokenizer.end_of_document,
    }


def hash_of_meta(meta: dict[str, Any]) -> str:
    """The hash of meta.json, without the hash field itself."""
    rest = {name: value for name, value in meta.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_meta(folder: Path, versions: tuple[int, ...] = (VERSION, WITH_WEIGHTS)) -> dict[str, Any]:
    """meta.json of a store of one of these versions; anything else is a MeshwrightError."""
    file = folder / META
    try:
        found, has_meta = folder.exists(), file.is_file()
        text = file.read_text(encoding="utf-8") if has_meta else ""
    except OSError as reason:
        raise unreadable(file, reason) from None
    except UnicodeDecodeError as reason:
        raise damaged(file, f"{META} cannot be read: {reason}") from None
    if not found:
        raise MeshwrightError(
            f"token store '{folder}' does not exist; make one with: "
            f"meshwright data pack TEXT --out {folder}"
        )
    if not has_meta and (folder / "config.json").is_file():
        raise MeshwrightError(
            f"'{folder}' is a model or a run (it has a config.json), not a token store; make one "
            "with: meshwright data pack TEXT --out STORE"
        )
    if not has_meta:
        raise MeshwrightError(
            f"'{folder}' is not a token store (it has no {META}); pack text into one with: "
            f"meshwright data pack {folder} --out {folder.name}.store"
        )
    try:
        meta = json.loads(text)
    except (ValueError, RecursionError) as reason:
        raise damaged(file, f"{META} cannot be read: {reason}") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise MeshwrightError(f"'{folder}' is not a token store: its {META} has another format")
    version = meta.get("version")
    _check_version(folder, version, versions)
    if version != 1 and meta.get("sha256") != hash_of_meta(meta):
        raise damaged(file, f"{META} was changed after packing (its hash does not match)")
    blocks = block_files(version == WITH_WEIGHTS)
    checksums = () if version == 1 else map(checksum_name, blocks)
    _check_fields(file, meta, (*blocks, TOKENIZER, *checksums))
    return meta


def _weight_dtype(folder: Path, meta: dict[str, Any]) -> np.dtype[Any]:
    for dtype in (MASK_DTYPE, WEIGHT_DTYPE):
        if meta.get("weights") == dtype.str:
            return dtype
    raise damaged(folder / META, f"{META} does not say how {WEIGHTS} is stored")


def _open_weights(folder: Path, dtype: np.dtype[Any]) -> BlockArray:
    below, limit = (2, "0 and 1") if dtype == MASK_DTYPE else (LARGEST_WEIGHT, "its range")
    return BlockArray(folder / WEIGHTS, dtype, "loss weight", below, limit)


def _check_fields(file: Path, meta: dict[str, Any], names: tuple[str, ...]) -> None:
    try:
        files = [meta["files"][name] for name in names]
        sizes = [meta["tokens"], meta["documents"], *(facts["bytes"] for facts in files)]
        texts = [meta["identity"], *(facts["sha256"] for facts in files)]
        if meta["files"].keys() != set(names) or not isinstance(meta["tokenizer"], dict):
            raise TypeError
        if not all(type(size) is int and size > 0 for size in sizes):
            raise TypeError
        for text in texts:
            int(text, 16)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise damaged(file, f"{META} has missing or wrong fields") from None


def _check_version(folder: Path, found: Any, wanted: tuple[int, ...]) -> None:
    if found in wanted:
        return
    if found == 1:
        raise MeshwrightError(
            f"token store '{folder}' has version 1, without block checksums; verify it and add "
            f"them with: meshwright data upgrade {folder}"
        )
    if found in (VERSION, WITH_WEIGHTS):
        raise MeshwrightError(f"token store '{folder}' already has version {found}")
    raise MeshwrightError(
        f"token store '{folder}' has version {found!r}, this meshwright reads versions "
        f"{VERSION} and {WITH_WEIGHTS}; pack it again, or use the meshwright that packed it"
    )


def check_hash(file: Path, sha256: str) -> None:
    """Raise a MeshwrightError if the file differs from what was packed."""
    try:
        with file.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as reason:
        raise unreadable(file, reason) from None
    if found != sha256:
        raise damaged(file, f"{file.name} differs from what was packed (its hash does not match)")


def read_tokenizer(file: Path, sha256: str) -> Tokenizer:
    """The tokenizer of a store, after its file was compared with the hash."""
    check_hash(file, sha256)
    try:
        return tokenizer_from_json(json.loads(file.read_text(encoding="utf-8")))
    except OSError as reason:
        raise unreadable(file, reason) from None
    except MeshwrightError:
        raise
    except (KeyError, AttributeError, ValueError) as reason:
        raise damaged(file, f"{TOKENIZER} cannot be read: {reason}") from None


def _check_size(file: Path, size: int) -> None:
    try:
        found = file.stat().st_size
    except FileNotFoundError:
        raise damaged(file, f"{file.name} is missing") from None
    except OSError as reason:
        raise unreadable(file, reason) from None
    if found != size:
        what = "it was truncated" if found < size else "bytes were appended"
        raise damaged(file, f"{file.name} has {found:,} bytes instead of {size:,}: {what}")
