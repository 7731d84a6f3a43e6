"""The packed stream cut into rows of `seq` tokens, documents told apart inside each row.

>>> from meshwright.data.store import TokenStore
>>> from meshwright.data.tokenizers import ByteTokenizer
>>> store = TokenStore.of_documents(["abc", "de"], ByteTokenizer(), name="two")
>>> row = read_sequences(store, [0], seq=6)
>>> for name in FIELDS: print(f"{name:9}", *row[name][0])
tokens    97 98 99 256 100 101
targets   98 99 256 -1 101 256
segments  1 1 1 1 2 2
positions 0 1 2 3 0 1
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from meshwright.data.store import TokenStore

FIELDS = ("tokens", "targets", "segments", "positions")
NO_TARGET = -1

Batch = dict[str, npt.NDArray[np.int32]]


def sequence_count(store: TokenStore, seq: int) -> int:
    """Rows that predict something: row i holds tokens from i·seq on; the last may be short."""
    return max(1, -(-(len(store.tokens) - 1) // seq))


def empty_sequences(rows: int, length: int) -> Batch:
    """Rows of padding alone: segment 0, nothing to predict."""
    batch = {name: np.zeros((rows, length), np.int32) for name in FIELDS}
    batch["targets"] -= 1
    return batch


def read_sequences(
    store: TokenStore, rows: Iterable[int], seq: int, start: int = 0, stop: int | None = None
) -> Batch:
    """Rows of the store, or of each its part from `start` to `stop`: int32 [rows, stop - start].

    `targets` is the next token, -1 where it does not count: at the end of a document and in
    padding. `segments` counts the documents of the row from 1; 0 is padding. `positions` starts
    at 0 with each document and with the row. A row past the end is padding alone.
    """
    rows = list(rows)
    stop = seq if stop is None else stop
    batch = empty_sequences(len(rows), stop - start)
    for line, row in enumerate(rows):
        _read_sequence(store, row * seq, start, stop, [batch[name][line] for name in FIELDS])
    return batch


def _read_sequence(
    store: TokenStore, origin: int, start: int, stop: int, into: list[npt.NDArray[np.int32]]
) -> None:
    total = len(store.tokens)
    first = min(origin + start, total)
    last = min(origin + stop, total)
    if first == last:
        return
    tokens, targets, segments, positions = (array[: last - first] for array in into)
    # one more than the row, for the target of its last token
    stream = store.tokens[first : min(last + 1, total)]
    tokens[:] = stream[: last - first]
    targets[: len(stream) - 1] = stream[1:]

    # the documents of the row, found once; those of the part are begin to end
    offsets = store.offsets_between(origin, last)
    begin = int(np.searchsorted(offsets, first, side="right")) - 1
    end = len(offsets) - 1  # offsets[end] >= last
    starts = offsets[begin:end]  # starts[0] <= first
    lengths = np.diff(np.append(np.maximum(starts, first), last))
    segments[:] = np.repeat(np.arange(begin, end) + 1, lengths)
    positions[:] = np.arange(first, last) - np.repeat(np.maximum(starts, origin), lengths)
    # the token before a document start ends another document
    ends = starts[1:] - first - 1
    targets[ends] = NO_TARGET
    if last < total and offsets[end] == last:
        targets[last - first - 1] = NO_TARGET
