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

Examples are not cut: a sequence holds as many as fit, and ends with padding. The chosen and the
rejected answer of a pair are documents 2i - 1 and 2i of their sequence.

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

import bisect
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.data.store import WEIGHT_DTYPE, TokenStore

FIELDS = ("tokens", "targets", "segments", "positions")
WEIGHTS = "weights"  # the field that batches have if tokens have weights other than 0 and 1
NO_TARGET = -1

OPEN = 256  # sequences that still take documents

Batch = dict[str, npt.NDArray[Any]]
Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class SequenceTable:
    """Sequences of whole documents: sequence i holds documents[firsts[i] : firsts[i + 1]]."""

    documents: Offsets
    firsts: Offsets
    starts: Offsets  # of each document: its first token in the store
    lengths: Offsets  # of each document: how many of its tokens are read
    cut: int  # documents, or pairs, longer than a sequence, of which not all tokens are read

    def __len__(self) -> int:
        return len(self.firsts) - 1

    def documents_of(self, sequence: int) -> Offsets:
        return self.documents[self.firsts[sequence] : self.firsts[sequence + 1]]


def sequence_table(store: TokenStore, seq: int, packed: bool = True) -> SequenceTable | None:
    """The sequences of a store whose documents are read whole; None if they may be cut.

    Examples are read whole, and with `packed=False` every document, or pair, has a sequence of its
    own.
    """
    if store.weights is None and packed:
        return None
    return _whole_documents(store, seq, packed)


@functools.lru_cache(maxsize=64)
def _whole_documents(store: TokenStore, seq: int, packed: bool) -> SequenceTable:
    offsets = np.asarray(store.offsets[:], np.int64)
    full = np.diff(offsets)
    lengths = _fitting_pairs(full, seq) if store.holds_pairs else np.minimum(full, seq)
    together = 2 if store.holds_pairs else 1
    units = lengths.reshape(-1, together).sum(axis=1)
    sequence_of = best_fit(units.tolist(), seq) if packed else np.arange(len(units))
    sequence_of = np.repeat(sequence_of, together)
    documents = np.argsort(sequence_of, kind="stable")
    firsts = np.concatenate([[0], np.cumsum(np.bincount(sequence_of))])
    cut = int((full.reshape(-1, together).sum(axis=1) > seq).sum())
    return SequenceTable(documents, firsts, offsets[:-1], lengths, cut)


def _fitting_pairs(lengths: Offsets, seq: int) -> Offsets:
    """How many tokens are read of both documents of each pair: the longer loses its end first.

    >>> _fitting_pairs(np.array([3, 2, 7, 3, 6, 6, 2, 9]), seq=8).tolist()
    [3, 2, 5, 3, 4, 4, 2, 6]
    """
    chosen, rejected = lengths[0::2], lengths[1::2]
    chosen = np.minimum(chosen, np.maximum(seq - rejected, seq // 2))
    return np.stack([chosen, np.minimum(rejected, seq - chosen)], axis=1).ravel()


def best_fit(lengths: Sequence[int], seq: int) -> Offsets:
    """The sequence of each document, in order: the fullest that still has room for it.

    Only the last OPEN sequences that are not full take documents, so that neighbours stay close.

    >>> best_fit([5, 3, 4, 2, 3, 1], seq=8).tolist()
    [0, 0, 1, 1, 2, 1]
    """
    room: list[tuple[int, int]] = []  # (tokens left, sequence), the fullest first
    sequences, chosen = 0, np.empty(len(lengths), np.int64)
    for number, length in enumerate(lengths):
        at = bisect.bisect_left(room, (length, -1))
        if at < len(room):
            left, sequence = room.pop(at)
        else:
            left, sequence = seq, sequences
            sequences += 1
        chosen[number] = sequence
        if left > length:
            bisect.insort(room, (left - length, sequence))
            if len(room) > OPEN:
                room.pop(0)
    return chosen


def sequence_count(store: TokenStore, seq: int, packed: bool = True) -> int:
    """Number of sequences.

    Of texts, sequence i starts at token i·seq, and the last may be padded.
    """
    table = sequence_table(store, seq, packed)
    return max(1, -(-(len(store.tokens) - 1) // seq)) if table is None else len(table)


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
        into = {name: batch[name][i] for name in batch}
        if table is None:
            _read_texts(store, sequence * seq, start, stop, into)
        elif sequence < len(table):
            _read_documents(store, table, sequence, start, stop, into)
    return batch


def _read_documents(
    store: TokenStore, table: SequenceTable, sequence: int, start: int, stop: int, into: Batch
) -> None:
    """Fill in a sequence of whole documents, one after the other."""
    begin = 0  # of the document in the sequence
    for segment, document in enumerate(table.documents_of(sequence).tolist(), start=1):
        length, origin = int(table.lengths[document]), int(table.starts[document])
        first, last = max(begin, start), min(begin + length, stop)
        if first < last:
            here = slice(first - start, last - start)
            # one token more, the target of the last
            read = slice(origin + first - begin, origin + min(last - begin + 1, length))
            stream = store.tokens[read]
            into["tokens"][here] = stream[: last - first]
            into["segments"][here] = segment
            into["positions"][here] = np.arange(first, last) - begin
            targets = into["targets"][here][: len(stream) - 1]
            targets[:] = stream[1:]
            if store.weights is not None:
                weights = store.weights[read][1:]
                targets[weights == 0] = NO_TARGET
                if WEIGHTS in into:
                    into[WEIGHTS][here][: len(weights)] = weights
        begin += length


def _read_texts(store: TokenStore, origin: int, start: int, stop: int, into: Batch) -> None:
    """Fill in a sequence that starts at token `origin`, whatever document that is in."""
    total = len(store.tokens)
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
