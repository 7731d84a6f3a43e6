"""Weights in MXFP4, as gpt-oss is published: 4 bits a number, and a scale of each 32.

A tensor `name` [experts, inputs, outputs] is two in the files: `name_blocks` [experts, outputs,
groups, 16], bytes of two numbers, the first in the lower half, and `name_scales` [experts, outputs,
groups]. It is converted one expert at a time, while it is read.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.models.safetensors_read import StoredTensor

_BLOCKS, _SCALES = "_blocks", "_scales"
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = np.array([*_POSITIVE, *(-one for one in _POSITIVE)], np.float32)
# [256, 2]: both numbers of a byte
_PAIRS = np.stack([_NUMBERS[np.arange(256) & 15], _NUMBERS[np.arange(256) >> 4]], axis=1)
_BIAS = 127  # of the exponent that a scale is


class TensorSource(Protocol):
    """Tensors of a Hugging Face model by name, in files or in pieces of files."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...
    def array(self, name: str) -> "np.ndarray | PackedTensor": ...
    def release(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class PackedTensor:
    """A tensor [experts, inputs, outputs] that is converted when an expert is read."""

    blocks: np.ndarray
    scales: np.ndarray

    def expert(self, number: int) -> np.ndarray:
        """[inputs, outputs] in float32, which holds every number of MXFP4 exactly."""
        pairs = _PAIRS[self.blocks[number]]  # [outputs, groups, 16, 2]
        scales = np.ldexp(np.float32(1), self.scales[number].astype(np.int32) - _BIAS)
        values = pairs * scales[..., None, None]
        return values.reshape(len(values), -1).T

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes + self.scales.nbytes


class UnpackedFiles:
    """The same tensors, of which packed ones appear under their own name."""

    def __init__(self, files: TensorSource) -> None:
        self._files = files
        packed = {
            name.removesuffix(_BLOCKS)
            for name in files.tensors
            if name.endswith(_BLOCKS) and name.removesuffix(_BLOCKS) + _SCALES in files.tensors
        }
        parts = {name + part for name in packed for part in (_BLOCKS, _SCALES)}
        self._packed = packed
        self.tensors: Mapping[str, StoredTensor] = {
            **{name: tensor for name, tensor in files.tensors.items() if name not in parts},
            **{name: _whole(name, files.tensors) for name in sorted(packed)},
        }

    def array(self, name: str) -> np.ndarray | PackedTensor:
        if name not in self._packed:
            return self._files.array(name)
        blocks, scales = (self._files.array(name + part) for part in (_BLOCKS, _SCALES))
        assert isinstance(blocks, np.ndarray)
        assert isinstance(scales, np.ndarray)
        return PackedTensor(blocks, scales)

    def release(self) -> None:
        self._files.release()


def _whole(name: str, tensors: Mapping[str, StoredTensor]) -> StoredTensor:
    """What a packed tensor is when it is converted."""
    blocks, scales = tensors[name + _BLOCKS], tensors[name + _SCALES]
    shape, bytes_of_group = blocks.shape[:-1], math.prod(blocks.shape[3:])
    if len(shape) != 3 or scales.shape != shape or {blocks.dtype, scales.dtype} != {"U8"}:
        raise MeshwrightError(
            f"tensor {blocks.name!r} in {blocks.file} is {blocks.dtype} {list(blocks.shape)}, its "
            f"scales are {scales.dtype} {list(scales.shape)}; MXFP4 has bytes [experts, outputs, "
            "groups, 16] and a scale of each group"
        )
    experts, outputs, groups = shape
    whole = (experts, groups * bytes_of_group * 2, outputs)
    return dataclasses.replace(blocks, name=name, dtype="BF16", shape=whole)
