"""JAX arrays from a checkpoint of pieces under Hugging Face names, as PyTorch writes it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshwright.checkpoint.folder import complete_folder
from meshwright.checkpoint.pieces import (
    Piece,
    bits_of,
    fingerprint_of,
    overlap,
    read_pieces,
    sums_of_bits,
)
from meshwright.checkpoint.record import Record, SavedArray, altered
from meshwright.errors import MeshwrightError
from meshwright.models import (
    TENSOR_DTYPES,
    LoraConfig,
    MappedFiles,
    StoredTensor,
    adapter_files,
    family_of,
    load_tensors,
    read_header,
)

_CODES = {str(dtype): code for code, dtype in TENSOR_DTYPES.items()}


def load_piece_tree(
    folder: Path,
    record: Record,
    config: Any,
    prefix: str,
    targets: Any,
    dtype: Any = None,
    lora: LoraConfig | None = None,
) -> Any:
    """The arrays `prefix` (params, optimizer/exp_avg) of a model, in the shardings of `targets`.

    `dtype`: of all arrays; by default that of the targets. `lora`: the settings of an adapter,
    which the arrays are of.
    """
    place = complete_folder(folder, record.step)
    source = _PieceTensors(place, read_pieces(place), record.arrays, f"{prefix}/")
    shardings = jax.tree.map(lambda leaf: leaf.sharding, targets)
    dtype = jax.tree.leaves(targets)[0].dtype if dtype is None else dtype
    if lora is not None and lora.rank:
        model = adapter_files(config, lora)
    else:
        model = family_of(config).hugging_face.model(config)
    return load_tensors(source, place, model, shardings, dtype)


class _PieceTensors:
    """The tensors of one tree of a checkpoint, joined from their pieces and verified."""

    def __init__(
        self,
        folder: Path,
        pieces: Mapping[str, list[Piece]],
        arrays: Mapping[str, SavedArray],
        prefix: str,
    ) -> None:
        self._folder, self._pieces, self._arrays, self._prefix = folder, pieces, arrays, prefix
        self._files: dict[str, MappedFiles] = {}
        self.tensors = {
            name.removeprefix(prefix): StoredTensor(
                name.removeprefix(prefix), folder, _CODES.get(one.dtype, one.dtype), one.shape, 0, 0
            )
            for name, one in arrays.items()
            if name.startswith(prefix)
        }

    def array(self, name: str) -> np.ndarray:
        full = self._prefix + name
        saved = self._arrays[full]
        whole = tuple(slice(0, size) for size in saved.shape)
        joined: np.ndarray | None = None
        for piece in self._pieces[full]:
            if piece.file not in self._files:
                self._files[piece.file] = MappedFiles(read_header(self._folder / piece.file))
            part = self._files[piece.file].array(piece.key)
            if joined is None:
                joined = np.empty(saved.shape, part.dtype)
            common = overlap(piece, whole)
            if common is not None:
                joined[common[1]] = part[common[0]]
        assert joined is not None, "a tensor has a piece"
        sums = sums_of_bits(bits_of(joined), (0,) * joined.ndim, joined.shape)
        if fingerprint_of([sums]) != saved.fingerprint:
            raise MeshwrightError(altered(self._folder, [full]))
        return joined

    def release(self) -> None:
        for files in self._files.values():
            files.release()
