"""Read documents from files: text, JSON, Parquet, Arrow, Hugging Face dataset folders.

Every reader streams. Errors go to the callback `bad`, which raises or counts them.
"""

import codecs
import gzip
import importlib
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from meshwright.data.splits import ALL, choose_split, split_to_train_on
from meshwright.data.store import META, TOKENS
from meshwright.errors import MeshwrightError, did_you_mean, not_installed, one_of
from meshwright.hub import dataset_folder
from meshwright.present import count

TEXTS = (".txt", ".md")
COMPRESSIONS = ("", ".gz", ".zst")
KINDS = (
    *(kind + packed for kind in (*TEXTS, ".jsonl", ".json") for packed in COMPRESSIONS),
    ".parquet", ".arrow",
)  # fmt: skip
# of a dataset's folder: what describes the data
DESCRIPTIONS = frozenset({"readme.md", "license.md", "dataset_info.json", "dataset_infos.json"})
SAVED = ("dataset_dict.json", "state.json")  # of save_to_disk
TEXT_FIELD = "text"
CHUNK = 1 << 20
LARGEST_DOCUMENT = 1 << 30  # bytes; a document must fit in memory

Bad = Callable[[str], None]
Record = dict[str, Any]
Records = Iterator[tuple[str, Record]]  # each with where it stands, for messages


@dataclass(frozen=True)
class Reading:
    """How to find documents: the field of a record, the separator in a text file, the split.

    `format`: that of the records of examples. Without it, and without a field, it is recognized.
    """

    field: str | None = None
    split_on: str | None = None
    split: str | None = None  # of a dataset's folder; 'all' for every file
    format: str | None = None


PLAIN = Reading()


def find_files(source: str | Path, split: str | None = None) -> tuple[list[Path], list[Path]]:
    """The files to read of a file or folder, in order; and the files of unsupported kinds.

    `split`: that of a folder's splits; a file is found whatever its name says, and judged beside
    others by `sources_of_split`. Of a dataset on the Hub (org/name), the files of the split are
    downloaded.
    """
    path = dataset_folder(source, lambda names: _files_to_download(str(source), names, split))
    if not path.exists():
        raise MeshwrightError(f"data '{source}' does not exist")
    if not path.is_dir():
        if kind_of(path) is None:
            raise MeshwrightError(
                f"data '{source}' has an unsupported file type; it can be {kinds_text()}"
            )
        return [path], []
    if (path / "dataset_dict.json").is_file():
        splits = [str(name) for name in _json_file(path / "dataset_dict.json").get("splits") or ()]
        split = split_to_train_on(split, splits)
        if split not in (*splits, ALL):
            hint = "" if split is None else did_you_mean(split, splits)
            raise MeshwrightError(
                f"data '{source}' is a dataset with several splits; choose one "
                f"with --split: {', '.join(splits)}{hint}"
            )
        chosen = splits if split == ALL else [str(split)]
        return [file for name in chosen for file in _saved_dataset(path / name)], []
    if (path / "state.json").is_file():
        return _saved_dataset(path), []
    files = sorted(file for file in _files_below(path) if file.is_file())
    known = [file for file in files if kind_of(file)]
    if not known:
        raise MeshwrightError(
            f"data folder '{source}' holds no file of a supported type: {kinds_text()}"
        )
    known = [file for file in known if not _describes_data(file)] or known
    others = [file for file in files if file not in known]
    return choose_split(path, known, split), others


def _files_below(folder: Path) -> Iterator[Path]:
    """Those of a folder and, through links too, of the folders in it; none that are hidden.

    Token stores are left out: files that were packed on first use have theirs beside them.
    """
    entered = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(place)) in entered or {META, TOKENS} <= set(names):
            folders.clear()
            continue
        entered.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(place, name) for name in names if not name.startswith("."))


def _files_to_download(source: str, names: Sequence[str], split: str | None) -> list[str]:
    """The files of a dataset's split by their names, with what describes a saved dataset."""
    files = [Path(source, name) for name in names if not re.search(r"(^|/)\.", name)]
    data = [file for file in files if kind_of(file) and file.name.lower() not in DESCRIPTIONS]
    saved = [file for file in data if file.name in SAVED]
    # texts beside tables and records are about them
    tables = [file for file in data if not holds_text(file) and file not in saved]
    if not (tables or data):
        raise MeshwrightError(
            f"data '{source}' on the Hub holds no file of a supported type: {kinds_text()}"
        )
    chosen = choose_split(source, tables or data, split)
    return [file.relative_to(source).as_posix() for file in (*chosen, *saved)]


def _describes_data(file: Path) -> bool:
    """Whether a file of a folder is about the data, or settings: a small JSON object alone."""
    if file.name.lower() in DESCRIPTIONS:
        return True
    if kind_of(file) != ".json" or file.stat().st_size > CHUNK:
        return False
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return False  # lines of JSON, or an error that is told when it is read
    return isinstance(value, dict) and _list_in(value) is None


def kind_of(file: Path) -> str | None:
    """`".jsonl.gz"` of `"part.JSONL.gz"`; None if it is not supported."""
    name = file.name.lower()
    return max((kind for kind in KINDS if name.endswith(kind)), key=len, default=None)


def kinds_text() -> str:
    """The supported kinds, for messages."""
    plain = one_of((*TEXTS, ".jsonl", ".json", ".parquet", ".arrow"))
    return f"{plain}; text and JSON also with {one_of(COMPRESSIONS[1:])}"


def holds_text(file: Path) -> bool:
    """Whether the file is a text, not records."""
    return (kind_of(file) or "").startswith(TEXTS)


def read_documents(file: Path, reading: Reading, bad: Bad) -> Iterator[str]:
    """The texts of one file: its own, or those of a field of its records."""
    if holds_text(file):
        with _to_the_end(file, bad):
            yield from _text(file, reading.split_on, bad)
        return
    field = reading.field or TEXT_FIELD
    for where, record in read_records(file, bad, (field,)):
        text = _field(record, field, where, bad)
        if text is not None:
            yield text


def read_records(file: Path, bad: Bad, columns: tuple[str, ...] | None = None) -> Records:
    """The records of one file; of a table only these columns, if they are named."""
    kind = kind_of(file) or ""
    with _to_the_end(file, bad):
        if kind.startswith(".jsonl"):
            yield from _json_lines(file, bad)
        elif kind.startswith(".json"):
            yield from _json_list(file, bad)
        else:
            yield from _table(file, columns, bad)


@contextmanager
def _to_the_end(file: Path, bad: Bad) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error) as reason:
        # also a truncated gzip file; with --skip-bad, what came before is kept
        bad(f"'{file}' cannot be read to its end: {reason}")


def _open(file: Path) -> IO[bytes]:
    name = file.name.lower()
    if name.endswith(".gz"):
        return gzip.open(file, "rb")  # type: ignore[return-value]
    if name.endswith(".zst"):
        arrow = _pyarrow("pyarrow", "Files compressed with zstd")
        return io.BufferedReader(arrow.input_stream(str(file), compression="zstd"))
    return file.open("rb")


def _text(file: Path, split_on: str | None, bad: Bad) -> Iterator[str]:
    if split_on is None:
        with _open(file) as stream:
            data = stream.read(LARGEST_DOCUMENT + 1)
        if len(data) > LARGEST_DOCUMENT:
            raise MeshwrightError(
                f"'{file}' is one document of more than {LARGEST_DOCUMENT >> 30} GiB; give the "
                r"separator between its documents, as in --split-on '\n\n'"
            )
        text = _decoded(data, str(file), bad)
        if text is not None:
            yield _with_plain_line_ends(text)
        return
    for number, data in enumerate(_split(file, split_on), start=1):
        text = _decoded(data, f"{file}, document {number}", bad)
        if text is not None:
            yield text.strip("\n")


def _split(file: Path, split_on: str) -> Iterator[bytes]:
    # split bytes, not text, so that an invalid character affects only its document
    separator = _with_plain_line_ends(split_on).encode()
    held, half_line_end = b"", b""
    with _open(file) as stream:
        # read as much as is buffered, so that copying stays linear for long documents
        while data := stream.read(max(CHUNK, len(held))):
            data = half_line_end + data
            half_line_end = data[-1:] if data.endswith(b"\r") else b""
            data = data.removesuffix(half_line_end).replace(b"\r\n", b"\n")
            *whole, held = (held + data).split(separator)
            yield from whole
            if len(held) > LARGEST_DOCUMENT:
                raise MeshwrightError(
                    f"'{file}' holds a document of more than {LARGEST_DOCUMENT >> 30} GiB: is "
                    f"{split_on!r} the separator between its documents?"
                )
    last = (held + half_line_end).strip(b"\r\n")
    if last:  # empty after a separator at the end of the file
        yield last


def _with_plain_line_ends(text: str) -> str:
    return text.replace("\r\n", "\n") if "\r" in text else text


def _decoded(data: bytes, where: str, bad: Bad) -> str | None:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as reason:
        line = data.count(b"\n", 0, reason.start) + 1
        bad(f"'{where}', line {line} is not UTF-8 text ({reason.reason}); convert it to UTF-8")
        return None


def _json_lines(file: Path, bad: Bad) -> Records:
    with _open(file) as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            where = f"'{file}', line {number}"
            try:
                record = json.loads(line)
            except json.JSONDecodeError as reason:
                bad(f"{where} is not JSON, at column {reason.colno}: {reason.msg}")
                continue
            except ValueError as reason:
                bad(f"{where} is not JSON: {reason}")
                continue
            except RecursionError:
                bad(f"{where} is nested too deeply")
                continue
            if _is_record(record, where, b"\\u" in line, bad):
                yield where, record


def _json_list(file: Path, bad: Bad) -> Records:
    """A list of records, an object that holds one, or lines of JSON under another name."""
    with _open(file) as stream:
        data = stream.read(LARGEST_DOCUMENT + 1)
    if len(data) > LARGEST_DOCUMENT:
        raise MeshwrightError(
            f"'{file}' holds more than {LARGEST_DOCUMENT >> 30} GiB, which must be read at once; "
            "write it as JSON lines, one record a line (.jsonl)"
        )
    try:
        value = json.loads(data)
    except ValueError as reason:
        if data.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{"):
            yield from _json_lines(file, bad)
        else:
            bad(f"'{file}' is not JSON: {reason}")
        return
    except RecursionError:
        bad(f"'{file}' is nested too deeply")
        return
    if isinstance(value, dict):
        value = _list_in(value) or [value]
    if not isinstance(value, list):
        bad(f"'{file}' is not a list of records")
        return
    for number, record in enumerate(value, start=1):
        where = f"'{file}', record {number}"
        if _is_record(record, where, b"\\u" in data, bad):
            yield where, record


def _list_in(value: Record) -> list[Any] | None:
    """The records of an object that holds nothing else: {"data": [{…}, …]}."""
    parts = list(value.values())
    is_list = len(parts) == 1 and isinstance(parts[0], list) and parts[0]
    return parts[0] if is_list and isinstance(parts[0][0], dict) else None


def _is_record(record: Any, where: str, escaped: bool, bad: Bad) -> bool:
    """Whether it is an object of whole characters; JSON can spell halves of them."""
    if not isinstance(record, dict):
        bad(f"{where} is not an object with a field '{TEXT_FIELD}', or messages")
        return False
    if escaped:
        try:
            json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            bad(f"{where} holds half a character (an unpaired surrogate)")
            return False
    return True


_CONVERSATIONS = {"messages", "conversations"}


def _field(record: Record, field: str, where: str, bad: Bad) -> str | None:
    if field not in record and not _CONVERSATIONS.isdisjoint(record):
        bad(
            f"{where} is a conversation, which has no field '{field}'; leave out --field, and give "
            "--chat-template chatml if the tokenizer has no chat template"
        )
    elif field not in record:
        bad(f"{where} has no field '{field}'{did_you_mean(field, map(str, record))} Use --field")
    elif not isinstance(record[field], str):
        bad(f"{where}: field '{field}' is {type(record[field]).__name__}, not text")
    else:
        return str(record[field])
    return None


def _table(file: Path, columns: tuple[str, ...] | None, bad: Bad) -> Records:
    arrow = _pyarrow("pyarrow")
    row = 0
    try:
        for batch in _record_batches(file, columns, arrow):
            kept = batch if columns is None else batch.select(list(columns))
            for record in kept.to_pylist():
                row += 1
                yield f"'{file}', row {row}", record
    except (arrow.ArrowException, UnicodeDecodeError) as reason:
        bad(f"'{file}' cannot be read after row {row}: {reason}")


def _record_batches(file: Path, columns: tuple[str, ...] | None, arrow: Any) -> Iterable[Any]:
    if kind_of(file) == ".parquet":
        table = _pyarrow("pyarrow.parquet").ParquetFile(file)
        _check_columns(file, columns, table.schema_arrow.names)
        yield from table.iter_batches(batch_size=1024, columns=columns and list(columns))
        return
    with arrow.memory_map(str(file)) as mapped:
        try:
            batches: Any = arrow.ipc.open_stream(mapped)
        except arrow.ArrowInvalid:
            opened = arrow.ipc.open_file(mapped)
            _check_columns(file, columns, opened.schema.names)
            yield from (opened.get_batch(i) for i in range(opened.num_record_batches))
            return
        _check_columns(file, columns, batches.schema.names)
        yield from batches


def _check_columns(file: Path, columns: tuple[str, ...] | None, names: list[str]) -> None:
    if twice := next((field for field in columns or () if names.count(field) > 1), None):
        raise MeshwrightError(f"'{file}' has more than one column '{twice}'; leave one of them")
    for field in set(columns or ()) - set(names):
        raise MeshwrightError(
            f"'{file}' has no column '{field}'{did_you_mean(field, names)} Use --field"
        )


def _pyarrow(module: str, what: str = "Parquet and Arrow files") -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MeshwrightError(
            f"{what} need pyarrow, which is not installed: "
            f"{not_installed('parquet')} (or pip install pyarrow)"
        ) from None


def _saved_dataset(folder: Path) -> list[Path]:
    state = _json_file(folder / "state.json")
    try:
        files = [folder / entry["filename"] for entry in state["_data_files"]]
    except (KeyError, TypeError):
        raise MeshwrightError(
            f"'{folder / 'state.json'}' does not list data files: not a saved Hugging Face dataset"
        ) from None
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise MeshwrightError(
            f"dataset '{folder}' lacks {count(len(missing), 'file')} of {len(files)}: "
            f"{', '.join(missing[:4])}; copy it here again"
        )
    return files


def _json_file(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as reason:
        raise MeshwrightError(f"'{file}' cannot be read: {reason}") from None
    return value if isinstance(value, dict) else {}
