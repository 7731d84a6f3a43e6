"""Encoder-decoder models in the engine: the encoder's keys are in pages of the same pool."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tests.serving.models import generate

from meshwright.errors import MeshwrightError
from meshwright.models import Compute, preset
from meshwright.models.t5 import T5Config, logits, t5_rules
from meshwright.serving import Engine, EngineConfig, Model, Request, Sampling
from meshwright.serving.source import generation_mesh, load_weights, model_source

RandomModel = Callable[..., Model]
REFERENCE = Path(__file__).parents[1] / "models" / "t5_reference"
GREEDY = Sampling(temperature=0)
# a bias of relative positions whose buckets differ within a page and between pages
T5 = T5Config(
    64, 1, 2, 32, 8, 8, 64, activation="gelu", gated=True, tied_embeddings=False,
    scaled_output=False, buckets=8, max_distance=20, max_seq=128, start_token=3,
)  # fmt: skip
OLD = dataclasses.replace(
    T5, vocab=61, activation="relu", gated=False, tied_embeddings=True, scaled_output=True
)
SMALL = EngineConfig(
    max_batch=3, max_length=64, page_size=8, chunk_shapes=((1, 8),), batch_buckets=(3,),
    prompt_shapes=((2, 16), (1, 64)), compile_first=False,
)  # fmt: skip
PROMPTS = [
    (5, 9, 2, 60, 33, 7, 7, 1, 0, 12, 50), (3,), (8, 30) * 20, (1, 2, 3, 4) * 4, (9,) * 17,
]  # fmt: skip


forward = jax.jit(logits, static_argnums=(2, 3))
COMPUTE = Compute(t5_rules())


def log_probabilities(params: Any, config: T5Config, prompt: Any, tokens: Any) -> np.ndarray:
    """[tokens, vocab] of each generated token, by the forward pass of training on one device."""
    # one compiled program serves all lengths; the decoder sees no token after its own
    batch = {name: np.zeros((1, 64), np.int32) for name in ("encoder_tokens", "tokens")}
    batch["encoder_tokens"][0, : len(prompt)] = prompt
    batch["tokens"][0, : len(tokens)] = [config.start_token, *tokens[:-1]]
    batch["encoder_segments"] = (np.arange(64) < len(prompt)).astype(np.int32)[None]
    with jax.set_mesh(generation_mesh()):
        params = jax.tree.map(np.asarray, params)
        found = np.asarray(forward(params, batch, config, COMPUTE))[0, : len(tokens)]
    found = found.astype(np.float64)
    return found - np.log(np.exp(found).sum(-1, keepdims=True))


def check_logprobs(engine: Engine, model: Model, new: int) -> None:
    requests = [Request(prompt, GREEDY, new + i, logprobs=20) for i, prompt in enumerate(PROMPTS)]
    for request, done in zip(requests, engine.generate(requests), strict=True):
        expected = log_probabilities(model.params, model.config, request.prompt, done.tokens)
        assert len(done.tokens) == request.max_new
        assert done.cached_tokens == 0
        for right, token, score in zip(expected, done.tokens, done.logprobs, strict=True):
            np.testing.assert_allclose(score.logprob, right[token], rtol=0, atol=1e-4)
            np.testing.assert_allclose(
                [value for _, value in score.top], np.sort(right)[::-1][:20], rtol=0, atol=1e-4
            )
            assert token == right.argmax() == score.top[0][0]
    assert engine.stats().pages_used == 0


@pytest.mark.parametrize(
    ("config", "mesh"),
    [
        (T5, "tp=1"),
        pytest.param(OLD, "fsdp=2,tp=2,sp=2", marks=pytest.mark.slow),
        pytest.param(T5, "fsdp=2,tp=4", marks=pytest.mark.slow),
        pytest.param(OLD, "tp=8", marks=pytest.mark.slow),
        pytest.param(T5, "sp=2,fsdp=4", marks=pytest.mark.slow),
    ],
)
def test_mixed_requests_have_the_logits_of_training(
    config: T5Config, mesh: str, random_model: RandomModel
) -> None:
    model = random_model(config, generation_mesh(mesh))
    with Engine(model, SMALL) as engine:
        check_logprobs(engine, model, 5)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp=1", "fsdp=2,tp=2,sp=2"])
def test_preempted_requests_have_them_too(mesh: str, random_model: RandomModel) -> None:
    model = random_model(T5, generation_mesh(mesh))
    with Engine(model, dataclasses.replace(SMALL, pages=17)) as engine:
        check_logprobs(engine, model, 40)
        assert engine.stats().preemptions > 0


@pytest.mark.parametrize("folder", sorted(REFERENCE.iterdir()), ids=lambda folder: folder.name)
def test_greedy_tokens_are_those_of_transformers(folder: Path, numbers: Path) -> None:
    model = load_weights(model_source(folder, tokenizer=str(numbers)), generation_mesh())
    prompts = [row[row != 0].tolist() for row in np.load(folder / "encoder_tokens.npy")]
    expected = np.load(folder / "generated.npy")[:, 1:]
    with Engine(model, SMALL) as engine:
        found = engine.generate([Request(tuple(p), GREEDY, expected.shape[1]) for p in prompts])
    for row, done in zip(expected, found, strict=True):
        ends = np.flatnonzero(row == 1)
        length = ends[0] + 1 if len(ends) else len(row)
        assert done.tokens == tuple(row[:length].tolist())
        assert done.finish_reason == ("stop" if len(ends) else "length")


def test_some_generations_change_from_token_to_token() -> None:
    changes = [
        np.count_nonzero(np.diff(row[1:]))
        for folder in REFERENCE.iterdir()
        for row in np.load(folder / "generated.npy")
    ]
    assert max(changes) > 8


@pytest.mark.parametrize("mesh", ["tp=1", "dp=2,fsdp=2,tp=2"])
def test_generate_gives_the_tokens_of_transformers(mesh: str, numbers: Path) -> None:
    folder = REFERENCE / "t5-1.1"
    model = load_weights(model_source(folder, tokenizer=str(numbers)), generation_mesh(mesh))
    prompts = [row[row != 0].tolist() for row in np.load(folder / "encoder_tokens.npy")]
    expected = np.load(folder / "generated.npy")[:, 1:]
    for row, done in zip(
        expected.tolist(), generate(model, prompts, expected.shape[1], GREEDY), strict=True
    ):
        assert done.ended == (1 in row)
        assert list(done.tokens) == row[: row.index(1)] if done.ended else row


@pytest.mark.slow
def test_every_program_is_compiled_before_the_engine_is_ready(random_model: RandomModel) -> None:
    model = random_model(T5, generation_mesh())
    config = dataclasses.replace(SMALL, compile_first=True, strict=True, pages=17)
    said: list[str] = []
    with Engine(model, config, progress=said.append) as engine:
        requests = [
            Request(prompt, Sampling(0.8, top_k=9, frequency_penalty=0.3, seed=i), 40)
            for i, prompt in enumerate(PROMPTS)
        ]
        together = engine.generate(requests)
        assert engine.stats().preemptions > 0
        for request, done in zip(requests, together, strict=True):
            assert engine.generate([request])[0].tokens == done.tokens
        assert engine.stats().compilations_after_ready == 0
        assert any("whole prompts 2 x 16" in text for text in said)


def test_8_bit_weights_are_near(random_model: RandomModel) -> None:
    model = random_model(T5, generation_mesh("fsdp=2,tp=2"))
    with Engine(model, dataclasses.replace(SMALL, weights="int8")) as engine:
        [done] = engine.generate([Request(PROMPTS[0], GREEDY, 1, logprobs=0)])
    expected = log_probabilities(model.params, T5, PROMPTS[0], done.tokens)[0]
    assert 0 < abs(done.logprobs[0].logprob - expected[done.tokens[0]]) < 0.3


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request((1, 2), max_new=2, prompt_logprobs=0), "an encoder reads the prompt"),
        (Request((1,) * 65, max_new=2), "more than the model's 64; give a shorter prompt"),
        (Request((1,), max_new=65), "more than the model's 64; max_new=64 would fit"),
    ],
)
def test_what_cannot_be_served_is_refused(
    request_: Request, message: str, random_model: RandomModel
) -> None:
    with (
        Engine(random_model(T5, generation_mesh()), SMALL) as engine,
        pytest.raises(MeshwrightError, match=message),
    ):
        engine.generate([request_])


def test_pages_hold_the_longest_prompt_and_output(random_model: RandomModel) -> None:
    model = random_model(T5, generation_mesh())
    with pytest.raises(MeshwrightError, match="give at least 17 pages"):
        Engine(model, dataclasses.replace(SMALL, pages=16))
    with pytest.raises(MeshwrightError, match="the longest must be at least max_length=64"):
        Engine(model, dataclasses.replace(SMALL, prompt_shapes=((2, 16),)))


def test_the_default_shapes_take_every_prompt() -> None:
    from meshwright.serving.prompts import prompt_shapes

    shapes = prompt_shapes(EngineConfig(), preset("t5-small"), {"tp": 8}, 500)
    assert [(shape.prompts, shape.length) for shape in shapes] == [
        (8, 64), (4, 128), (2, 256), (1, 500),
    ]  # fmt: skip
