"""Mixtures and samples: what the text says, who is mixed, what is held out; and the check."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.word_tokenizer import word_tokenizer

from meshwright.data import (
    ByteTokenizer,
    Mixture,
    TokenStore,
    check_data,
    embedded_corpus,
    load_tokenizer,
    pack,
    sequence_count,
)
from meshwright.data.samples import PADDING, HeldOutSamples, TrainingSamples
from meshwright.errors import MeshwrightError

BYTES = ByteTokenizer()


def made(name: str, tokens: int) -> TokenStore:
    return TokenStore.of_documents([name[0] * (tokens - 1)], BYTES, name=name)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, tokens in (("a", 101), ("b", 301)):
        (tmp_path / f"{name}.txt").write_text(name * (tokens - 1))
        pack([tmp_path / f"{name}.txt"], tmp_path / f"{name}.store", BYTES)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "names", "quotas"),
    [
        ("a.store", ["a.store"], (1,)),
        ("a.store:5", ["a.store"], (1,)),
        (" a.store:0.7, b.store:0.3 ", ["a.store", "b.store"], (7, 3)),
        ("a.store,b.store", ["a.store", "b.store"], (101, 301)),
        ("embedded:1,./b.store:3", ["embedded", "b.store"], (1, 3)),
    ],
)
def test_the_text_says_what_is_mixed(
    here: Path, text: str, names: list[str], quotas: tuple[int, ...]
) -> None:
    mixture = Mixture.parse(text)
    assert [store.name for store in mixture.stores] == names
    assert mixture.schedule.quotas == quotas
    assert sum(mixture.shares) == pytest.approx(1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names an empty source"),
        ("a.store,,b.store", "names an empty source"),
        ("a.store:0.7,b.store", "'b.store' has no weight"),
        ("a.store:1,a.store:2", "names 'a.store' twice"),
        ("a.store,./a.store", "names 'a.store' and again as './a.store'"),
        ("a.store/:1,b.store:2,link:3", "names 'a.store/' and again as 'link'"),
        ("{here}/a.store,b.store,b.store/../a.store", "names '{here}/a.store' and again as"),
        ("embedded,a.store,embedded", "names 'embedded' twice"),
        ("a.store:0", "must be above 0"),
        ("a.store:1,b.store:-2", "must be above 0"),
        ("a.store:1.2.3", "is not a number"),
        ("c.store", "'c.store' does not exist"),
        ("a.txt", "is not a token store"),
        ("a.store:much", "'a.store:much' does not exist"),
    ],
)
def test_mistakes_in_the_text_are_named(here: Path, text: str, words: str) -> None:
    (here / "link").symlink_to("a.store")
    with pytest.raises(MeshwrightError) as said:
        Mixture.parse(text.format(here=here))
    assert words.format(here=here) in str(said.value)


@given(st.text("ab.:,0123 -e", max_size=12))
def test_any_text_is_a_mixture_or_a_clear_mistake(text: str) -> None:
    with pytest.raises(MeshwrightError):
        Mixture.parse(text)


def tokenizer_file(folder: Path, extra: str) -> Path:
    definition = word_tokenizer({"a": 0, "</s>": 1, extra: 2})
    (folder / f"{extra}.json").write_text(json.dumps(definition))
    return folder / f"{extra}.json"


def test_stores_of_different_tokenizers_do_not_mix(tmp_path: Path) -> None:
    stores = [
        TokenStore.of_documents(["a"], load_tokenizer(tokenizer_file(tmp_path, x), "</s>"), name=x)
        for x in ("b", "c")
    ]
    with pytest.raises(MeshwrightError, match="'b' and 'c' were packed with different tokenizers"):
        Mixture.of(stores)
    with pytest.raises(MeshwrightError, match="at least one store"):
        Mixture.of([])
    with pytest.raises(MeshwrightError, match="1 weights for 2 stores"):
        Mixture.of([made("a", 9), made("b", 9)], [1])


@given(
    sizes=st.lists(st.integers(40, 200), min_size=1, max_size=4), seed=st.integers(0, 99),
    held_out=st.integers(0, 3), seq=st.integers(4, 9),
)  # fmt: skip
def test_training_meets_every_sequence_of_a_store_before_any_again_and_none_that_is_held_out(
    sizes: list[int], seed: int, held_out: int, seq: int
) -> None:
    mixture = Mixture.of([made("abcd"[i], size) for i, size in enumerate(sizes)])
    source, sequence = TrainingSamples(mixture, seq, held_out, seed).locate(np.arange(2000))
    for i, store in enumerate(mixture.stores):
        sequences = sequence_count(store, seq) - held_out
        mine = sequence[source == i]
        for start in range(0, len(mine) - sequences, sequences):
            assert sorted(mine[start : start + sequences].tolist()) == list(range(sequences))


@given(sizes=st.lists(st.integers(40, 200), min_size=1, max_size=4), held_out=st.integers(1, 3))
def test_held_out_sequences_come_once_and_then_padding(sizes: list[int], held_out: int) -> None:
    mixture = Mixture.of([made("abcd"[i], size) for i, size in enumerate(sizes)])
    samples = HeldOutSamples(mixture, 8, held_out)
    source, sequence = samples.locate(np.arange(samples.count + 3))
    expected = [
        (i, sequence_count(store, 8) - held_out + k)
        for i, store in enumerate(mixture.stores)
        for k in range(held_out)
    ]
    assert list(zip(source.tolist(), sequence.tolist(), strict=True))[: samples.count] == expected
    assert sequence[samples.count :].tolist() == [PADDING] * 3


def test_the_order_of_a_store_does_not_depend_on_what_it_is_mixed_with() -> None:
    a, b = made("a", 500), made("b", 300)
    _, alone = TrainingSamples(Mixture.of([a]), 8).locate(np.arange(50))
    source, mixed = TrainingSamples(Mixture.of([b, a], [1, 1]), 8).locate(np.arange(100))
    assert mixed[source == 1].tolist() == alone.tolist()


def test_the_description_follows_the_data() -> None:
    a, b = made("a", 500), made("b", 300)
    described = [
        json.dumps(Mixture.of(stores, weights).describe())
        for stores, weights in (([a], None), ([b], None), ([a, b], [1, 2]), ([a, b], [1, 3]))
    ]
    assert len(set(described)) == 4


def test_data_that_cannot_train_the_model_is_refused(tmp_path: Path) -> None:
    mixture = Mixture.of([embedded_corpus()])
    check_data(mixture, vocab=257, seq=64, batch=8, held_out=4, tokenizer=BYTES)
    other = load_tokenizer(tokenizer_file(tmp_path, "b"), "</s>")
    for asked, words in [
        ({"vocab": 256}, "vocabulary of 257, the model's is 256"),
        ({"batch": 10_000}, "less than one batch of 10000"),
        ({"held_out": 10_000}, "leaves none to train on"),
        ({"tokenizer": other}, "a tokenizer that is not the model's"),
    ]:
        with pytest.raises(MeshwrightError) as said:
            check_data(mixture, **({"vocab": 320, "seq": 64} | asked))  # type: ignore[arg-type]
        assert words in str(said.value)
