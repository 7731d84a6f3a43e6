"""Read documents from files: text, JSON lines, Parquet, Arrow, Hugging Face dataset folders.

Every reader streams. Errors go to the callback `bad`, which raises or counts them.
"""

import gzip
import importlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from meshwright.data.splits import ALL, choose_split
from meshwright.errors import MeshwrightError, did_you_mean, not_installed, one_of
from meshwright.present import count

KINDS = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz", ".parquet", ".arrow")
CHUNK = 1 << 20
LARGEST_DOCUMENT = 1 << 30  # bytes; a document must fit in memory

Bad = Callable[[str], None]


@dataclass(frozen=True)
class Reading:
    """How to find documents: the field of a record, the separator in a text file, the split."""

    field: str = "text"
    split_on: str | None = None
    split: str | None = None  # of a dataset's folder; 'all' for every file


PLAIN = Reading()


def find_files(source: str | Path, split: str | None = None) -> tuple[list[Path], list[Path]]:
    """The files to read of a file or folder, in order; and the files of unsupported kinds.

    `split`: that of a folder's splits; a file is read whatever its name says.
    """
    path = Path(source)
    if not path.exists():
        raise MeshwrightError(f"data '{source}' does not exist")
    if not path.is_dir():
        if kind_of(path) is None:
            raise MeshwrightError(
                f"data '{source}' has an unsupported file type; it can be {one_of(KINDS)}"
            )
        return [path], []
    if (path / "dataset_dict.json").is_file():
        splits = [str(name) for name in _json_file(path / "dataset_dict.json").get("splits") or ()]
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
    files = sorted(
        file
        for file in path.rglob("*")
        if file.is_file()
        and not any(part.startswith(".") for part in file.parts[len(path.parts) :])
    )
    known = [file for file in files if kind_of(file)]
    if not known:
        raise MeshwrightError(
            f"data folder '{source}' holds no file of a supported type ({', '.join(KINDS)})"
        )
    others = [file for file in files if not kind_of(file)]
    return choose_split(path, known, split), others


def kind_of(file: Path) -> str | None:
    """`".jsonl.gz"` of `"part.JSONL.gz"`; None if it is not supported."""
    name = file.name.lower()
    return max((kind for kind in KINDS if name.endswith(kind)), key=len, default=None)


def read_documents(file: Path, reading: Reading, bad: Bad) -> Iterator[str]:
    """The documents of one file."""
    kind = kind_of(file)
    try:
        if kind in (".txt", ".txt.gz"):
            yield from _text(file, reading.split_on, bad)
        elif kind in (".jsonl", ".jsonl.gz"):
            yield from _json_lines(file, reading.field, bad)
        else:
            yield from _columns(file, reading.field, bad)
    except (OSError, EOFError, zlib.error) as reason:
        # also a truncated gzip file; with --skip-bad, what came before is kept
        bad(f"'{file}' cannot be read to its end: {reason}")


def _open(file: Path) -> IO[bytes]:
    return gzip.open(file, "rb") if file.name.lower().endswith(".gz") else file.open("rb")  # type: ignore[return-value]


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


def _json_lines(file: Path, field: str, bad: Bad) -> Iterator[str]:
    with _open(file) as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            where = f"'{file}', line {number}"
            try:
                record = json.loads(line)
            except ValueError as reason:
                bad(f"{where} is not JSON: {reason}")
                continue
            except RecursionError:
                bad(f"{where} is nested too deeply")
                continue
            text = _field(record, field, where, bad)
            if text is not None and b"\\u" in line and not _whole(text):
                bad(f"{where} holds half a character (an unpaired surrogate)")
            elif text is not None:
                yield text


def _whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _field(record: Any, field: str, where: str, bad: Bad) -> str | None:
    if not isinstance(record, dict):
        bad(f"{where} is not an object with a field '{field}'")
    elif field not in record:
        bad(f"{where} has no field '{field}'{did_you_mean(field, map(str, record))} Use --field")
    elif not isinstance(record[field], str):
        bad(f"{where}: field '{field}' is {type(record[field]).__name__}, not text")
    else:
        return str(record[field])
    return None


def _columns(file: Path, field: str, bad: Bad) -> Iterator[str]:
    arrow = _pyarrow("pyarrow")
    row = 0
    try:
        for batch in _record_batches(file, field, arrow):
            for text in batch.column(field).to_pylist():
                row += 1
                if isinstance(text, str):
                    yield text
                else:
                    bad(f"'{file}', row {row}: field '{field}' is {type(text).__name__}, not text")
    except (arrow.ArrowException, UnicodeDecodeError) as reason:
        bad(f"'{file}' cannot be read after row {row}: {reason}")


def _record_batches(file: Path, field: str, arrow: Any) -> Iterable[Any]:
    if kind_of(file) == ".parquet":
        table = _pyarrow("pyarrow.parquet").ParquetFile(file)
        _check_column(file, field, table.schema_arrow.names)
        yield from table.iter_batches(batch_size=1024, columns=[field])
        return
    with arrow.memory_map(str(file)) as mapped:
        try:
            batches: Any = arrow.ipc.open_stream(mapped)
        except arrow.ArrowInvalid:
            opened = arrow.ipc.open_file(mapped)
            _check_column(file, field, opened.schema.names)
            yield from (opened.get_batch(i) for i in range(opened.num_record_batches))
            return
        _check_column(file, field, batches.schema.names)
        yield from batches


def _check_column(file: Path, field: str, names: list[str]) -> None:
    if field not in names:
        raise MeshwrightError(
            f"'{file}' has no column '{field}'{did_you_mean(field, names)} Use --field"
        )


def _pyarrow(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MeshwrightError(
            f"Parquet and Arrow files need pyarrow, which is not installed: "
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
