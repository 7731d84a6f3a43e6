"""Span corruption and prefix LM: lengths of T5X, and every token of the text is found again."""

from typing import Any

import numpy as np
import pytest

from meshwright import MeshwrightError
from meshwright.data import ByteTokenizer, Mixture, TokenStore, sentinel_top, training_loader
from meshwright.data.objectives import Examples, PrefixLM, SpanCorruption
from meshwright.data.sequences import NO_TARGET

VOCAB, END = 1000, 1


def spans(seq: int = 512, **more: float) -> SpanCorruption:
    return SpanCorruption(seq=seq, vocab=VOCAB, end=END, **more)  # type: ignore[arg-type]


def text(objective: SpanCorruption | PrefixLM, examples: int = 4) -> np.ndarray:
    return np.random.default_rng(0).integers(2, 900, (examples, objective.raw_length), np.int32)


@pytest.mark.parametrize(
    ("seq", "raw", "targets"), [(512, 568, 114), (1024, 1137, 229), (256, 284, 58)]
)
def test_lengths_are_those_of_t5x(seq: int, raw: int, targets: int) -> None:
    objective = spans(seq)
    assert (objective.raw_length, objective.target_length) == (raw, targets)
    # by an independent formula: kept tokens, a sentinel a span, and the end
    noise = round(raw * 0.15)
    assert raw - noise + round(noise / 3) + 1 == seq
    assert noise + round(noise / 3) + 1 == targets


@pytest.mark.parametrize("seq", [8, 33, 100, 512])
def test_inputs_and_targets_together_are_the_text(seq: int) -> None:
    objective = spans(seq)
    tokens = text(objective)
    batch = objective.fields({"tokens": tokens}, np.arange(4))
    for i, raw in enumerate(tokens):
        inputs = batch["encoder_tokens"][i][batch["encoder_segments"][i] > 0].tolist()
        targets = batch["targets"][i][batch["targets"][i] != NO_TARGET].tolist()
        assert inputs.pop() == targets.pop() == END
        rebuilt: list[int] = []
        for token in inputs:
            if token < 900:
                rebuilt.append(token)
                continue
            start = targets.index(token) + 1
            while start < len(targets) and targets[start] < 900:
                rebuilt.append(targets[start])
                start += 1
        assert rebuilt == raw.tolist()
        used = [token for token in inputs if token >= 900]
        assert used == list(range(VOCAB - 1, VOCAB - 1 - objective.spans, -1))


def test_the_decoder_reads_what_it_has_to_predict_one_token_late() -> None:
    batch = spans().fields({"tokens": text(spans())}, np.arange(4))
    np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    assert (batch["tokens"][:, 0] == 0).all()


def test_an_example_depends_on_its_number_and_the_seed_alone() -> None:
    objective = spans()
    tokens = text(objective)
    whole = objective.fields({"tokens": tokens}, np.arange(10, 14))
    one = objective.fields({"tokens": tokens[2:3]}, np.array([12]))
    for name, array in one.items():
        np.testing.assert_array_equal(array[0], whole[name][2])
    other = SpanCorruption(512, VOCAB, END, seed=1).fields({"tokens": tokens}, np.arange(10, 14))
    assert (other["encoder_tokens"] != whole["encoder_tokens"]).any()


def test_a_prefix_and_its_rest_are_the_text() -> None:
    objective = PrefixLM(seq=64, vocab=VOCAB, end=END)
    tokens = text(objective, 50)
    batch = objective.fields({"tokens": tokens}, np.arange(50))
    places = batch["encoder_segments"].sum(axis=1) - 1  # without the end token
    assert places.min() < 16
    assert places.max() > 48
    for i, place in enumerate(places):
        rest = 64 - place
        np.testing.assert_array_equal(batch["encoder_tokens"][i, :place], tokens[i, :place])
        assert batch["encoder_tokens"][i, place] == END
        np.testing.assert_array_equal(batch["targets"][i, :rest], tokens[i, place:])
        assert batch["targets"][i, rest] == END
        assert (batch["targets"][i, rest + 1 :] == NO_TARGET).all()


def test_a_loader_gives_the_fields_of_its_objective() -> None:
    objective = SpanCorruption(seq=64, vocab=320, end=256)
    loader = training_loader(
        Mixture.parse("embedded"), batch=4, seq=objective.raw_length, objective=objective
    )
    batch = loader.host_batch(3)
    assert {name: array.shape for name, array in batch.items()} == {
        name: (1, 4, length) for name, length in objective.lengths.items()
    }
    assert loader.describe()["objective"]["name"] == "span-corruption"


def test_sentinels_are_ids_that_no_text_has() -> None:
    bytes_ = ByteTokenizer()
    assert sentinel_top(bytes_, 320) == 320
    SpanCorruption(512, 320, 256).check_sentinels(bytes_)  # 28 of 63
    with pytest.raises(
        MeshwrightError, match="takes 57 sentinels, ids that no text has; there are 3"
    ):
        SpanCorruption(1024, 260, 256).check_sentinels(bytes_)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ((99, 98, 97), None),
        ((97, 98, 99), "count down by one; they are 97, 98"),
        ((99, 50, 49), "they are 99, 50"),
    ],
)
def test_a_tokenizers_own_sentinels_count_down(ids: tuple[int, ...], words: str | None) -> None:
    added = [{"content": f"<extra_id_{i}>", "id": id_} for i, id_ in enumerate(ids)]

    class Sentinels(ByteTokenizer):
        vocab = 100

        def to_json(self) -> dict[str, Any]:
            return {"definition": {"added_tokens": added}}

    objective = SpanCorruption(24, sentinel_top(Sentinels(), 128), END)
    assert objective.vocab == ids[0] + 1
    assert objective.spans <= 3
    if words is None:
        objective.check_sentinels(Sentinels())
    else:
        with pytest.raises(MeshwrightError, match=words):
            objective.check_sentinels(Sentinels())


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(MeshwrightError, match="seq=2 is too short for spans"):
        spans(2)
    with pytest.raises(MeshwrightError, match="noise_density"):
        spans(noise_density=1.5)
    with pytest.raises(MeshwrightError, match="seq=1 is too short to be cut"):
        PrefixLM(1, VOCAB, END)


def test_the_encoder_reads_prompts_and_the_decoder_answers() -> None:
    examples = [
        ([10, 11, 12, 20, 21, END], [0, 0, 0, 1, 1, 1]),
        ([10, 20, 30, 40, END], [0, 1, 0, 1, 1]),  # a masked token in the answer
        ([10, 11, 12, 13, 14, 20, 21, 22, 23, 24, END], [0] * 5 + [1] * 6),  # both are cut
    ]
    store = TokenStore.of_examples(examples, ByteTokenizer(), name="pairs")
    objective = Examples(seq=4, vocab=257, end=END)
    loader = training_loader(
        Mixture.of([store]), batch=3, seq=objective.raw_length, seed=None, objective=objective,
        packed=False,
    )  # fmt: skip
    batch = {name: array[0].tolist() for name, array in loader.host_batch(0).items()}
    assert batch["encoder_tokens"] == [[10, 11, 12, END], [10, END, 0, 0], [10, 11, 12, END]]
    assert batch["encoder_segments"] == [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch["tokens"] == [[0, 20, 21, 0], [0, 20, 30, 40], [0, 20, 21, 0]]
    assert batch["targets"] == [[20, 21, END, -1], [20, -1, 40, END], [20, 21, 22, -1]]
