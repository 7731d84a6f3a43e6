"""Write safetensors one tensor at a time: the header says where each will lie, then they follow."""

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.models.safetensors_dtypes import DTYPES
from meshwright.models.safetensors_read import INDEX, SINGLE

_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class PlannedTensor:
    """A tensor before it is written."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def plan_files(
    tensors: Sequence[PlannedTensor], max_file_bytes: int, single: str = SINGLE
) -> dict[str, list[PlannedTensor]]:
    """Which tensors go in which file, in order; a tensor larger than a file has one for itself.

    `single` is the name of the file if there is one.
    """
    parts: list[list[PlannedTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if parts[-1] and filled + tensor.nbytes > max_file_bytes:
            parts.append([])
            filled = 0
        parts[-1].append(tensor)
        filled += tensor.nbytes
    if len(parts) == 1:
        return {single: parts[0]}
    return {
        f"model-{i:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts, 1)
    }


def write_index(folder: Path, files: dict[str, list[PlannedTensor]]) -> None:
    """The file that says which tensor is where; one file alone needs none."""
    if len(files) == 1:
        return
    total = sum(tensor.nbytes for part in files.values() for tensor in part)
    weight_map = {tensor.name: file for file, part in files.items() for tensor in part}
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_safetensors(
    file: Path, tensors: Sequence[PlannedTensor], values: Iterable[np.ndarray]
) -> None:
    """A file of these tensors; `values` gives them one after the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor, value in zip(tensors, values, strict=True):
            if (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
                raise ValueError(f"{tensor} was planned, {value.dtype} {value.shape} came")
            # as bytes: NumPy has no buffer of bfloat16
            stream.write(np.ascontiguousarray(value).view(np.uint8).data)
        stream.flush()
        os.fsync(stream.fileno())


def write_json(file: Path, content: Any) -> None:
    """JSON as Hugging Face writes it, on disk when this returns."""
    with file.open("w", encoding="utf-8") as stream:
        stream.write(json.dumps(content, indent=2) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
