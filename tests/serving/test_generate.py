"""Generation: the same tokens on every mesh and in every batch, ended where they should."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from tests.serving.models import BASE, Continuation, generate, whole_logits

import meshwright as mw
from meshwright.models.decoder import DecoderConfig
from meshwright.serving.generate import stream
from meshwright.serving.sampling import Sampling
from meshwright.serving.source import Model, generation_mesh

RandomModel = Callable[..., Model]
CONFIG = DecoderConfig(64, 2, 32, 8, 4, 8, 64, max_seq=256, qk_norm=True, sliding_window=9)
PROMPTS = [[5, 9, 2, 60, 33, 7], [3], [8, 30] * 33]
GREEDY = Sampling(0)
SAMPLED = Sampling(0.9, top_k=40, top_p=0.95, seed=4)


@pytest.fixture(scope="module")
def alone(random_model: RandomModel) -> Model:
    return random_model(CONFIG, generation_mesh())


@pytest.fixture(scope="module")
def expected(alone: Model) -> dict[Sampling, list[Continuation]]:
    """On one device."""
    return {sampling: generate(alone, PROMPTS, 24, sampling) for sampling in (GREEDY, SAMPLED)}


def test_greedy_tokens_are_the_most_probable_of_the_forward_pass(
    alone: Model, expected: dict[Sampling, list[Continuation]]
) -> None:
    rows = [[*p, *row.tokens] for p, row in zip(PROMPTS, expected[GREEDY], strict=True)]
    whole = whole_logits(alone.params, CONFIG, rows)
    for prompt, row, logits in zip(PROMPTS, expected[GREEDY], whole, strict=True):
        probable = logits[len(prompt) - 1 : len(prompt) + 23].argmax(-1)
        assert list(row.tokens) == probable.tolist()


@pytest.mark.parametrize(
    "mesh",
    [
        "dp=2,fsdp=2,tp=2",
        *(pytest.param(m, marks=pytest.mark.slow) for m in ("tp=8", "fsdp=2,tp=4", "tp=2,sp=4")),
    ],
)
def test_tokens_are_the_same_on_every_mesh(
    mesh: str, random_model: RandomModel, expected: dict[Sampling, list[Continuation]]
) -> None:
    split = random_model(CONFIG, generation_mesh(mesh))
    for sampling, right in expected.items():
        assert len({token for row in right for token in row.tokens}) > 10  # not just repeating
        assert generate(split, PROMPTS, 24, sampling) == right


def test_a_long_prompt_is_computed_in_parts(random_model: RandomModel) -> None:
    """Longer than a chunk, and with sp by a program for the whole prompt."""
    config = dataclasses.replace(BASE, max_seq=1024)
    prompt = [(7 * i + 3) % 61 for i in range(700)]
    alone = random_model(config, generation_mesh())
    for model in (alone, random_model(config, generation_mesh("sp=2,tp=8"))):
        [done] = generate(model, [prompt], 3, GREEDY)
        whole = whole_logits(alone.params, config, [[*prompt, *done.tokens]])[0]
        assert list(done.tokens) == whole[699:702].argmax(-1).tolist()


@pytest.mark.slow
def test_a_padded_vocabulary_gives_no_other_token(random_model: RandomModel) -> None:
    config = dataclasses.replace(CONFIG, vocab=61)
    alone, split = (random_model(config, generation_mesh(text)) for text in ("tp=1", "fsdp=2,tp=4"))
    assert split.params["output"].shape == (32, 64)
    # all tokens about equally likely: of 180, padding would take eight
    sampling = Sampling(1000.0, top_k=61, top_p=0.99, min_p=0.01)
    found = generate(split, PROMPTS, 60, sampling)
    assert found == generate(alone, PROMPTS, 60, sampling)
    assert max(token for row in found for token in row.tokens) < 61


def test_a_row_does_not_depend_on_the_others(
    alone: Model, expected: dict[Sampling, list[Continuation]]
) -> None:
    assert generate(alone, PROMPTS[:1], 24, SAMPLED) == expected[SAMPLED][:1]
    swapped = [PROMPTS[0], PROMPTS[2], PROMPTS[1]]
    assert generate(alone, swapped, 24, SAMPLED)[0] == expected[SAMPLED][0]


def test_a_prompt_has_the_seed_of_its_index(
    alone: Model, expected: dict[Sampling, list[Continuation]]
) -> None:
    first, second = generate(alone, [PROMPTS[0], PROMPTS[0]], 24, SAMPLED)
    assert first == expected[SAMPLED][0] != second
    [next_seed] = generate(alone, PROMPTS[:1], 24, dataclasses.replace(SAMPLED, seed=5))
    assert next_seed == second


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
    assert {row for row, _ in (next(coming) for _ in range(9))} == {0, 1, 2}
    coming.close()  # type: ignore[attr-defined]


def test_weights_are_released_where_nobody_needs_them(random_model: RandomModel) -> None:
    model = random_model(CONFIG, generation_mesh("dp=2"))
    assert len(list(stream(model, PROMPTS, 2, release=True))) == 6
    assert model.params["layers"]["attention"]["wq"].is_deleted()


def test_more_prompts_than_run_together_wait(
    random_model: RandomModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.serving.generate._MOST_SEQUENCES", 2)
    model = random_model(CONFIG, generation_mesh())
    found = generate(model, [[token] for token in range(5)], 2, GREEDY)
    whole = whole_logits(model.params, CONFIG, [[token] for token in range(5)])
    assert [row.tokens[0] for row in found] == whole[:, 0].argmax(-1).tolist()


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


def test_numpy_prompts_are_as_good_as_lists(
    alone: Model, expected: dict[Sampling, list[Continuation]]
) -> None:
    arrays = [np.asarray(prompt, np.int32) for prompt in PROMPTS]
    assert generate(alone, arrays, 24, GREEDY) == expected[GREEDY]  # type: ignore[arg-type]


def test_penalties_and_a_bias_change_the_tokens(alone: Model) -> None:
    [plain] = generate(alone, [[5, 9]], 12, GREEDY)
    never = dataclasses.replace(GREEDY, logit_bias=((plain.tokens[0], -100.0),))
    [without] = generate(alone, [[5, 9]], 12, never)
    assert plain.tokens[0] not in without.tokens
    [distinct] = generate(alone, [[5, 9]], 12, Sampling(0, presence_penalty=1000.0))
    assert len(set(distinct.tokens)) == 12
    with pytest.raises(mw.MeshwrightError, match="logit_bias has token 64; the model has 0 to 63"):
        stream(alone, [[1]], 2, Sampling(logit_bias=((64, 1.0),)))


def test_a_cache_that_the_host_cannot_hold_is_refused(
    alone: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.machines.host_memory.free_host_memory", lambda: 10_000)
    with pytest.raises(mw.MeshwrightError, match=r"a KV cache for 3 sequences of up to 128 tokens"):
        next(stream(alone, PROMPTS, 20))
