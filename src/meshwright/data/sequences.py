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

Examples are not cut: a sequence holds as many as fit, and ends with padding.

>>> examples = TokenStore.of_examples(
...     [([97, 98, 99], [0, 1, 1]), ([100, 101], [0, 1]), ([102, 103], [0, 1])],
...     ByteTokenizer(), name="three",
... )
>>> batch = read_sequences(examples, [0], seq=6)
>>> for name in FIELDS: print(f"{name:9}", *batch[name][0])
tokens    97 98 99 100 101 0
targets   98 99 -1 101 -1 -1
segments  1 1 1 2 2 0
positions 0 1 2 0 1 0
"""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from meshwright.data.store import WEIGHT_DTYPE, TokenStore

FIELDS = ("tokens", "targets", "segments", "positions")
WEIGHTS = "weights"  # the field that batches have if tokens have weights other than 0 and 1
NO_TARGET = -1

Batch = dict[str, npt.NDArray[Any]]


class SequenceTable(NamedTuple):
    """Sequences of whole documents: the tokens from `starts` to `stops` of each."""

    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]
    cut: int  # documents longer than a sequence, of which only the first tokens are read


def sequence_table(store: TokenStore, seq: int, packed: bool = True) -> SequenceTable | None:
    """The sequences of a store whose documents are read whole; None if they may be cut.

    Examples are read whole, and with `packed=False` every document has a sequence of its own.
    Neighbours share a sequence as long as they fit.
    """
    if store.weights is None and packed:
        return None
    return _whole_documents(store, seq, packed)


@functools.lru_cache(maxsize=64)
def _whole_documents(store: TokenStore, seq: int, packed: bool) -> SequenceTable:
    offsets = np.asarray(store.offsets[:], np.int64)
    lengths = np.minimum(np.diff(offsets), seq)
    cut = int((np.diff(offsets) > seq).sum())
    if not packed:
        return SequenceTable(offsets[:-1], offsets[:-1] + lengths, cut)
    ends = np.cumsum(lengths)
    first, firsts = 0, []
    while first < len(lengths):
        firsts.append(first)
        begin = ends[first] - lengths[first]
        first = int(np.searchsorted(ends, begin + seq, side="right"))
    starts = offsets[firsts]
    # a document that is cut fills a sequence alone
    stops = np.minimum(np.append(starts[1:], offsets[-1]), starts + seq)
    return SequenceTable(starts, stops, cut)


def sequence_count(store: TokenStore, seq: int, packed: bool = True) -> int:
    """Number of sequences.

    Of texts, sequence i starts at token i·seq, and the last may be padded.
    """
    table = sequence_table(store, seq, packed)
    return max(1, -(-(len(store.tokens) - 1) // seq)) if table is None else len(table.starts)


def empty_sequences(sequences: int, length: int, weighted: bool = False) -> Batch:
    """Sequences of padding only: segment id 0, no targets."""
    batch: Batch = {name: np.zeros((sequences, length), np.int32) for name in FIELDS}
    batch["targets"] -= 1
    if weighted:
        batch[WEIGHTS] = np.zeros((sequences, length), WEIGHT_DTYPE)
    return batch


def read_sequences(
    store: TokenStore,
    sequences: Iterable[int],
    seq: int,
    start: int = 0,
    stop: int | None = None,
    *,
    packed: bool = True,
) -> Batch:
    """Sequences of the store by index, positions `start` to `stop`: [sequences, stop - start].

    `targets` is the next token, -1 where the loss ignores it: at the end of a document, in padding
    and for tokens of weight 0. `segments` numbers the documents within a sequence from 1; 0 is
    padding. `positions` restarts at 0 with each document and each sequence. A sequence past the end
    is all padding. `weights`, if the store has others than 0 and 1, are those of the targets.
    """
    sequences = list(sequences)
    stop = seq if stop is None else stop
    batch = empty_sequences(len(sequences), stop - start, store.is_weighted)
    table = sequence_table(store, seq, packed)
    for i, sequence in enumerate(sequences):
        if table is None:
            bounds = sequence * seq, len(store.tokens)
        elif sequence < len(table.starts):
            bounds = int(table.starts[sequence]), int(table.stops[sequence])
        else:
            continue
        _read_sequence(store, *bounds, start, stop, {name: batch[name][i] for name in batch})
    return batch


def _read_sequence(
    store: TokenStore, origin: int, total: int, start: int, stop: int, into: Batch
) -> None:
    """Fill in a sequence that starts at token `origin`; it has no tokens from `total` on."""
    first = min(origin + start, total)
    last = min(origin + stop, total)
    if first == last:
        return
    tokens, targets, segments, positions = (into[name][: last - first] for name in FIELDS)
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
    if store.weights is not None:
        weights = store.weights[first + 1 : first + len(stream)]
        targets[: len(weights)][weights == 0] = NO_TARGET
        if WEIGHTS in into:
            into[WEIGHTS][: len(weights)] = np.where(targets[: len(weights)] < 0, 0, weights)
