"""Answers are those of the dense forward on one device, whatever mesh and strategy; counts are true."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

import meshwright as mw
from meshwright.data import ByteTokenizer, Needles, needle_sequences
from meshwright.evaluate.needle import Retrieval, answers, check_needle, retrieve
from meshwright.models import Compute, decoder_rules
from meshwright.models.decoder import DecoderConfig, abstract_arrays, logits
from meshwright.serve.load import Model, Source, generation_mesh, load
from meshwright.train.state import abstract_state

CONFIG = DecoderConfig(320, 2, 32, 8, 4, 8, 64, max_seq=256)
RULES = decoder_rules(sp=True)
SEQUENCES = needle_sequences(Needles(4, 3, value_length=2), 5, 64)


def random_source(config: DecoderConfig = CONFIG) -> Source:
    """Weights so large that logits lie apart."""

    def read(targets: Any) -> Any:
        random = np.random.default_rng(1)

        def value(target: jax.ShapeDtypeStruct) -> jax.Array:
            numbers = random.normal(scale=0.3, size=target.shape).astype(target.dtype)
            return jax.device_put(numbers, target.sharding)

        return jax.tree.map(value, targets)

    return Source(config, ByteTokenizer(), frozenset({256}), False, "random", read)


def model_on(mesh: str, config: DecoderConfig = CONFIG) -> Model:
    return load(random_source(config), generation_mesh(mesh), rules=RULES)


@functools.cache
def reference(config: DecoderConfig, documents: int = 1) -> np.ndarray:
    """The likeliest tokens by the logits of whole sequences, on one device."""
    model = model_on("dp=1", config)

    @jax.jit
    def whole(params: Any, tokens: jax.Array, segments: jax.Array) -> jax.Array:
        return logits(params, {"tokens": tokens, "segments": segments}, config, Compute(RULES))

    with jax.set_mesh(model.mesh):
        found = whole(model.params, SEQUENCES.tokens, cut_into(documents))
    return np.asarray(found).argmax(-1)[np.arange(5)[:, None, None], SEQUENCES.positions - 1]


def cut_into(documents: int) -> np.ndarray:
    return np.broadcast_to(np.arange(64, dtype=np.int32) * documents // 64 + 1, (5, 64))


@pytest.mark.parametrize(
    ("mesh", "sequence"),
    [
        ("dp=1", "auto"),
        ("sp=4", "ring"),
        ("sp=4", "allgather"),
        ("dp=2,fsdp=2,tp=2,sp=2", "ring"),
        ("fsdp=2,sp=4", "ulysses"),
    ],
)
def test_answers_are_those_of_the_whole_logits_on_one_device(mesh: str, sequence: str) -> None:
    said = answers(model_on(mesh), SEQUENCES, context_parallel=sequence)
    np.testing.assert_array_equal(said, reference(CONFIG))
    assert len(np.unique(said)) > 5, said.ravel()  # not the same everywhere


def test_tied_embeddings_are_the_head() -> None:
    tied = dataclasses.replace(CONFIG, tied_embeddings=True)
    said = answers(model_on("tp=2,sp=2", tied), SEQUENCES, context_parallel="ring")
    np.testing.assert_array_equal(said, reference(tied))


def test_an_answer_is_never_padding_of_the_vocabulary() -> None:
    odd = dataclasses.replace(CONFIG, vocab=257)
    model = model_on("tp=2,sp=2", odd)
    assert model.params["output"].shape[1] == 258
    np.testing.assert_array_equal(
        answers(model, SEQUENCES, context_parallel="ring"), reference(odd)
    )


def test_sequences_can_be_cut_into_documents() -> None:
    said = answers(model_on("sp=4"), SEQUENCES, context_parallel="ring", segments=cut_into(4))
    np.testing.assert_array_equal(said, reference(CONFIG, 4))
    assert (said != reference(CONFIG)).any()


def test_weights_lie_as_training_keeps_them() -> None:
    import optax

    mesh = generation_mesh("fsdp=2,tp=2,sp=2")
    kept = abstract_state(abstract_arrays(CONFIG), RULES, optax.sgd(0.1), mesh).params
    read = load(random_source(), mesh, rules=RULES).params
    assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, read, kept))


def test_an_answer_is_right_if_all_of_it_is_and_groups_count_them() -> None:
    sequences = needle_sequences(Needles(2, value_length=2), 3, 100)
    right = np.array([[True, False], [True, True], [False, False]])
    found = Retrieval(right, sequences)
    assert found.share == 0.5
    for groups, places in (
        (found.by_depth(4), sequences.told),
        (found.by_distance(4), sequences.asked - sequences.told),
    ):
        assert sum(group.asked for group in groups) == 6
        for group in groups:
            inside = (places >= group.start) & (places < group.stop)
            assert group.stop - group.start == 25
            assert (group.asked, group.right) == (inside.sum(), (right & inside).sum())
    model = model_on("dp=1")
    said = answers(model, sequences)
    expected = [
        [bool((s == a).all()) for s, a in zip(*r, strict=True)]
        for r in zip(said, sequences.answers, strict=True)
    ]
    assert retrieve(model, sequences).right.tolist() == expected


def test_a_model_that_cannot_be_asked_says_why() -> None:
    mesh = generation_mesh("sp=4")
    source = random_source()

    def refused(words: str, source: Source = source, seq: int = 64, **options: Any) -> None:
        with pytest.raises(mw.MeshwrightError, match=words):
            check_needle(source, mesh, seq, **options)

    assert check_needle(source, mesh, 64, "ring") == "ring"
    assert check_needle(source, generation_mesh("dp=2"), 64) is None
    refused("seq=300 is longer than the model allows; use 256 or less", seq=300)
    refused(
        "seq=68 is not divisible by 8 .* seq=64 or 72 would fit", seq=68, context_parallel="ring"
    )
    small = dataclasses.replace(CONFIG, vocab=256)
    refused("vocabulary of 256; needle sequences need 257", source=random_source(small))
    words = type("Words", (ByteTokenizer,), {"kind": "huggingface"})()
    refused(
        "kind 'huggingface', but needle sequences are bytes",
        dataclasses.replace(source, tokenizer=words),
    )
