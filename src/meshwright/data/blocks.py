"""Files of a token store in blocks; the checksum of a block is verified at every read.

tokens.bin   the data, cut every BLOCK_BYTES
tokens.crc   the CRC-32 of each block, uint32, in the same order
"""

import hashlib
import os
import weakref
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.errors import MeshwrightError

# Any read covers full blocks, so small blocks make short sequences cheaper
# (benchmarks/store_reading.py). Checksums take 0.02% of the store.
BLOCK_BYTES = 1 << 14
CHECKSUM_DTYPE = np.dtype("<u4")


def checksum_name(name: str) -> str:
    """`"tokens.crc"` of `"tokens.bin"`."""
    return str(Path(name).with_suffix(".crc"))


class BlockArray:
    """A one-dimensional array in a file; slices are read and verified block by block.

    Reading copies (`pread`): the verified bytes are the returned bytes, even if the file changes. A
    truncated file or a broken disk raises an error instead of the signal of a memory map.

    Arguments:
        file: the data; the checksum file is in the same folder.
        dtype: of an element, unsigned or, for an increasing array, signed.
        noun: what an element is, for messages: "token id".
        below: every element must be less than this.
        limit: the reason for `below`, for messages: "the vocabulary of 257".
        increasing: every element must be larger than the one before it.
    """

    def __init__(
        self,
        file: Path,
        dtype: np.dtype[Any],
        noun: str,
        below: int,
        limit: str,
        *,
        increasing: bool = False,
    ) -> None:
        self.file, self.dtype = file, dtype
        self._noun, self._below, self._limit = noun, below, limit
        self._increasing = increasing
        self._data = _open(file)
        weakref.finalize(self, os.close, self._data)
        self._checksums = _open(file.with_name(checksum_name(file.name)))
        weakref.finalize(self, os.close, self._checksums)
        self._bytes = os.fstat(self._data).st_size
        self._per_block = BLOCK_BYTES // dtype.itemsize

    def __len__(self) -> int:
        return self._bytes // self.dtype.itemsize

    def __getitem__(self, part: slice) -> npt.NDArray[Any]:
        start, stop, step = part.indices(len(self))
        if step != 1:
            raise IndexError("only contiguous slices can be read")
        if start >= stop:
            return np.empty(0, self.dtype)
        first, last = start // self._per_block, (stop - 1) // self._per_block
        offset = first * BLOCK_BYTES
        data = self._read(self._data, offset, min((last + 1) * BLOCK_BYTES, self._bytes) - offset)
        values = np.frombuffer(data, self.dtype)
        self._verify(data, values, first)
        return values[start - first * self._per_block : stop - first * self._per_block]

    def between(self, start: int, stop: int) -> npt.NDArray[Any]:
        """The elements from the last <= `start` to the first >= `stop`, of an increasing array.

        Needs array[0] <= start < stop <= array[-1].
        """
        low, high = 0, (len(self) - 1) // self._per_block
        while low < high:
            # binary search reads single elements unverified; the block it finds is verified
            middle = (low + high + 1) // 2
            element = self._read(self._data, middle * BLOCK_BYTES, self.dtype.itemsize)
            if int.from_bytes(element, "little") <= start:
                low = middle
            else:
                high = middle - 1
        first, number = low * self._per_block, self._per_block
        elements = self[first : first + number]
        while elements[-1] < stop and first + number < len(self):
            number *= 2
            elements = self[first : first + number]
        if not elements[0] <= start < stop <= elements[-1]:
            self.verify()  # names the damaged block
            raise damaged(self.file, f"{self.file.name} changed while it was read")
        begin = int(np.searchsorted(elements, start, side="right")) - 1
        return elements[begin : int(np.searchsorted(elements, stop)) + 1]

    def verify(self) -> None:
        """Read everything; a MeshwrightError names the first block that differs."""
        for start in range(0, len(self), 64 * self._per_block):
            self[start : start + 64 * self._per_block]

    def _read(self, descriptor: int, offset: int, size: int) -> bytes:
        parts = []
        try:
            while size and (part := os.pread(descriptor, size, offset)):
                parts.append(part)
                offset, size = offset + len(part), size - len(part)
        except OSError as reason:
            raise unreadable(self.file, reason) from None
        if size:
            raise damaged(self.file, f"{self.file.name} was truncated while it was read")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _verify(self, data: bytes, values: npt.NDArray[Any], first: int) -> None:
        blocks = -(-len(data) // BLOCK_BYTES)
        width = CHECKSUM_DTYPE.itemsize
        stored = self._read(self._checksums, first * width, blocks * width)
        view = memoryview(data)
        for block in range(blocks):
            part = view[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
            if zlib.crc32(part) != int.from_bytes(stored[block * width :][:width], "little"):
                raise self._mismatch(first + block, np.frombuffer(part, self.dtype))
        if values.max() >= self._below or values[0] < 0:
            offset, message = self._out_of_range(first, values)
            block = first + offset // self._per_block
            raise damaged(self.file, f"{message} (block {block:,} of {self.file.name})")
        if self._increasing and (values[1:] <= values[:-1]).any():
            index = first * self._per_block + int(np.argmax(values[1:] <= values[:-1])) + 1
            raise damaged(
                self.file,
                f"{self._noun} {index:,} is not larger than the one before it (block "
                f"{index // self._per_block:,} of {self.file.name})",
            )

    def _mismatch(self, block: int, values: npt.NDArray[Any]) -> MeshwrightError:
        offset = block * BLOCK_BYTES
        message = (
            f"block {block:,} of {self.file.name} (bytes {offset:,} to "
            f"{offset + values.nbytes:,}) does not match its checksum"
        )
        if values.max() >= self._below or values[0] < 0:
            message += f"; {self._out_of_range(block, values)[1]}"
        return damaged(self.file, message)

    def _out_of_range(self, block: int, values: npt.NDArray[Any]) -> tuple[int, str]:
        offset = int(np.argmax((values >= self._below) | (values < 0)))
        index = block * self._per_block + offset
        return offset, f"{self._noun} {values[offset]} at offset {index:,} is outside {self._limit}"


class HashedFile:
    """A new file that is hashed while it is written."""

    def __init__(self, file: Path) -> None:
        self._stream = file.open("wb")
        self._hash = hashlib.sha256()
        self._bytes = 0

    def write(self, data: bytes) -> None:
        self._stream.write(data)
        self._hash.update(data)
        self._bytes += len(data)

    def finish(self) -> dict[str, Any]:
        """Flush it to disk; returns its entry in meta.json."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self.close()
        return {"bytes": self._bytes, "sha256": self._hash.hexdigest()}

    def close(self) -> None:
        self._stream.close()


class BlockChecksums:
    """Writes the checksums of a file whose data arrives in pieces of any size."""

    def __init__(self, file: Path) -> None:
        self._file = HashedFile(file)
        self._checksum = self._filled = 0  # of the block that is not full yet

    def update(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            part = rest[: BLOCK_BYTES - self._filled]
            rest = rest[len(part) :]
            self._checksum = zlib.crc32(part, self._checksum)
            self._filled += len(part)
            if self._filled == BLOCK_BYTES:
                self._end_block()

    def finish(self) -> dict[str, Any]:
        if self._filled:
            self._end_block()
        return self._file.finish()

    def close(self) -> None:
        self._file.close()

    def _end_block(self) -> None:
        self._file.write(self._checksum.to_bytes(CHECKSUM_DTYPE.itemsize, "little"))
        self._checksum = self._filled = 0


def damaged(file: Path, what: str) -> MeshwrightError:
    """The error for a store file that differs from what was packed."""
    return MeshwrightError(
        f"token store '{file.parent}' is damaged: {what}. Copy it again, or pack it again "
        "with --overwrite"
    )


def unreadable(file: Path, reason: OSError) -> MeshwrightError:
    """The error for a store file that the system cannot read."""
    return MeshwrightError(
        f"token store '{file.parent}': {file.name} cannot be read: {reason.strerror or reason}"
    )


def _open(file: Path) -> int:
    try:
        return os.open(file, os.O_RDONLY)
    except FileNotFoundError:
        raise damaged(file, f"{file.name} is missing") from None
    except OSError as reason:
        raise unreadable(file, reason) from None
