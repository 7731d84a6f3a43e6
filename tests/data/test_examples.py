"""Stores of examples: loss weights per token, whole examples in sequences, damage."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data import ByteTokenizer, Mixture, TokenStore, held_out_loader, training_loader
from meshwright.data.packing import new_store
from meshwright.data.sequences import (
    NO_TARGET,
    best_fit,
    read_sequences,
    sequence_count,
    sequence_table,
)
from meshwright.data.store import MASK_DTYPE, WEIGHT_DTYPE
from meshwright.errors import MeshwrightError

BYTES = ByteTokenizer()
MASKED = [([1, 2, 3, 4], [0, 0, 1, 1]), ([5, 6], [1, 1]), ([7, 8, 9], [0, 1, 0])]


def on_disk(path: Path, examples: list, dtype: np.dtype = MASK_DTYPE) -> TokenStore:
    with new_store(path, BYTES, weights=dtype) as writer:
        writer.add_examples([(np.array(ids, np.int32), np.array(w)) for ids, w in examples])
        writer.finish({})
    return TokenStore.open(path)


def test_masked_tokens_are_no_targets() -> None:
    store = TokenStore.of_examples(MASKED, BYTES, name="m")
    batch = read_sequences(store, [0, 1], seq=6)
    assert batch["tokens"].tolist() == [[1, 2, 3, 4, 5, 6], [7, 8, 9, 0, 0, 0]]
    assert batch["targets"].tolist() == [[-1, 3, 4, -1, 6, -1], [8, -1, -1, -1, -1, -1]]
    assert batch["segments"].tolist() == [[1, 1, 1, 1, 2, 2], [1, 1, 1, 0, 0, 0]]
    assert "weights" not in batch


def test_weights_are_those_of_the_targets() -> None:
    store = TokenStore.of_examples([([1, 2, 3], [0.5, 0, 0.25]), ([4, 5], [1, 2])], BYTES, name="w")
    batch = read_sequences(store, [0], seq=6)
    assert batch["targets"].tolist() == [[-1, 3, -1, 5, -1, -1]]
    assert batch["weights"].tolist() == [[0, 0.25, 0, 2, 0, 0]]


lengths = st.lists(st.integers(1, 9), min_size=1, max_size=30)


@settings(max_examples=60)
@given(lengths, st.integers(1, 8), st.booleans())
def test_every_example_is_read_once_from_its_head(
    lengths: list[int], seq: int, packed: bool
) -> None:
    ids = [np.arange(n) + 10 * i % 200 for i, n in enumerate(lengths)]
    store = TokenStore.of_examples([(one, np.ones(len(one))) for one in ids], BYTES, name="s")
    batch = read_sequences(store, range(sequence_count(store, seq, packed)), seq, packed=packed)
    read = [
        tokens[segments == segment].tolist()
        for tokens, segments in zip(batch["tokens"], batch["segments"], strict=True)
        for segment in range(1, segments.max() + 1)
    ]
    assert sorted(read) == sorted(one[:seq].tolist() for one in ids)
    table = sequence_table(store, seq, packed)
    assert table is not None
    assert table.cut == sum(n > seq for n in lengths)
    # an example begins a sequence only if none before had room for it
    filled = (batch["segments"] > 0).sum(axis=1)
    first = (batch["segments"] == 1).sum(axis=1)
    pairs = itertools.combinations(range(len(filled)), 2)
    assert not packed or all(filled[i] + first[j] > seq for i, j in pairs)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1),
    st.integers(2, 12),
    st.booleans(),
)
def test_both_answers_of_a_pair_are_in_one_sequence(
    lengths: list[tuple[int, int]], seq: int, packed: bool
) -> None:
    examples = [
        ([i % 200] * length, [1] * length) for i, pair in enumerate(lengths) for length in pair
    ]
    store = TokenStore.of_examples(examples, BYTES, name="s")
    store = dataclasses.replace(store, meta={**store.meta, "examples": {"pairs": True}})
    batch = read_sequences(store, range(sequence_count(store, seq, packed)), seq, packed=packed)
    read = {}
    for tokens, segments in zip(batch["tokens"], batch["segments"], strict=True):
        for first in range(1, segments.max() + 1, 2):
            chosen, rejected = tokens[segments == first], tokens[segments == first + 1]
            assert {*chosen, *rejected} == {chosen[0]}  # of the same pair
            assert chosen[0] not in read
            read[int(chosen[0])] = len(chosen), len(rejected)
        assert packed or segments.max() == 2
    for i, (chosen, rejected) in enumerate(lengths):
        most = max(seq // 2, seq - rejected)
        expected = (min(chosen, most), min(rejected, seq - min(chosen, most)))
        assert read[i] == expected
        assert chosen + rejected > seq or expected == (chosen, rejected)
    table = sequence_table(store, seq, packed)
    assert table is not None
    assert table.cut == sum(sum(pair) > seq for pair in lengths)


def test_neighbours_stay_close_and_sequences_are_full() -> None:
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(5.5, 0.8, 20_000).astype(int) + 1, 2048).tolist()
    sequence_of = best_fit(lengths, seq=2048)
    total = np.bincount(sequence_of, lengths)
    assert total.max() <= 2048
    assert sum(lengths) / 2048 / len(total) > 0.98
    # the last sequences, which are held out, have the last examples
    assert min(np.flatnonzero(sequence_of >= len(total) - 20)) > 0.8 * len(lengths)


@given(lengths, st.integers(2, 8), st.data())
def test_parts_of_a_sequence_are_the_sequence(
    lengths: list[int], seq: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(0)
    examples = [(rng.integers(0, 9, n), rng.choice([0, 0.5, 2], n)) for n in lengths]
    store = TokenStore.of_examples(examples, BYTES, name="s")
    cut = data.draw(st.integers(1, seq - 1))
    every = range(sequence_count(store, seq))
    whole = read_sequences(store, every, seq)
    left, right = read_sequences(store, every, seq, 0, cut), read_sequences(store, every, seq, cut)
    for name in whole:
        joined = np.concatenate([left[name], right[name]], axis=1)
        np.testing.assert_array_equal(joined, whole[name], name)


def test_texts_and_weighted_examples_share_a_batch() -> None:
    texts = TokenStore.of_documents(["abcdefgh" * 4], BYTES, name="t")
    examples = TokenStore.of_examples([([1, 2, 3, 4], [0, 0.5, 0.5, 0])] * 8, BYTES, name="e")
    loader = training_loader(Mixture.of([texts, examples], [1, 1]), batch=4, seq=8)
    batch = loader.host_batch(0)
    assert set(np.unique(batch["weights"])) == {0, 0.5, 1}
    np.testing.assert_array_equal(batch["weights"] > 0, batch["targets"] != NO_TARGET)
    assert loader.lengths["weights"] == 8


def test_the_last_sequences_of_examples_are_held_out() -> None:
    store = TokenStore.of_examples([([i, i + 1], [0, 1]) for i in range(0, 40, 2)], BYTES, name="e")
    mixture = Mixture.of([store])
    held_out = held_out_loader(mixture, batch=2, seq=4, held_out=2).host_batch(0)
    assert held_out["tokens"][0].tolist() == [[32, 33, 34, 35], [36, 37, 38, 39]]
    trained = training_loader(mixture, batch=8, seq=4, held_out=2).host_batch(0)
    assert trained["tokens"].max() < 32


def test_a_store_on_disk_is_the_one_in_memory(tmp_path: Path) -> None:
    store = on_disk(tmp_path / "a.store", MASKED)
    made = TokenStore.of_examples(MASKED, BYTES, name="m")
    assert store.identity == made.identity
    assert [store.document_weights(i).tolist() for i in range(3)] == [w for _, w in MASKED]
    floats = on_disk(tmp_path / "b.store", MASKED, WEIGHT_DTYPE)
    assert floats.identity != made.identity
    assert floats.is_weighted
    assert not store.is_weighted
    other = TokenStore.of_examples([*MASKED[:2], ([7, 8, 9], [0, 1, 1])], BYTES, name="m")
    assert other.identity != made.identity, "runs with another mask would resume"


def test_a_damaged_mask_is_noticed(tmp_path: Path) -> None:
    store = on_disk(tmp_path / "a.store", MASKED)
    file = tmp_path / "a.store/weights.bin"
    data = bytearray(file.read_bytes())
    data[4] = 0
    file.write_bytes(data)
    with pytest.raises(MeshwrightError, match=r"block 0 of weights\.bin.*checksum"):
        read_sequences(store, [0], seq=6)
    with pytest.raises(MeshwrightError, match=r"weights\.bin"):
        TokenStore.open(tmp_path / "a.store").verify()
    file.write_bytes(data[:-1])
    with pytest.raises(MeshwrightError, match="truncated"):
        TokenStore.open(tmp_path / "a.store")
    file.unlink()
    with pytest.raises(MeshwrightError, match=r"weights\.bin is missing"):
        TokenStore.open(tmp_path / "a.store")
