"""Sequences: every array equals what a walk over the tokens, one by one, gives."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data import (
    FIELDS,
    NO_TARGET,
    ByteTokenizer,
    TokenStore,
    embedded_corpus,
    read_sequences,
    sequence_count,
)

DOCUMENTS = st.lists(st.text("abc", min_size=1, max_size=12), min_size=1, max_size=12)


def walked(documents: list[str], seq: int) -> list[dict[str, list[int]]]:
    """The sequences by definition: one token at a time."""
    stream = [
        (token, number) for number, text in enumerate(documents) for token in [*text.encode(), 256]
    ]
    sequences = []
    for origin in range(0, max(1, len(stream) - 1), seq):
        sequence: dict[str, list[int]] = {name: [] for name in FIELDS}
        segment, position, before = 0, 0, None
        for at in range(origin, origin + seq):
            if at >= len(stream):
                for name, value in zip(FIELDS, (0, NO_TARGET, 0, 0), strict=True):
                    sequence[name].append(value)
                continue
            token, number = stream[at]
            if number != before:
                segment, position, before = segment + 1, 0, number
            same = at + 1 < len(stream) and stream[at + 1][1] == number
            sequence["tokens"].append(token)
            sequence["targets"].append(stream[at + 1][0] if same else NO_TARGET)
            sequence["segments"].append(segment)
            sequence["positions"].append(position)
            position += 1
        sequences.append(sequence)
    return sequences


@given(documents=DOCUMENTS, seq=st.integers(1, 20), data=st.data())
def test_sequences_and_parts_of_sequences_equal_a_walk_over_the_tokens(
    documents: list[str], seq: int, data: st.DataObject
) -> None:
    store = TokenStore.of_documents(documents, ByteTokenizer(), name="x")
    expected = walked(documents, seq)
    assert sequence_count(store, seq) == len(expected)
    start = data.draw(st.integers(0, seq - 1))
    stop = data.draw(st.integers(start + 1, seq))
    order = data.draw(st.permutations(range(len(expected))))
    for a, b in ((0, seq), (start, stop)):
        read = read_sequences(store, order, seq, a, b)
        for name in FIELDS:
            assert read[name].dtype == np.int32
            assert read[name].tolist() == [expected[sequence][name][a:b] for sequence in order], (
                name
            )


def test_each_token_of_the_store_is_predicted_once() -> None:
    """Every token but the first of each document is a target, and no other."""
    store = embedded_corpus()
    targets = read_sequences(store, range(sequence_count(store, 128)), 128)["targets"]
    assert (targets != NO_TARGET).sum() == len(store.tokens) - store.documents


def test_a_sequence_past_the_end_is_padding() -> None:
    store = TokenStore.of_documents(["ab"], ByteTokenizer(), name="x")
    sequence = read_sequences(store, [5], seq=4)
    assert {name: set(sequence[name].ravel().tolist()) for name in FIELDS} == {
        "tokens": {0}, "targets": {NO_TARGET}, "segments": {0}, "positions": {0}
    }  # fmt: skip
