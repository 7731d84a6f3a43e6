"""Sequences of hay: what they hide is what they ask for, where they say it is."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshwright as mw
from meshwright.data import (
    FIELDS,
    Needles,
    needle_sequences,
    read_sequences,
    sequence_count,
    write_needles,
)


def pairs(text: str, mark: str, kind: Needles) -> list[re.Match[str]]:
    key, value = f"[a-z]{{{kind.key_length}}}", f"[a-z]{{{kind.value_length}}}"
    return list(re.finditer(rf"{re.escape(mark)}({key})({value}) ", text))


@settings(max_examples=60)
@given(st.data())
def test_a_sequence_hides_and_asks_what_it_says_it_does(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 4))
    needles = data.draw(st.integers(1, min(20, 10**length)))
    kind = Needles(
        needles,
        data.draw(st.none() | st.integers(1, needles)),
        length,
        data.draw(st.integers(1, 5)),
    )
    seq = kind.shortest + data.draw(st.integers(0, 90))
    sequences = needle_sequences(kind, 2, seq, data.draw(st.integers(0, 9)))
    assert sequences.tokens.shape == (2, seq)
    for sequence in range(2):
        *body, end = sequences.tokens[sequence].tolist()
        assert end == 256
        text = bytes(body).decode()
        told = {found[1]: found for found in pairs(text, "!", kind)}
        asked = pairs(text, "?", kind)
        assert text.count("!") == len(told) == kind.needles
        assert text.count("?") == len({found[1] for found in asked}) == kind.asked
        assert all(told[found[1]][2] == found[2] for found in asked)
        # questions are the end of the sequence, and what else is left is hay
        assert text[asked[0].start() :] == "".join(found[0] for found in asked)
        _, *hay = re.sub(r"!\w+ ", "", text[: asked[0].start()]).split()
        assert len(set(hay)) <= 3
        # a letter is of the hay, of keys or of values
        letters = [{letter for found in told.values() for letter in found[i]} for i in (1, 2)]
        assert not letters[0] & letters[1]
        assert not set("".join(hay)) & (letters[0] | letters[1])
        assert sequences.asked[sequence].tolist() == [found.start(2) for found in asked]
        assert sequences.told[sequence].tolist() == [told[found[1]].start(2) for found in asked]
        spoken = [bytes(answer.astype(np.uint8)).decode() for answer in sequences.answers[sequence]]
        assert spoken == [found[2] for found in asked]


def test_a_sequence_depends_on_seed_and_number_alone() -> None:
    kind = Needles()
    sequences = needle_sequences(kind, 8, 200, seed=3).tokens
    np.testing.assert_array_equal(
        sequences[5:], needle_sequences(kind, 3, 200, seed=3, first=5).tokens
    )
    others = [
        needle_sequences(kind, 8, 200, seed=4).tokens,
        needle_sequences(kind, 8, 200, seed=3, fresh=True).tokens,
    ]
    texts = [sequence.tobytes() for tokens in (sequences, *others) for sequence in tokens]
    assert len(set(texts)) == len(texts)


def test_sequences_of_the_store_are_the_sequences_training_reads(tmp_path: Path) -> None:
    kind = Needles(3, value_length=2)
    store = write_needles(
        kind, tmp_path / "a", sequences=300, seq=65, seed=2
    )  # more than one piece
    assert sequence_count(store, 65) == store.documents == 300
    read = read_sequences(store, range(300), seq=65)
    np.testing.assert_array_equal(read["tokens"], needle_sequences(kind, 300, 65, seed=2).tokens)
    assert set(read) == set(FIELDS)
    assert (read["segments"] == 1).all()
    assert (read["positions"] == np.arange(65)).all()
    store.verify()


def test_needles_are_at_every_depth_and_mostly_on_another_device() -> None:
    sequences = needle_sequences(Needles(), 200, 256)
    hay = 256 - 4 * 4
    tenths = np.histogram(sequences.told, bins=10, range=(0, hay))[0]
    assert tenths.min() > 0.6 * tenths.mean()
    for held in ([0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 2, 3, 3, 2, 1, 0]):  # contiguous and zig-zag
        told, asked = (np.array(held)[places // 32] for places in (sequences.told, sequences.asked))
        assert (told == asked).mean() < 0.25


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"needles": 0}, "needles=0 must be at least 1"),
        ({"needles": 11}, "there are only 10 of key_length=1; give a longer key"),
        ({"questions": 9}, "questions=9 with needles=4: each needle is asked for at most once"),
        ({"questions": 0}, "give 1 to 4"),
        ({"value_length": 0}, "value_length=0 must be at least 1"),
        ({"key_length": 1.5}, "key_length=1.5 is not a whole number"),
    ],
)
def test_needles_that_cannot_be_are_refused(arguments: dict[str, int], words: str) -> None:
    with pytest.raises(mw.MeshwrightError, match=re.escape(words)):
        Needles(**arguments)


def test_a_sequence_too_short_says_how_long_it_must_be(tmp_path: Path) -> None:
    kind = Needles()
    with pytest.raises(
        mw.MeshwrightError, match=f"seq=50 is too short .* seq={kind.shortest} or more"
    ):
        write_needles(kind, tmp_path / "a", sequences=4, seq=50)
    assert not (tmp_path / "a").exists()
    needle_sequences(kind, 1, kind.shortest)
    with pytest.raises(mw.MeshwrightError, match="sequences=0 leaves nothing to ask"):
        needle_sequences(kind, 0, 200)
