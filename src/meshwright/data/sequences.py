"""Sequences of `seq` tokens cut from the token store, with segment ids for packed documents.

>>> from meshwright.data.store import TokenStore
>>> from meshwright.data.tokenizers import ByteTokenizer
>>> store = TokenStore.of_documents(["abc", "de"], ByteTokenizer(), name="two")
>>> batch = read_sequences(store, [0], seq=6)
>>> for name in FIELDS: print(f"{name:9}", *batch[name][0])
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
    """Number of sequences: sequence i starts at token i·seq, and the last may be padded."""
    return max(1, -(-(len(store.tokens) - 1) // seq))


def empty_sequences(sequences: int, length: int) -> Batch:
    """Sequences of padding only: segment id 0, no targets."""
    batch = {name: np.zeros((sequences, length), np.int32) for name in FIELDS}
    batch["targets"] -= 1
    return batch


def read_sequences(
    store: TokenStore, sequences: Iterable[int], seq: int, start: int = 0, stop: int | None = None
) -> Batch:
    """Sequences of the store by index, positions `start` to `stop`: [sequences, stop - start].

    `targets` is the next token, -1 where the loss ignores it: at the end of a document and in
    padding. `segments` numbers the documents within a sequence from 1; 0 is padding. `positions`
    restarts at 0 with each document and each sequence. A sequence past the end is all padding.
    """
    sequences = list(sequences)
    stop = seq if stop is None else stop
    batch = empty_sequences(len(sequences), stop - start)
    for i, sequence in enumerate(sequences):
        _read_sequence(store, sequence * seq, start, stop, [batch[name][i] for name in FIELDS])
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
    # one token more, the target of the last
    stream = store.tokens[first : min(last + 1, total)]
    tokens[:] = stream[: last - first]
    targets[: len(stream) - 1] = stream[1:]

    # documents of the sequence up to `last`; those that overlap [first, last) are begin to end
    offsets = store.offsets_between(origin, last)
    begin = int(np.searchsorted(offsets, first, side="right")) - 1
    end = len(offsets) - 1  # offsets[end] >= last
    starts = offsets[begin:end]  # starts[0] <= first
    lengths = np.diff(np.append(np.maximum(starts, first), last))
    segments[:] = np.repeat(np.arange(begin, end) + 1, lengths)
    positions[:] = np.arange(first, last) - np.repeat(np.maximum(starts, origin), lengths)
    # the token before a document start ends the previous document
    ends = starts[1:] - first - 1
    targets[ends] = NO_TARGET
    if last < total and offsets[end] == last:
        targets[last - first - 1] = NO_TARGET
