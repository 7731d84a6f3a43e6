"""Read safetensors by byte ranges: a header, and tensors mapped from the file.

A file is 8 bytes (the length of the header), the header (JSON: dtype, shape and byte range of each
tensor) and the bytes of the tensors. A slice of a mapped tensor reads the bytes of that slice only.
"""

import dataclasses
import json
import math
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.present import count

_BYTES = {"BF16": 2, "F16": 2, "F32": 4}  # of a number; PyTorch reads headers without ml_dtypes
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_LONGEST_HEADER = 100_000_000  # as in the safetensors library


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in a file."""

    name: str
    file: Path
    dtype: str  # as the file says it: BF16
    shape: tuple[int, ...]
    start: int  # bytes from the start of the file
    stop: int


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one file; what is not whole is an error."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _LONGEST_HEADER):
                raise MeshwrightError(
                    f"{file} is not a safetensors file, or is truncated: it has {size:,} bytes and "
                    f"says its header has {length:,}; get it again"
                )
            header = json.loads(stream.read(length).decode("utf-8"))
    except FileNotFoundError:
        raise MeshwrightError(f"{file} is not there") from None
    except OSError as error:
        raise MeshwrightError(f"{file} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, MeshwrightError):
            raise
        raise MeshwrightError(f"{file} has a header that is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise MeshwrightError(f"{file} has a header that is not a JSON object")
    header.pop("__metadata__", None)
    tensors = {name: _entry(file, name, entry, 8 + length) for name, entry in header.items()}
    end = max((tensor.stop for tensor in tensors.values()), default=8 + length)
    if end != size:
        last = max(tensors.values(), key=lambda tensor: tensor.stop, default=None)
        what = "truncated" if end > size else "longer than its header says"
        name = "" if last is None else f" (tensor {last.name!r})"
        raise MeshwrightError(
            f"{file} is {what}: its header says it ends at byte {end:,}{name}, it has {size:,} "
            "bytes; get it again"
        )
    return tensors


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a model: of the one file, which transformers reads first, or of the index's.

    Both may be there, where a model was saved again in the same folder.
    """
    if not folder.is_dir():
        raise MeshwrightError(f"{folder} is not a folder with a Hugging Face model")
    if (folder / SINGLE).exists():
        return read_header(folder / SINGLE)
    if (folder / INDEX).exists():
        return _read_indexed(folder)
    there = sorted(path.name for path in folder.iterdir())
    older = [name for name in there if name.endswith((".bin", ".pt", ".pth"))]
    what = f"it has {', '.join(there[:8]) or 'nothing'}"
    if older:
        what += ": pickled weights are not read, save the model as safetensors first"
    raise MeshwrightError(f"{folder} has neither {SINGLE} nor {INDEX}; {what}")


def tensor_dtype(tensor: StoredTensor) -> np.dtype[Any]:
    """The NumPy dtype of a tensor."""
    from meshwright.models.safetensors_dtypes import DTYPES

    if tensor.dtype not in DTYPES:
        raise MeshwrightError(
            f"tensor {tensor.name!r} in {tensor.file} is {tensor.dtype}; only "
            f"{', '.join(DTYPES)} are read"
        )
    return DTYPES[tensor.dtype]


class MappedFiles:
    """Tensors as NumPy arrays over mapped files; nothing is read until a slice is copied."""

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self.tensors = tensors
        self._maps: dict[Path, mmap.mmap] = {}

    def array(self, name: str) -> np.ndarray:
        tensor = self.tensors[name]
        if tensor.file not in self._maps:
            with tensor.file.open("rb") as stream:
                self._maps[tensor.file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        dtype = np.dtype(np.uint8) if tensor.dtype == "U8" else tensor_dtype(tensor)
        if math.prod(tensor.shape) == 0:
            return np.empty(tensor.shape, dtype)
        mapped = self._maps[tensor.file]
        return np.ndarray(tensor.shape, dtype, buffer=mapped, offset=tensor.start)

    def release(self) -> None:
        """Give back the memory of pages read so far; reading them again works."""
        for mapped in self._maps.values():
            if hasattr(mmap, "MADV_DONTNEED"):
                mapped.madvise(mmap.MADV_DONTNEED)


def _entry(file: Path, name: str, entry: Any, data: int) -> StoredTensor:
    try:
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        first, last = entry["data_offsets"]
        numbers = (*shape, first, last)
        if not isinstance(dtype, str) or not all(type(value) is int for value in numbers):
            raise TypeError
    except (TypeError, KeyError, ValueError):
        text = json.dumps(entry)[:80]
        raise MeshwrightError(f"{file} has a broken header: tensor {name!r} is {text}") from None
    if min(numbers) < 0 or first > last:
        raise MeshwrightError(
            f"{file} has a broken header: tensor {name!r} has shape {shape} and lies at bytes "
            f"{first} to {last}"
        )
    needed = math.prod(shape) * _BYTES[dtype] if dtype in _BYTES else last - first
    if needed != last - first:
        raise MeshwrightError(
            f"{file} has a broken header: tensor {name!r} of {dtype} {shape} needs {needed:,} "
            f"bytes, and {last - first:,} are given to it"
        )
    return StoredTensor(name, file, dtype, shape, data + first, data + last)


def _read_indexed(folder: Path) -> dict[str, StoredTensor]:
    index = folder / INDEX
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = {str(name): str(file) for name, file in weight_map.items()}
    except OSError as error:
        raise MeshwrightError(f"{index} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise MeshwrightError(
            f"{index} is not JSON with a weight_map from tensor to file"
        ) from None
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(names.values())):
        if os.path.basename(file) != file or file in ("", ".", ".."):
            raise MeshwrightError(f"{index} names file {file!r}; files must lie beside it")
        if not (folder / file).exists():
            held = sum(other == file for other in names.values())
            raise MeshwrightError(
                f"{folder / file} is not there; {INDEX} says it holds {count(held, 'tensor')}"
            )
        for name, tensor in read_header(folder / file).items():
            if name in tensors:
                raise MeshwrightError(
                    f"tensor {name!r} is in {tensors[name].file} and in {tensor.file}; only one of "
                    "them can be meant"
                )
            tensors[name] = tensor
    for name, file in names.items():
        if name not in tensors or tensors[name].file.name != file:
            raise MeshwrightError(f"tensor {name!r} is not in {folder / file}, where {INDEX} says")
    return tensors
