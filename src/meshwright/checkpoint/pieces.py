"""Arrays as pieces in safetensors files: the form of a checkpoint that JAX and PyTorch both read.

    step-00000100/
      checkpoint.json             names, shapes, dtypes and fingerprints of whole arrays
      pieces.json                 where each piece of each array lies
      arrays-00000.safetensors    the pieces that rank 0 wrote

Weights have the names and dims of the Hugging Face model, `params/model.norm.weight`; the moments
of AdamW are `optimizer/exp_avg/…` and `optimizer/exp_avg_sq/…`. An array is the union of its
pieces, whatever mesh wrote them.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.checkpoint.folder import flush
from meshwright.errors import MeshwrightError

PIECES = "pieces.json"
Slices = tuple[slice, ...]
RANGE = 2**32


@dataclasses.dataclass(frozen=True)
class Piece:
    """A block of an array: where it begins in the array, and where it lies."""

    file: str
    key: str
    start: tuple[int, ...]
    shape: tuple[int, ...]


def write_pieces(folder: Path, pieces: Mapping[str, Sequence[Piece]]) -> None:
    """Write where all pieces are, by the name of their array."""
    content = {name: [dataclasses.astuple(piece) for piece in own] for name, own in pieces.items()}
    (folder / PIECES).write_text(json.dumps(content) + "\n", encoding="utf-8")
    flush(folder / PIECES)


def read_pieces(folder: Path) -> dict[str, list[Piece]]:
    """The pieces of every array."""
    try:
        content = json.loads((folder / PIECES).read_text(encoding="utf-8"))
        return {
            name: [
                Piece(file, key, tuple(start), tuple(shape)) for file, key, start, shape in pieces
            ]
            for name, pieces in content.items()
        }
    except FileNotFoundError:
        raise MeshwrightError(
            f"{folder} has no {PIECES}: it is a checkpoint of Orbax, which only JAX reads; restore "
            "it there and save it with meshwright.training.save_pieces, or its weights alone with "
            "mw.save_hf"
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise MeshwrightError(f"{folder / PIECES} cannot be read: {error}") from None


def overlap(piece: Piece, wanted: Slices) -> tuple[Slices, Slices] | None:
    """The common part of a piece and a block of the array: inside the piece, inside the block.

    >>> overlap(Piece("", "", (4,), (4,)), (slice(6, 12),))
    ((slice(2, 4, None),), (slice(0, 2, None),))
    """
    inside, target = [], []
    for start, size, want in zip(piece.start, piece.shape, wanted, strict=True):
        first, last = max(start, want.start), min(start + size, want.stop)
        if first >= last:
            return None
        inside.append(slice(first - start, last - start))
        target.append(slice(first - want.start, last - want.start))
    return tuple(inside), tuple(target)


# A fingerprint without jax: the sums of fingerprint.py, over the bits of a piece.

# multiply–shift rounds with good avalanche: (shift, factor, shift, factor, shift)
POSITION = (16, 0x21F0AAAD, 15, 0xD35A2D97, 15)
FIRST = (16, 0x85EBCA6B, 13, 0xC2B2AE35, 16)
SECOND = (16, 0x7FEB352D, 15, 0x846CA68B, 16)


def sums_of_bits(bits: np.ndarray, starts: Sequence[int], shape: Sequence[int]) -> tuple[int, int]:
    """The two sums of a piece that begins at `starts` of an array of `shape`.

    `bits`: the elements as unsigned integers. The sums of all pieces, modulo 2**32, are the
    fingerprint of the array; fingerprint.py computes the same on devices.
    """
    if not shape:
        bits, starts, shape = bits.reshape(1), (0,), (1,)
    key = np.full(bits.shape, 0x6A09E667, np.uint32)
    for run in runs(shape):
        index = np.zeros(bits.shape, np.uint32)
        for dim in run:
            stride = np.uint32(math.prod(shape[d] for d in run if d > dim) % RANGE)
            line = np.arange(bits.shape[dim], dtype=np.uint32) + np.uint32(starts[dim])
            index += (line * stride).reshape([-1 if d == dim else 1 for d in range(bits.ndim)])
        key = mix(key + index, POSITION)
    first = second = 0
    for number, word in enumerate(_words(bits)):
        salt = np.uint32(0x9E3779B9 * (2 * number + 1) % RANGE)
        first += int(mix(word ^ (key + salt), FIRST).sum(dtype=np.uint64))
        key_b = key * np.uint32(0xB5297A4D) + salt
        second += int(mix(word ^ key_b, SECOND).sum(dtype=np.uint64))
    return first % RANGE, second % RANGE


def fingerprint_of(sums: Iterable[tuple[int, int]]) -> str:
    """The fingerprint of an array, from the sums of its pieces: 16 hex digits.

    >>> fingerprint_of([(1, 2**32 - 1), (2, 3)])
    '0000000300000002'
    """
    totals = (sum(column) % RANGE for column in zip(*sums, strict=True))
    return "".join(f"{total:08x}" for total in totals)


def bits_of(value: np.ndarray) -> np.ndarray:
    """The elements of an array as unsigned integers."""
    return np.ascontiguousarray(value).view(f"u{value.dtype.itemsize}")


def holds_pieces(folder: Path) -> bool:
    """Whether a complete checkpoint has the format of pieces."""
    return (folder / PIECES).is_file()


def runs(shape: Sequence[int]) -> list[list[int]]:
    """Neighbouring dims in runs of at most 2**32 elements, the first dims first."""
    found: list[list[int]] = []
    size = RANGE + 1
    for dim in reversed(range(len(shape))):
        size *= max(shape[dim], 1)
        if size > RANGE:
            found.insert(0, [])
            size = shape[dim]
        found[0].insert(0, dim)
    return found


def _words(bits: np.ndarray) -> list[np.ndarray]:
    if bits.dtype.itemsize < 8:
        return [bits.astype(np.uint32)]
    low = (bits & np.uint64(RANGE - 1)).astype(np.uint32)
    return [low, (bits >> np.uint64(32)).astype(np.uint32)]


def mix(x: Any, rounds: tuple[int, int, int, int, int]) -> Any:
    """A bijection of 32 bits in which each input bit affects half of the output bits."""
    a, first, b, second, c = (np.uint32(number) for number in rounds)
    x = (x ^ (x >> a)) * first
    x = (x ^ (x >> b)) * second
    return x ^ (x >> c)
