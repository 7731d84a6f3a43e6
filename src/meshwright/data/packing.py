"""Pack text files into a token store, in one pass and with bounded memory."""

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from meshwright.data.blocks import BlockChecksums, HashedFile, checksum_name, damaged
from meshwright.data.conversations import CONVERSATIONS, check_format, recognize
from meshwright.data.examples import Draft, Encoding, drafts_of, encode_drafts, is_pair
from meshwright.data.pieces import Encoded, TextPiece
from meshwright.data.readers import (
    PLAIN,
    Bad,
    Reading,
    Record,
    find_files,
    holds_text,
    read_documents,
    read_records,
)
from meshwright.data.splits import sources_of_split
from meshwright.data.store import (
    META,
    OFFSET_DTYPE,
    OFFSETS,
    TOKENIZER,
    TOKENS,
    WEIGHTS,
    TokenStore,
    as_tokens,
    block_files,
    describe,
    hash_of_meta,
    read_meta,
    read_tokenizer,
)
from meshwright.data.tokenizers import Ids, Tokenizer, added_tokens
from meshwright.errors import MeshwrightError, one_of, sentence
from meshwright.files import cannot_be_written, check_no_mount_point, final_folder
from meshwright.hub import pinned
from meshwright.interrupt import whatever_ends
from meshwright.present import count

BATCH_CHARACTERS = 2_000_000  # tokenized at once; bounds the memory
BATCH_DOCUMENTS = 4096
NEW_META = META + ".new"  # until it replaces the old one
PLAIN_ENCODING = Encoding()
Document = TypeVar("Document")


class NoTemplateError(MeshwrightError):
    """Conversations, and no chat template."""


@dataclass(frozen=True)
class Packed:
    """The result of packing."""

    store: TokenStore
    files: int
    empty: int  # documents without any token, left out
    bad: int  # unreadable documents, left out with skip_bad
    first_bad: tuple[str, ...]  # the errors of the first of them
    other_files: tuple[str, ...]  # files in the folders of an unsupported kind
    formats: tuple[str, ...] = ()  # of examples: how each format is packed, in words
    without_loss: int = 0  # examples without any token that has loss, left out


def pack(
    sources: Sequence[str | Path],
    out: str | Path,
    tokenizer: Tokenizer,
    reading: Reading = PLAIN,
    encoding: Encoding = PLAIN_ENCODING,
    *,
    skip_bad: bool = False,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda documents, tokens: None,
) -> Packed:
    """Pack files and folders into the token store `out`, atomically.

    Each text ends with the tokenizer's end-of-document id. Records of conversations and other
    examples are recognized, and get loss weights; see `Encoding`.
    """
    special = encoding.special_tokens and any(added_tokens(tokenizer))
    sources_read = [(str(source), *find_files(source, reading.split)) for source in sources]
    if not sources_read:
        raise MeshwrightError("nothing to pack; give files or folders")
    _check_read_once(sources_read)
    packed = sources_of_split({source: files for source, files, _ in sources_read}, reading.split)
    sources_read = [each for each in sources_read if each[0] in packed]
    all_files = [file for _, files, _ in sources_read for file in files]
    if not any(file.stat().st_size for file in all_files):
        are = "is" if len(all_files) == 1 else "are"
        raise MeshwrightError(f"nothing to pack: {one_of(map(str, all_files))} {are} empty")
    formats = formats_of(all_files, reading, encoding)
    problems: list[str] = []

    def bad(problem: str) -> None:
        if not skip_bad:
            raise MeshwrightError(f"{sentence(problem)} To skip such documents: --skip-bad")
        problems.append(problem if len(problems) < 8 else "")

    weights = encoding.weight_dtype if formats else None
    with new_store(out, tokenizer, special, overwrite, weights) as writer:
        facts = []
        for source, files, _ in sources_read:
            before = writer.documents
            if formats:
                records = _records(files, formats, bad)
                for drafts in _batches(_drafts(records, encoding, tokenizer, bad), _characters):
                    writer.add_examples(_encoded(drafts, encoding, writer))
                    progress(writer.documents, writer.tokens)
            else:
                for texts in _batches(_documents(files, reading, bad), len):
                    writer.add(texts)
                    progress(writer.documents, writer.tokens)
            facts.append(
                {"path": pinned(source, "dataset"), "documents": writer.documents - before}
            )
        counted: dict[str, Any] = {"sources": facts, "empty": writer.empty, "bad": len(problems)}
        if formats:
            counted["examples"] = _facts_of_examples(formats, encoding, writer.templated)
        writer.finish(counted)
    return Packed(
        store=TokenStore.open(out),
        files=len(all_files),
        empty=writer.empty,
        bad=len(problems),
        first_bad=tuple(problems[:8]),
        other_files=tuple(str(other) for _, _, others in sources_read for other in others),
        formats=tuple(
            encoding.describe(name, writer.templated) for name in dict.fromkeys(formats.values())
        ),
        without_loss=writer.without_loss,
    )


def formats_of(files: Sequence[Path], reading: Reading, encoding: Encoding) -> dict[Path, str]:
    """The format of the records of each file; empty if the files hold texts.

    It is that of a file's first record. Texts and examples do not go into one store.
    """
    if reading.field is not None and (reading.format or encoding.fields):
        raise MeshwrightError("--field names a text; leave it out with --format and --fields")
    if reading.format is not None:
        check_format(reading.format)
    asked = "fields" if encoding.fields is not None else reading.format
    formats: dict[Path, str] = {}
    for file in files if asked is not None or reading.field is None else ():
        found = None if holds_text(file) else asked or _format_of_first_record(file)
        if found is not None:
            formats[file] = found
    flags = list(encoding.flags_of_examples)
    if encoding.fields is not None:
        flags.append("--fields-from-example" if encoding.fields.from_example else "--fields")
    flags += ["--format"] * bool(reading.format)
    if not formats and flags:
        raise MeshwrightError(
            f"{flags[0]} is for examples, and '{files[0]}' holds text; leave it out"
        )
    if reading.field is not None and all(map(holds_text, files)):
        raise MeshwrightError(f"--field is for records, and '{files[0]}' holds text; leave it out")
    if reading.split_on is not None and not any(map(holds_text, files)):
        raise MeshwrightError(
            f"--split-on is for text files, and '{files[0]}' holds records; leave it out"
        )
    texts = [file for file in files if file not in formats]
    if formats and texts:
        file, name = next(iter(formats.items()))
        raise MeshwrightError(
            f"'{file}' holds examples ({name}) and '{texts[0]}' holds text; pack them into two "
            "stores, and train on both: --data a.store:0.9,b.store:0.1"
        )
    conversations = [file for file, name in formats.items() if name in CONVERSATIONS]
    if conversations and encoding.template is None:
        raise NoTemplateError(
            f"'{conversations[0]}' holds conversations ({formats[conversations[0]]}), and the "
            "tokenizer has no chat template; give one with --chat-template FILE, or the built-in "
            "--chat-template chatml"
        )
    if len({is_pair(name) for name in formats.values()}) > 1:
        raise MeshwrightError(
            "some files hold pairs of chosen and rejected answers, others single examples; pack "
            "them into two stores"
        )
    return formats


def _format_of_first_record(file: Path) -> str | None:
    for where, record in read_records(file, lambda problem: None):
        try:
            return recognize(record)
        except MeshwrightError as mistake:
            raise MeshwrightError(f"{where}: {mistake}") from None
    return None


def _records(
    files: Sequence[Path], formats: Mapping[Path, str], bad: Bad
) -> Iterator[tuple[str, Record, str]]:
    for file in files:
        for where, record in read_records(file, bad):
            yield where, record, formats[file]


def _drafts(
    records: Iterator[tuple[str, Record, str]], encoding: Encoding, tokenizer: Tokenizer, bad: Bad
) -> Iterator[list[Draft]]:
    """The examples of each record: one, or a pair."""
    for where, record, name in records:
        try:
            yield drafts_of(record, name, encoding, tokenizer)
        except MeshwrightError as mistake:
            bad(f"{where}: {mistake}")


def _characters(drafts: list[Draft]) -> int:
    pieces = itertools.chain.from_iterable(draft.pieces for draft in drafts)
    return sum(len(piece.text) for piece in pieces if isinstance(piece, TextPiece))


def _encoded(
    records: list[list[Draft]], encoding: Encoding, writer: "StoreWriter"
) -> list[Encoded]:
    """The examples of records in which each has a target; the others are counted."""
    drafts = list(itertools.chain.from_iterable(records))
    writer.templated |= any(draft.templated for draft in drafts)
    encoded = iter(encode_drafts(drafts, encoding, writer.tokenizer))
    of_records = [[next(encoded) for _ in drafts] for drafts in records]
    kept = [each for each in of_records if all(weights[1:].any() for _, weights in each)]
    writer.without_loss += len(of_records) - len(kept)
    return list(itertools.chain.from_iterable(kept))


def _facts_of_examples(
    formats: Mapping[Path, str], encoding: Encoding, templated: bool
) -> dict[str, Any]:
    """What meta.json says of the examples of a store."""
    names = list(dict.fromkeys(formats.values()))
    facts: dict[str, Any] = {"formats": names, "loss_on": encoding.loss_on, "weigh": encoding.weigh}
    if encoding.template is not None and templated:
        facts |= {"chat_template": encoding.template.text, "special": encoding.template.tokens}
    if is_pair(names[0]):
        facts["pairs"] = True  # documents 2i and 2i + 1 are the chosen and the rejected one
    return facts


def _check_read_once(sources_read: Sequence[tuple[str, list[Path], list[Path]]]) -> None:
    """Raise if two sources, however they are spelled, name the same file."""
    source_of: dict[Path, str] = {}
    for source, files, _ in sources_read:
        for path in {file.resolve() for file in files}:
            if path in source_of:
                raise MeshwrightError(
                    f"'{source_of[path]}' and '{source}' both name {path}, which would be packed "
                    "twice; leave one out"
                )
            source_of[path] = source


@contextmanager
def new_store(
    out: str | Path,
    tokenizer: Tokenizer,
    special_tokens: bool = False,
    overwrite: bool = False,
    weights: np.dtype[Any] | None = None,
) -> Iterator["StoreWriter"]:
    """A store to add texts or examples to.

    It appears at `out` complete, when the block ends without error.
    """
    _check_target(target := Path(out), overwrite)
    target = final_folder(target)
    partial = target.parent / f".{target.name}.partial-{os.getpid()}"
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with (
            whatever_ends(lambda: shutil.rmtree(partial, ignore_errors=True)),
            closing(StoreWriter(partial, tokenizer, special_tokens, weights)) as writer,
        ):
            yield writer
        _move_into_place(partial, target)
    except OSError as reason:
        raise cannot_be_written(f"token store '{target}'", reason) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # already renamed after a success


def _documents(files: list[Path], reading: Reading, bad: Bad) -> Iterator[str]:
    for file in files:
        yield from read_documents(file, reading, bad)


def _batches(
    documents: Iterator[Document], size: Callable[[Document], int]
) -> Iterator[list[Document]]:
    batch: list[Document] = []
    total = 0
    for document in documents:
        batch.append(document)
        total += size(document)
        if total >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


class StoreWriter:
    """Appends documents to the files of a store and computes their checksums and hashes."""

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        special_tokens: bool,
        weights: np.dtype[Any] | None = None,
    ):
        """`weights`: the dtype of the weights of examples; None for a store of texts."""
        self.folder, self.tokenizer, self.special_tokens = folder, tokenizer, special_tokens
        self.tokens = self.documents = self.empty = self.without_loss = 0
        self.templated = False  # whether a chat template wrote examples
        self._weights = weights
        names = block_files(weights is not None)
        self._files = {name: HashedFile(folder / name) for name in names}
        self._checksums = {
            name: BlockChecksums(folder / checksum_name(name)) for name in self._files
        }
        self._append(OFFSETS, np.zeros(1, OFFSET_DTYPE))

    def add(self, texts: list[str]) -> None:
        encoded = self.tokenizer.encode_batch(texts, self.special_tokens)
        # some tokenizers add the end token themselves; keep only one
        last = self.tokenizer.end_of_document
        bare = [ids[:-1] if len(ids) and ids[-1] == last else ids for ids in encoded]
        kept = [
            ids
            for text, ids in zip(texts, bare, strict=True)
            if text and not text.isspace() and len(ids)
        ]
        self.empty += len(texts) - len(kept)
        if not kept:
            return
        end = np.int32(last)
        self._add_documents([np.append(ids, end) for ids in kept])

    def add_examples(self, examples: Sequence[tuple[Ids, "np.ndarray[Any, Any]"]]) -> None:
        """Add token ids with their loss weights."""
        if examples:
            weights = np.concatenate([each for _, each in examples])
            self._append(WEIGHTS, weights.astype(self._weights))
            self._add_documents([ids for ids, _ in examples])

    def _add_documents(self, documents: list[Ids]) -> None:
        self._append(TOKENS, as_tokens(np.concatenate(documents), self.tokenizer))
        ends = self.tokens + np.cumsum([len(ids) for ids in documents])
        self._append(OFFSETS, ends.astype(OFFSET_DTYPE))
        self.tokens = int(ends[-1])
        self.documents += len(documents)

    def finish(self, facts: dict[str, Any]) -> None:
        if not self.documents:
            nothing = f"no document contains text ({count(self.empty, 'empty document')})"
            if not self.empty:
                nothing = "the files hold no documents"
            if self._weights is not None:
                nothing = "no example has a token with loss"
            raise MeshwrightError(f"nothing to pack: {nothing}")
        files = {name: file.finish() for name, file in self._files.items()}
        hashes = [facts["sha256"] for facts in files.values()]
        for name, checksums in self._checksums.items():
            files[checksum_name(name)] = checksums.finish()
        files[TOKENIZER] = _write_json(self.folder / TOKENIZER, self.tokenizer.to_json())
        meta = describe(self.tokenizer, self.tokens, self.documents, *hashes)
        if self._weights is not None:
            meta["weights"] = self._weights.str
        meta |= {"files": files, "special_tokens": self.special_tokens} | facts
        _write_json(self.folder / META, meta | {"sha256": hash_of_meta(meta)})

    def close(self) -> None:
        for name, file in self._files.items():
            file.close()
            self._checksums[name].close()

    def _append(self, name: str, array: np.ndarray[Any, Any]) -> None:
        data = array.tobytes()
        self._files[name].write(data)
        self._checksums[name].update(data)


def upgrade(path: str | Path) -> TokenStore:
    """Verify a store of version 1 with its hashes, and add block checksums.

    The tokens and the store's identity do not change, so runs on it resume.
    """
    folder = Path(path)
    old = read_meta(folder, versions=(1,))
    tokenizer = read_tokenizer(folder / TOKENIZER, old["files"][TOKENIZER]["sha256"])
    blocks = block_files(weights=False)
    added = [folder / name for name in (*map(checksum_name, blocks), NEW_META)]
    try:
        files = dict(old["files"])
        for name in blocks:
            files[checksum_name(name)] = _add_checksums(folder / name, files[name])
        hashes = [files[name]["sha256"] for name in blocks]
        new = describe(tokenizer, old["tokens"], old["documents"], *hashes)
        if any(old.get(name) != new[name] for name in new if name != "version"):
            raise damaged(folder / META, f"{META} contradicts the other files")
        new = old | new | {"files": files}
        _write_json(folder / NEW_META, new | {"sha256": hash_of_meta(new)})
        (folder / NEW_META).replace(folder / META)
    except BaseException as reason:
        for file in added:
            file.unlink(missing_ok=True)
        if isinstance(reason, OSError):
            raise MeshwrightError(
                f"token store '{folder}' cannot be upgraded: {reason.strerror or reason}"
            ) from None
        raise
    return TokenStore.open(folder)


def _add_checksums(file: Path, facts: dict[str, Any]) -> dict[str, Any]:
    digest = hashlib.sha256()
    checksums = BlockChecksums(file.with_name(checksum_name(file.name)))
    with closing(checksums), file.open("rb") as stream:
        while data := stream.read(1 << 20):
            digest.update(data)
            checksums.update(data)
        if digest.hexdigest() != facts["sha256"]:
            raise damaged(
                file, f"{file.name} differs from what was packed (its hash does not match)"
            )
        return checksums.finish()


def _write_json(file: Path, value: dict[str, Any]) -> dict[str, Any]:
    written = HashedFile(file)
    with closing(written):
        written.write(json.dumps(value, ensure_ascii=False, indent=1).encode())
        return written.finish()


def _check_target(target: Path, overwrite: bool) -> None:
    check_no_mount_point(target)
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise MeshwrightError(
            f"'{target}' already exists; choose another --out, or add --overwrite"
        )
    # only token stores are ever removed
    try:
        read_meta(target)
    except MeshwrightError:
        if not _looks_packed(target):
            raise MeshwrightError(
                f"'{target}' is not a token store, so it is not overwritten; choose another --out"
            ) from None


def _looks_packed(target: Path) -> bool:
    """Whether this is a token store, even if damaged or of another version."""
    blocks = block_files(weights=True)
    ours = {*blocks, *map(checksum_name, blocks), TOKENIZER, META, NEW_META}
    return target.is_dir() and TOKENS in (names := set(os.listdir(target))) and names <= ours


def _move_into_place(partial: Path, target: Path) -> None:
    if not target.exists():
        partial.rename(target)
        return
    old = target.parent / f".{target.name}.old-{os.getpid()}"
    target.rename(old)
    partial.rename(target)
    shutil.rmtree(old, ignore_errors=True)
