"""Generation: the same tokens on every mesh and in every batch, ended where they should."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

import meshwright as mw
from meshwright.models.decoder import DecoderConfig
from meshwright.serve.generate import Continuation, generate, stream
from meshwright.serve.load import Model, generation_mesh
from meshwright.serve.sampling import Sampling

RandomModel = Callable[..., Model]
CONFIG = DecoderConfig(64, 2, 32, 8, 4, 8, 64, max_seq=256, qk_norm=True, sliding_window=9)
PROMPTS = [[5, 9, 2, 60, 33, 7], [3], [8, 30] * 33]
SAMPLED = Sampling(0.9, top_k=40, top_p=0.95, seed=4)


@pytest.mark.parametrize("mesh", ["dp=8", "fsdp=2,tp=4", "tp=2,sp=4", "dp=2,fsdp=2,tp=2"])
def test_tokens_are_the_same_on_every_mesh(mesh: str, random_model: RandomModel) -> None:
    alone = random_model(CONFIG, generation_mesh())
    split = random_model(CONFIG, generation_mesh(mesh))
    for sampling in (Sampling(0), SAMPLED):
        expected = generate(alone, PROMPTS, 24, sampling)
        assert len({token for row in expected for token in row.tokens}) > 10  # not just repeating
        assert generate(split, PROMPTS, 24, sampling) == expected


def test_a_padded_vocabulary_gives_no_other_token(random_model: RandomModel) -> None:
    config = dataclasses.replace(CONFIG, vocab=61)
    alone, split = (random_model(config, generation_mesh(text)) for text in ("tp=1", "fsdp=2,tp=4"))
    assert split.params["output"].shape == (32, 64)
    # all tokens about equally likely: of 180, padding would take eight
    for sampling in (Sampling(1000.0), Sampling(1000.0, top_k=61, top_p=0.99, min_p=0.01)):
        found = generate(split, PROMPTS, 60, sampling)
        assert found == generate(alone, PROMPTS, 60, sampling)
        assert max(token for row in found for token in row.tokens) < 61


def test_a_row_does_not_depend_on_the_others(random_model: RandomModel) -> None:
    model = random_model(CONFIG, generation_mesh())
    together = generate(model, PROMPTS, 12, SAMPLED)
    assert generate(model, PROMPTS[:1], 12, SAMPLED) == together[:1]
    swapped = [PROMPTS[0], PROMPTS[2], PROMPTS[1]]
    assert generate(model, swapped, 12, SAMPLED)[0] == together[0]


def test_the_same_prompt_twice_gives_two_texts_and_another_seed_another(
    random_model: RandomModel,
) -> None:
    model = random_model(CONFIG, generation_mesh())
    prompts = [PROMPTS[2], PROMPTS[0], PROMPTS[0]]
    rest, first, second = generate(model, prompts, 12, SAMPLED)
    assert first != second
    assert generate(model, prompts, 12, dataclasses.replace(SAMPLED, seed=5))[0] != rest


def test_a_row_ends_with_its_end_token_and_the_others_go_on(random_model: RandomModel) -> None:
    mesh = generation_mesh()
    endless = generate(random_model(CONFIG, mesh), PROMPTS, 20, Sampling(0))
    assert [(len(row.tokens), row.ended) for row in endless] == [(20, False)] * 3
    # a token that ends the first row in the middle
    end = endless[0].tokens[7]
    model = random_model(CONFIG, mesh, ends=frozenset({end}))
    for row, whole in zip(generate(model, PROMPTS, 20, Sampling(0)), endless, strict=True):
        ended = end in whole.tokens
        cut = whole.tokens.index(end) if ended else 20
        assert row == Continuation(whole.tokens[:cut], ended)


def test_generation_stops_when_all_rows_have_ended(random_model: RandomModel) -> None:
    model = random_model(CONFIG, generation_mesh(), ends=frozenset(range(64)))
    assert len(list(stream(model, PROMPTS, 50))) == 3  # one token each


def test_all_of_the_models_length_can_be_used(random_model: RandomModel) -> None:
    config = dataclasses.replace(CONFIG, max_seq=20)
    model = random_model(config, generation_mesh())
    assert len(generate(model, [[1] * 5], 15)[0].tokens) == 15


def test_tokens_come_before_the_last_is_made(random_model: RandomModel) -> None:
    model = random_model(CONFIG, generation_mesh())
    coming = stream(model, PROMPTS, 60)
    assert [row for row, _ in (next(coming) for _ in range(5))] == [0, 1, 2, 0, 1]
    coming.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("prompts", "new", "words"),
    [
        ([], 5, "no prompt"),
        ([[1], []], 5, "prompt 2 is empty"),
        ([[1, 64]], 5, "prompt 1 has token 64; the model has 0 to 63"),
        ([[1], [1] * 250], 7, "prompt 2 has 250 tokens.*max_new=6 would fit"),
        ([[1] * 300], 7, "give a shorter prompt"),
        ([[1]], 0, "max_new=0"),
        ([[1]], -1, "max_new=-1"),
    ],
)
def test_what_cannot_be_continued_is_refused_at_once(
    prompts: list[list[int]], new: int, words: str, random_model: RandomModel
) -> None:
    model = random_model(CONFIG, generation_mesh())
    with pytest.raises(mw.MeshwrightError, match=words):
        stream(model, prompts, new)


def test_numpy_prompts_are_as_good_as_lists(random_model: RandomModel) -> None:
    model = random_model(CONFIG, generation_mesh())
    arrays = [np.asarray(prompt, np.int32) for prompt in PROMPTS]
    assert generate(model, arrays, 3, SAMPLED) == generate(model, PROMPTS, 3, SAMPLED)  # type: ignore[arg-type]


def test_penalties_are_refused_not_ignored(random_model: RandomModel) -> None:
    model = random_model(CONFIG, generation_mesh())
    with pytest.raises(mw.MeshwrightError, match="generate has no penalties and no logit_bias"):
        stream(model, [[1]], 2, Sampling(repetition_penalty=1.2))
