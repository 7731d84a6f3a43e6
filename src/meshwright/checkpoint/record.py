"""checkpoint.json: the arrays of a checkpoint with their fingerprints, and the caller's data.

It contains a checksum of itself, and the sizes of the other files (with a checksum of small ones).
The arrays are protected by their fingerprints.
"""

import dataclasses
import hashlib
import json
import math
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from meshwright.checkpoint.folder import RECORD, flush
from meshwright.errors import MeshwrightError

_SHOWN = 6  # names in a message

_FORMAT = 1
_SMALL = 1 << 20  # bytes


@dataclasses.dataclass(frozen=True)
class SavedArray:
    """One array of a checkpoint. A random key is saved as its data, and `key` names its type."""

    shape: tuple[int, ...]
    dtype: str
    fingerprint: str
    key: str | None = None

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}"


@dataclasses.dataclass(frozen=True)
class Record:
    """The content of checkpoint.json."""

    step: int
    arrays: dict[str, SavedArray]
    meta: dict[str, Any]
    files: dict[str, tuple[int, int | None]]  # size, and CRC-32 where small

    @property
    def user_meta(self) -> dict[str, Any]:
        """What the caller of `save` gave; a checkpoint of pieces has its own beside it."""
        own = self.meta.get("user")
        return dict(own) if isinstance(own, dict) else self.meta


def write_record(folder: Path, record: Record) -> None:
    content = {
        "format": _FORMAT,
        **_written_with(),
        "step": record.step,
        "meta": record.meta,
        "arrays": {name: dataclasses.asdict(array) for name, array in record.arrays.items()},
        "files": record.files,
    }
    for name, (_, checksum) in record.files.items():
        if checksum is not None:
            flush(folder / name)  # TensorStore flushes the data files, Orbax not its small ones
    text = json.dumps({"checksum": _checksum(content), **content}, indent=1, allow_nan=False)
    (folder / RECORD).write_text(text + "\n", encoding="utf-8")
    flush(folder / RECORD)


def _written_with() -> dict[str, str]:
    """The version of jax, or of torch, whichever runs."""
    name = "jax" if "jax" in sys.modules else "torch"
    return {name: str(getattr(sys.modules.get(name), "__version__", ""))}


def read_record(folder: Path) -> Record:
    """The record of a checkpoint; a MeshwrightError if it is missing or damaged."""
    path = folder / RECORD
    try:
        content = json.loads(path.read_bytes().decode("utf-8"))
        checksum = content.pop("checksum")
        if checksum != _checksum(content):
            raise ValueError("its content does not match its checksum")
    except FileNotFoundError:
        raise MeshwrightError(f"{path} is missing") from None
    except OSError as error:
        raise MeshwrightError(f"{path} cannot be read: {error}") from None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        why = error if "checksum" in str(error) else "it is not complete JSON"
        raise MeshwrightError(
            f"{path} is damaged: {why}; it was truncated or altered after it was saved"
        ) from None
    if content["format"] != _FORMAT:
        raise MeshwrightError(
            f"{path} has format {content['format']}; this version reads format {_FORMAT}"
        )
    return Record(
        step=content["step"],
        arrays={
            name: SavedArray(**{**array, "shape": tuple(array["shape"])})
            for name, array in content["arrays"].items()
        },
        meta=content["meta"],
        files={name: (size, checksum) for name, (size, checksum) in content["files"].items()},
    )


def _checksum(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def list_files(folder: Path) -> dict[str, tuple[int, int | None]]:
    """All other files in `folder`: size, and a checksum of small files without array data."""
    return {
        str(path.relative_to(folder)): (path.stat().st_size, _small_checksum(path))
        for path in sorted(_files(folder))
        if path != folder / RECORD
    }


def altered(folder: Path, names: Sequence[str]) -> str:
    """What is wrong with a checkpoint whose arrays have other fingerprints than when saved."""
    shown = ", ".join(map(repr, names[:_SHOWN]))
    listed = f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
    return (
        f"checkpoint {folder} is damaged: the values of {listed} differ from those saved; data was "
        "lost or altered on disk"
    )


def check_files(folder: Path, files: dict[str, tuple[int, int | None]]) -> None:
    """Raise a MeshwrightError for the first file that is missing or differs."""
    for name, (size, checksum) in files.items():
        path = folder / name
        try:
            found = path.stat().st_size
            wrong = ""
            if found != size:
                wrong = f"has {found:,} bytes instead of {size:,}"
            elif checksum is not None and zlib.crc32(path.read_bytes()) != checksum:
                wrong = "does not match its checksum"
        except FileNotFoundError:
            wrong = "is missing"
        except OSError as error:
            wrong = f"cannot be read ({error})"
        if wrong:
            raise MeshwrightError(f"checkpoint {folder} is damaged: the file {name} {wrong}")


def _files(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        yield from (Path(parent, name) for name in names)


def _small_checksum(path: Path) -> int | None:
    # Orbax keeps array data in folders named d; these are read, and checked, with the arrays
    if path.parent.name == "d" or path.stat().st_size > _SMALL:
        return None
    return zlib.crc32(path.read_bytes())


def as_json(value: Any, where: str = "meta") -> Any:
    """`value` after a JSON round trip (tuples become lists); an error names unsupported values."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        raise MeshwrightError(f"{where} is {value}, which JSON does not support; write it as text")
    if isinstance(value, list | tuple):
        return [as_json(item, f"{where}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise MeshwrightError(f"{where} has the key {key!r}; JSON keys are text")
        return {key: as_json(item, f"{where}[{key!r}]") for key, item in value.items()}
    raise MeshwrightError(
        f"{where} is a {type(value).__name__}; meta holds text, numbers, lists and dicts "
        "(arrays belong into the tree)"
    )
