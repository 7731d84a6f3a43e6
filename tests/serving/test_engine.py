"""The engine computes what the forward pass of training does, whatever else it serves."""

import asyncio
import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tests.patience import PATIENCE_S, eventually
from tests.serving.models import BASE, KINDS, whole_logits

from meshwright.data.tokenizers import HuggingFaceTokenizer
from meshwright.errors import MeshwrightError
from meshwright.models import DecoderConfig
from meshwright.models.decoder import decode_step, layer
from meshwright.ops import PartialSums
from meshwright.serving import (
    Delta,
    Engine,
    EngineConfig,
    Model,
    OverloadedError,
    Replicas,
    Request,
    Sampling,
    start_engine,
)
from meshwright.serving.programs import Programs
from meshwright.serving.source import generation_mesh, load_weights, model_source

RandomModel = Callable[..., Model]
GREEDY = Sampling(temperature=0)
SMALL = EngineConfig(
    max_batch=4, max_length=128, page_size=8, chunk_shapes=((1, 16), (2, 8)), chunk=16,
    batch_buckets=(1,),
)  # fmt: skip
PROMPTS = [
    (5, 9, 2, 60, 33, 7, 7, 1, 0, 12, 50), (3,), (8, 30) * 20, (1, 2, 3, 4) * 5, (9,) * 17,
    (8, 30) * 8 + (1,),
]  # fmt: skip


@pytest.fixture(scope="module")
def model(random_model: RandomModel) -> Model:
    return random_model(BASE, generation_mesh())


@pytest.fixture(scope="module")
def engine(model: Model) -> Iterator[Engine]:
    with Engine(model, dataclasses.replace(SMALL, strict=True)) as engine:
        yield engine


@pytest.fixture(autouse=True)
def _nothing_is_left(engine: Engine) -> Iterator[None]:
    yield
    assert (engine.stats().running, engine.stats().waiting, engine.stats().pages_used) == (0, 0, 0)
    assert engine.stats().compilations_after_ready == 0


def on_demand(model: Model, **changes: Any) -> Engine:
    """An engine that compiles what a test needs."""
    return Engine(model, dataclasses.replace(SMALL, compile_first=False, **changes))


def log_probabilities(params: Any, config: Any, tokens: list[int]) -> np.ndarray:
    """[tokens, vocab], by the forward pass of training."""
    logits = whole_logits(params, config, [tokens])[0].astype(np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def check_logprobs(engine: Engine, model: Model, prompts: list[tuple[int, ...]]) -> None:
    """Log-probabilities of prompts and of greedy tokens are those of the whole sequence."""
    requests = [
        Request(prompt, GREEDY, 6, logprobs=20, prompt_logprobs=20 if i % 2 else None)
        for i, prompt in enumerate(prompts)
    ]
    for request, done in zip(requests, engine.generate(requests), strict=True):
        tokens = [*request.prompt, *done.tokens]
        expected = log_probabilities(model.params, model.config, tokens)
        scores = [*done.prompt_logprobs[1:], *done.logprobs]
        first = len(tokens) - len(scores)
        assert first == (1 if request.prompt_logprobs else len(request.prompt))
        assert len(done.tokens) == 6
        for position, score in enumerate(scores, start=first):
            right, token = expected[position - 1], tokens[position]
            assert score is not None
            np.testing.assert_allclose(score.logprob, right[token], rtol=0, atol=1e-4)
            np.testing.assert_allclose(
                [value for _, value in score.top], np.sort(right)[::-1][:20], rtol=0, atol=1e-4
            )
            if position >= len(request.prompt):
                assert score.rank == 0
                assert token == right.argmax() == score.top[0][0]


def test_mixed_requests_have_the_logits_of_training(engine: Engine, model: Model) -> None:
    check_logprobs(engine, model, PROMPTS)


def test_one_sequence_in_a_program_of_two_as_on_gpus(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Programs, "batches", (2,))
    with on_demand(model, max_batch=1, batch_buckets=None) as engine:
        check_logprobs(engine, model, PROMPTS[:2])


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"experts": 64, "experts_per_token": 4}, marks=pytest.mark.slow),
        {"sliding_window": 5},
    ],
)
def test_so_they_do_by_the_kernels_of_a_decode_step(
    more: dict[str, Any], random_model: RandomModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interpreted, and taken in place of all that a GPU's step is asked for."""
    blocks: list[tuple[str, type]] = []

    def interpreted(block: Any) -> Any:
        def run(x: Any, update: Any, *arrays: Any) -> Any:
            blocks.append((block.__name__, type(update)))
            return block(x, update, *arrays, interpret=True)

        return run

    monkeypatch.setattr(decode_step, "current_platform", lambda: "gpu")
    monkeypatch.setattr(decode_step.DecodeStep, "_runs", lambda *_: True)
    for name in ("attention_block", "experts_block"):
        monkeypatch.setattr(layer, name, interpreted(getattr(decode_step, name)))
    config = DecoderConfig(64, 2, 128, 4, 2, 32, 128, max_seq=256, qk_norm=True, **more)
    model = random_model(config, generation_mesh())
    with on_demand(model, max_batch=2, batch_buckets=None) as engine:
        check_logprobs(engine, model, PROMPTS[:2])
    of_updates = dict.fromkeys(blocks)
    assert ("attention_block", type(None)) in of_updates
    assert (("attention_block", PartialSums) in of_updates) == ("experts" in more)
    assert any(name == "experts_block" for name, _ in of_updates) == ("experts" in more)


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("qwen 3", "tp=1"),
        ("odd vocabulary", "fsdp=2,tp=4"),
        *(pytest.param(kind, "tp=1", marks=pytest.mark.slow) for kind in KINDS if kind != "qwen 3"),
        pytest.param("llama with biases and yarn", "fsdp=2,tp=2,sp=2", marks=pytest.mark.slow),
        pytest.param("qwen 3", "dp=1,tp=8", marks=pytest.mark.slow),
        pytest.param("qwen 2.5", "sp=2,fsdp=4", marks=pytest.mark.slow),
        pytest.param("mistral", "tp=2,dp=1,fsdp=2", marks=pytest.mark.slow),
    ],
)
def test_so_they_do_for_every_kind_on_a_mesh(
    kind: str, mesh: str, random_model: RandomModel
) -> None:
    model = random_model(KINDS[kind], generation_mesh(mesh))
    with on_demand(model, batch_buckets=None, chunk_shapes=((2, 8),)) as engine:
        check_logprobs(engine, model, PROMPTS[:3])


@pytest.mark.slow
def test_kv_heads_are_repeated_where_tp_has_more_devices(random_model: RandomModel) -> None:
    config = dataclasses.replace(KINDS["qwen 2.5"], kv_heads=2)  # with biases
    alone = random_model(config, generation_mesh())
    model = random_model(config, generation_mesh("fsdp=2,tp=4"))
    with on_demand(model, batch_buckets=None, chunk_shapes=((2, 8),)) as engine:
        check_logprobs(engine, alone, PROMPTS[:3])


@pytest.mark.parametrize(
    ("name", "mesh"), [("qwen2.5-tied", "tp=1"), ("mistral-window", "fsdp=2,tp=2")]
)
def test_logits_are_those_of_transformers(name: str, mesh: str, letters: Path) -> None:
    folder = Path(__file__).parents[1] / "models" / "hf_reference" / name
    model = load_weights(model_source(folder, tokenizer=str(letters)), generation_mesh(mesh))
    tokens, logits = np.load(folder / "tokens.npy"), np.load(folder / "logits.npy")
    requests = [Request(tuple(row.tolist()), max_new=0, prompt_logprobs=5) for row in tokens]
    with on_demand(model) as engine:
        found = engine.generate(requests)
    for row, row_logits, done in zip(tokens, logits, found, strict=True):
        right = row_logits - np.log(np.exp(row_logits).sum(-1, keepdims=True))
        scores = done.prompt_logprobs
        assert scores[0] is None
        for i in range(1, len(row)):
            np.testing.assert_allclose(scores[i].logprob, right[i - 1, row[i]], rtol=0, atol=1e-4)
            assert scores[i].top[0][0] == right[i - 1].argmax()
        assert done.tokens == ()


def test_tokens_do_not_depend_on_the_batch(engine: Engine) -> None:
    samplings = [
        GREEDY, Sampling(seed=3), Sampling(0.7, top_k=5, seed=2**32 - 1),
        Sampling(1.3, top_p=0.8, min_p=0.02, seed=4), Sampling(0.9, min_p=0.1, seed=2**31),
    ]  # fmt: skip
    requests = [
        Request(PROMPTS[i % len(PROMPTS)], sampling, 8) for i, sampling in enumerate(samplings)
    ]
    together = engine.generate(requests)
    for request, done in zip(requests, together, strict=True):
        [alone] = engine.generate([request])
        assert alone.tokens == done.tokens


def test_a_prompt_that_begins_as_another_reuses_its_keys(engine: Engine) -> None:
    first = tuple(range(20, 60))
    [fresh] = engine.generate([Request(first, GREEDY, 6)])
    [again] = engine.generate([Request(first, GREEDY, 6)])
    assert (fresh.cached_tokens, again.cached_tokens) == (0, 32)
    assert again.tokens == fresh.tokens
    longer = first + fresh.tokens[:5]  # what was generated is known too
    [more] = engine.generate([Request(longer, GREEDY, 2)])
    assert more.cached_tokens == 40
    assert more.tokens[:1] == fresh.tokens[5:6]


def test_sequences_that_are_preempted_give_the_same_tokens(engine: Engine, model: Model) -> None:
    requests = [
        Request(prompt, Sampling(0.8, frequency_penalty=0.4, seed=i), 30)
        for i, prompt in enumerate(PROMPTS[:4])
    ]
    with on_demand(model, pages=17) as few:
        found = few.generate(requests)
        assert few.stats().preemptions > 0
        assert few.stats().pages_used == 0
    for request, done in zip(requests, found, strict=True):
        assert engine.generate([request])[0].tokens == done.tokens


def penalized(params: Any, request: Request, vocab: int) -> list[int]:
    """Greedy tokens by the definition of the penalties, from the logits of training."""
    tokens, sampling = list(request.prompt), request.sampling
    for _ in range(request.max_new):
        logits = whole_logits(params, BASE, [tokens])[0, -1].astype(np.float64)
        known = np.isin(np.arange(vocab), tokens)
        logits = np.where(
            known & (logits > 0), logits / sampling.repetition_penalty,
            np.where(known, logits * sampling.repetition_penalty, logits),
        )  # fmt: skip
        counts = np.bincount(tokens[len(request.prompt) :], minlength=vocab)
        logits -= sampling.presence_penalty * (counts > 0) + sampling.frequency_penalty * counts
        for token, bias in sampling.logit_bias:
            logits[token] += bias
        tokens.append(int(logits.argmax()))
    return tokens[len(request.prompt) :]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0, repetition_penalty=1.7),
        Sampling(0, presence_penalty=1.5, frequency_penalty=0.7),
        Sampling(0, frequency_penalty=2.0, logit_bias=((7, 3.0), (14, -100.0))),
    ],
)
def test_penalties_and_biases_follow_their_definition(
    sampling: Sampling, engine: Engine, model: Model
) -> None:
    request = Request(PROMPTS[0], sampling, 8)
    plain = Request(PROMPTS[3], GREEDY, 8)
    done, _ = engine.generate([request, plain])
    assert list(done.tokens) == penalized(model.params, request, BASE.vocab)
    [without] = engine.generate([dataclasses.replace(request, sampling=GREEDY)])
    assert without.tokens != done.tokens


def test_generation_stops_at_texts_and_tokens(engine: Engine) -> None:
    [whole] = engine.generate([Request(PROMPTS[0], Sampling(seed=5), 12)])
    assert whole.finish_reason == "length"
    assert whole.text == "".join(map(chr, whole.tokens))
    text = whole.text
    stop = text[5:8]  # of three tokens
    at = text.index(stop)
    request = Request(PROMPTS[0], Sampling(seed=5), 12, stop=("never", stop))
    [done] = engine.generate([request])
    assert (done.text, done.finish_reason) == (text[:at], "stop")
    assert "".join(delta.text for delta in streamed(engine, request)) == text[:at]
    token = whole.tokens[6]
    request = Request(PROMPTS[0], Sampling(seed=5), 12, stop_tokens=frozenset({token}))
    [done] = engine.generate([request])
    first = whole.tokens.index(token)
    assert (done.tokens, done.text) == (whole.tokens[: first + 1], text[:first])


def greedy_without(
    model: Model, prompt: tuple[int, ...], count: int, excluded: Callable[[list[int]], set[int]]
) -> list[int]:
    """Greedy tokens by the forward pass of training; `excluded` are those that may not follow."""
    output: list[int] = []
    for _ in range(count):
        scores = log_probabilities(model.params, model.config, [*prompt, *output])[-1].copy()
        scores[list(excluded(output))] = -np.inf
        output.append(int(scores.argmax()))
    return output


def test_nothing_ends_a_request_before_its_least_tokens(engine: Engine, model: Model) -> None:
    prompt = PROMPTS[0]
    ends = frozenset(greedy_without(model, prompt, 1, lambda _: set()))
    [short] = engine.generate([Request(prompt, GREEDY, 12, stop_tokens=ends)])
    assert list(short.tokens) == list(ends)
    request = Request(prompt, GREEDY, 12, stop_tokens=ends, min_new=6)
    [done] = engine.generate([request])
    expected = greedy_without(model, prompt, 12, lambda out: set(ends) if len(out) < 6 else set())
    last = next((i for i, token in enumerate(expected) if token in ends), 11)
    assert last >= 6
    assert list(done.tokens) == expected[: last + 1]
    tokens = [token for delta in streamed(engine, request) for token in delta.tokens]
    assert tokens == list(done.tokens)


def test_stop_texts_count_after_the_least_tokens(engine: Engine) -> None:
    free = Request(PROMPTS[0], Sampling(seed=5), 12)
    [text] = [done.text for done in engine.generate([free])]
    stop, least = text[5:8], 7
    assert text.index(stop) == 5
    for include in (False, True):
        request = dataclasses.replace(free, stop=(stop,), include_stop=include)
        shown = text[:8] if include else text[:5]
        for min_new, expected in ((0, shown), (least, shown), (least + 1, text)):
            limited = dataclasses.replace(request, min_new=min_new)
            [done] = engine.generate([limited])
            assert done.text == expected
            assert "".join(delta.text for delta in streamed(engine, limited)) == expected


def test_the_text_of_a_stop_token_can_be_included(engine: Engine) -> None:
    [free] = engine.generate([Request(PROMPTS[0], GREEDY, 8)])
    stop = frozenset({free.tokens[3]})
    for include, count in ((False, 3), (True, 4)):
        request = Request(PROMPTS[0], GREEDY, 8, stop_tokens=stop, include_stop=include)
        first = free.tokens.index(free.tokens[3]) - 3
        [done] = engine.generate([request])
        assert (done.text, done.finish_reason) == (free.text[: count + first], "stop")
        assert "".join(delta.text for delta in streamed(engine, request)) == done.text


def test_banned_and_allowed_tokens_follow_their_definition(engine: Engine, model: Model) -> None:
    prompt = PROMPTS[0]
    free = greedy_without(model, prompt, 10, lambda _: set())
    banned = ((free[0],), tuple(free[2:4]), tuple(free[5:8]))

    def forbidden(output: list[int]) -> set[int]:
        return {
            each[-1]
            for each in banned
            if len(each) == 1 or output[-len(each) + 1 :] == list(each[:-1])
        }

    allowed = frozenset({3, 7, *free[1:6]})
    others = set(range(BASE.vocab)) - allowed
    requests = [
        Request(prompt, GREEDY, 10, banned=banned),
        Request(prompt, GREEDY, 10, banned=tuple((token,) for token in free)),
        Request(prompt, GREEDY, 10, allowed=allowed),
        Request(prompt, GREEDY, 10, allowed=allowed, banned=((free[1],),), logprobs=2),
        Request(prompt, GREEDY, 10),  # which does not notice the others
    ]
    expected = [
        greedy_without(model, prompt, 10, forbidden),
        greedy_without(model, prompt, 10, lambda _: set(free)),
        greedy_without(model, prompt, 10, lambda _: others),
        greedy_without(model, prompt, 10, lambda _: others | {free[1]}),
        free,
    ]
    assert expected[0] != free
    assert [list(done.tokens) for done in engine.generate(requests)] == expected
    impossible = Request(prompt, GREEDY, 10, allowed=frozenset({5}), banned=((5, 5),))
    with pytest.raises(MeshwrightError, match="excludes every token that could follow"):
        engine.generate([impossible])


def test_a_salt_keeps_the_cached_keys_of_clients_apart(engine: Engine) -> None:
    prompt = tuple(range(40, 64)) * 2

    def cached(salt: str) -> int:
        [done] = engine.generate([Request(prompt, GREEDY, 2, cache_salt=salt)])
        return done.cached_tokens

    assert [cached("one"), cached("two"), cached("")] == [0, 0, 0]
    assert cached("one") == cached("two") == cached("") > 0


def test_ids_that_the_tokenizer_lacks_are_never_sampled(random_model: RandomModel) -> None:
    """Neither those between its own, nor those that only the model has."""
    ids = [0, 1, 2, 5, 6, 9, 11, 40, 41]
    words = tokenizers.models.WordLevel({f"<{i}>": i for i in ids}, unk_token="<0>")
    tokenizer = HuggingFaceTokenizer(json.loads(tokenizers.Tokenizer(words).to_str()), "<1>")
    assert tokenizer.missing == tuple(sorted(set(range(42)) - set(ids)))
    random = random_model(BASE, generation_mesh())
    model = Model(
        dataclasses.replace(random.source, tokenizer=tokenizer), random.params, random.mesh
    )
    free = Request((5, 9, 2), GREEDY, max_new=60, ignore_end=True)
    anything = dataclasses.replace(free, sampling=Sampling(1000.0, seed=5))
    with on_demand(model) as engine:
        for request in (free, anything, dataclasses.replace(anything, logprobs=2, min_new=30)):
            [done] = engine.generate([request])
            assert len(done.tokens) == 60
            assert set(done.tokens) <= set(ids)


def test_end_tokens_end_a_request_unless_ignored(random_model: RandomModel) -> None:
    model = random_model(BASE, generation_mesh(), frozenset({14}))
    with on_demand(model) as engine:
        [done] = engine.generate([Request(PROMPTS[0], GREEDY, 8)])
        assert (done.tokens[-1], done.finish_reason, 14 in done.tokens[:-1]) == (14, "stop", False)
        [longer] = engine.generate([Request(PROMPTS[0], GREEDY, 8, ignore_end=True)])
        assert len(longer.tokens) == 8


def streamed(engine: Engine, request: Request, most: int | None = None) -> list[Delta]:
    """The deltas of a request; with `most`, the stream is closed after so many."""

    async def run() -> list[Delta]:
        deltas: list[Delta] = []
        stream = engine.stream(request)
        async for delta in stream:
            deltas.append(delta)
            if len(deltas) == most:
                break
        await stream.aclose()  # type: ignore[attr-defined]
        return deltas

    return asyncio.run(run())


def test_a_closed_stream_is_cancelled(engine: Engine) -> None:
    before = engine.stats().finished.get("cancelled", 0)
    deltas = streamed(engine, Request(PROMPTS[2], GREEDY, 80), most=3)
    assert all(delta.finish_reason is None for delta in deltas)
    eventually(lambda: engine.stats().finished.get("cancelled", 0) == before + 1)


def test_a_request_is_cancelled_by_its_id(engine: Engine) -> None:
    async def run() -> list[Delta]:
        deltas = []
        async for delta in engine.stream(Request(PROMPTS[2], GREEDY, 80, id="mine")):
            deltas.append(delta)
            if len(deltas) == 2:
                engine.cancel("mine")
        return deltas

    deltas = asyncio.run(run())
    assert deltas[-1].finish_reason == "cancelled"
    assert len(deltas) < 80


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request((), max_new=2), "prompt 1 is empty"),
        (Request((1, 99), max_new=2), "has token 99; the model has 0 to 63"),
        (Request((1,) * 120, max_new=9), "more than the model's 128; max_new=8 would fit"),
        (Request((1,), max_new=0), "max_new=0 generates nothing"),
        (Request((1,), logprobs=21), "logprobs=21 must be from 0 to 20"),
        (Request((1,), Sampling(logit_bias=((1, 1.0),) * 301)), "has 301 entries; 300 are"),
        (Request((1,), Sampling(logit_bias=((64, 1.0),))), "has token 64; the model has 0 to 63"),
        (Request((1,), stop="ab"), r"stop='ab' must be a tuple .* stop=\('ab',\)"),  # type: ignore[arg-type]
        (Request((1,), stop=(3,)), r"stop=\(3,\) must be a tuple of texts"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_served_is_refused(request_: Request, message: str, engine: Engine) -> None:
    with pytest.raises(MeshwrightError, match=message):
        engine.generate([request_])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_new": 5}, "min_new=5 must be from 0 to max_new, 4"),
        ({"min_new": -1}, "min_new=-1"),
        ({"allowed": frozenset()}, "allowed is empty"),
        ({"allowed": frozenset({9999})}, "allowed has token 9999"),
        ({"banned": ((),)}, "banned has an empty sequence"),
        ({"banned": ((1, -1),)}, "banned has token -1"),
    ],
)
def test_rules_that_cannot_be_followed_are_refused(
    fields: dict[str, Any], message: str, engine: Engine
) -> None:
    with pytest.raises(MeshwrightError, match=message):
        engine.generate([Request((1, 2), max_new=4, **fields)])


def test_an_engine_without_prompt_logprobs_says_how_to_get_them(model: Model) -> None:
    with (
        on_demand(model, prompt_logprobs=False) as engine,
        pytest.raises(MeshwrightError, match=r"EngineConfig\(prompt_logprobs=True\)"),
    ):
        engine.generate([Request((1, 2), prompt_logprobs=0)])


def test_a_length_that_the_model_does_not_have_is_refused(model: Model) -> None:
    with pytest.raises(MeshwrightError, match=r"max_length=257 does .* give 1 to 256"):
        on_demand(model, max_length=257)
    with pytest.raises(MeshwrightError, match="max_length=0 must be at least 1"):
        on_demand(model, max_length=0)


def test_a_full_queue_and_a_closed_engine_refuse_requests(model: Model) -> None:
    engine = on_demand(model, max_waiting=0)
    with pytest.raises(OverloadedError, match="0 requests wait already"):
        streamed(engine, Request((1,)))
    engine.close()
    assert not engine.is_ready
    with pytest.raises(MeshwrightError, match="the engine is closed"):
        engine.generate([Request((1,))])


def unless_it_hangs(run: Callable[[], Any]) -> Any:
    """The result of a call, or its error; a call that hangs fails."""
    results: list[Any] = []

    def target() -> None:
        try:
            results.append(run())
        except MeshwrightError as error:
            results.append(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert results, "the call hangs"
    return results[0]


@pytest.mark.parametrize(
    ("max_batch", "requests"),
    [
        (1, [Request((3,), GREEDY, 2), Request((4, 5), GREEDY, 2)]),
        (2, [Request((i,), GREEDY, 1) for i in range(4)]),  # a batch ends in the step it starts in
    ],
)
def test_requests_that_wait_run_when_a_whole_batch_ends(
    max_batch: int, requests: list[Request], model: Model
) -> None:
    engine = on_demand(model, max_batch=max_batch)
    found = unless_it_hangs(lambda: engine.generate(requests))
    assert [len(done.tokens) for done in found] == [request.max_new for request in requests]
    engine.close()


@pytest.mark.parametrize("streams", [False, True])
def test_a_request_that_is_sent_while_the_engine_closes_is_refused(
    streams: bool, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = on_demand(model)
    checked = engine._job

    def check_and_close(request: Request, sink: Any, *, streams: bool) -> Any:
        job = checked(request, sink, streams=streams)
        engine.close()
        return job

    monkeypatch.setattr(engine, "_job", check_and_close)
    request = Request((1,))
    found = unless_it_hangs(
        lambda: streamed(engine, request) if streams else engine.generate([request])
    )
    assert isinstance(found, MeshwrightError)
    assert "the engine is closed" in str(found)
    engine.cancel("none")  # nothing is left to cancel


def test_compiling_while_serving_is_an_error_in_strict_mode(model: Model) -> None:
    with on_demand(model, strict=True) as engine:
        with pytest.raises(MeshwrightError, match=r"strict: .* would be compiled"):
            engine.generate([Request((1, 2), GREEDY, 2)])
        assert not engine.is_ready


def test_compiling_again_while_serving_is_an_error_in_strict_mode(model: Model) -> None:
    with on_demand(model, strict=True) as engine:
        programs = engine._executor.programs
        programs.is_ready = False
        programs.run("sum", lambda x: x + 1, (), jnp.zeros(3))
        programs.is_ready = True
        programs.run("sum", lambda x: x + 1, (), jnp.ones(3))
        with pytest.raises(MeshwrightError, match=r"strict: sum was compiled again"):
            programs.run("sum", lambda x: x + 1, (), jnp.ones(4))


def test_300_streams_each_give_what_they_give_alone(engine: Engine) -> None:
    kinds = [
        Request(PROMPTS[i % len(PROMPTS)], sampling, 4 + i)
        for i, sampling in enumerate([GREEDY, Sampling(seed=1), Sampling(0.8, top_k=9, seed=2)] * 2)
    ]
    alone = [engine.generate([request])[0].tokens for request in kinds]

    async def tokens_of(request: Request) -> tuple[int, ...]:
        deltas = [delta async for delta in engine.stream(request)]
        assert deltas[-1].finish_reason == "length"
        return tuple(token for delta in deltas for token in delta.tokens)

    async def run() -> list[tuple[int, ...]]:
        return await asyncio.gather(*(tokens_of(kinds[i % len(kinds)]) for i in range(300)))

    found = asyncio.run(run())
    assert found == [alone[i % len(kinds)] for i in range(300)]


def test_replicas_share_requests_and_give_the_same_tokens(
    engine: Engine, random_model: RandomModel
) -> None:
    mesh = generation_mesh("dp=2,tp=2")
    source = random_model(BASE, mesh).source
    requests = [Request(prompt, GREEDY, 5) for prompt in PROMPTS[:3]]
    config = dataclasses.replace(SMALL, compile_first=False)
    with start_engine(source, mesh, config=config) as replicas:
        assert isinstance(replicas, Replicas)
        assert [done.tokens for done in replicas.generate(requests)] == [
            engine.generate([request])[0].tokens for request in requests
        ]
        assert [each.stats().prompt_tokens for each in replicas.engines] == [51, 1]
        assert replicas.stats().finished == {"length": 3}
