"""An engine takes the weights of a trainer, and gives the trainer's log-probabilities for them."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.models.tiny_architectures import MODELS
from tests.serving.models import BASE

import meshwright as mw
from meshwright.data.tokenizers import ByteTokenizer
from meshwright.errors import MeshwrightError
from meshwright.models import LoraConfig, from_hf_config
from meshwright.models.decoder import DecoderConfig
from meshwright.serving import (
    Engine,
    EngineConfig,
    Request,
    Sampling,
    Source,
    generation_mesh,
    load_weights,
    trained_weights,
)
from meshwright.training import (
    AbstractStep,
    TrainConfig,
    abstract_step,
    by_target,
    new_state,
    sample_batch,
)

ONE = "dp=1,fsdp=1,tp=1,sp=1"
ENGINE = EngineConfig(
    max_batch=4, max_length=32, page_size=4, chunk_shapes=((1, 8),), chunk=8, batch_buckets=(4,),
    compile_first=False,
)  # fmt: skip
PROMPTS = [(5, 9, 2), (7, 1, 1, 30, 12, 40, 3, 3, 17, 22, 8), (44,)]
QUICK = ("gpt2", "gemma2")


def trainer(model: Any, mesh: str, **settings: Any) -> AbstractStep:
    config = TrainConfig("tiny", mesh=mesh, batch=4, seq=32, **settings)
    devices = jax.devices()[: np.prod(mw.MeshSpec.parse(mesh).sizes)]
    return abstract_step(config, mw.mesh(mesh, devices=devices, axis_types="explicit"), model)


def params_of(step: AbstractStep, seed: int) -> Any:
    """Matrices with about 1 over the root of their inputs: log-probabilities lie apart."""
    state = new_state(step.arrays, step.state, step.optimizer, step.mesh, seed)
    random = np.random.default_rng(seed)

    def value(spec: Any, array: jax.Array) -> jax.Array:
        noise = random.normal(scale=0.2, size=spec.unpadded_shape).astype(np.float32)
        missing = [(0, have - size) for have, size in zip(array.shape, noise.shape, strict=True)]
        return array + jax.device_put(np.pad(noise, missing).astype(array.dtype), array.sharding)

    with jax.set_mesh(step.mesh):
        return jax.tree.map(value, step.arrays, state.params)


def engine_of(step: AbstractStep, params: Any, mesh: str, **changes: Any) -> Engine:
    read = trained_weights(params, step.compute.adapter_scale)
    source = Source(step.model, ByteTokenizer(), frozenset(), False, "a trainer's", read)
    model = load_weights(source, generation_mesh(mesh), step.compute.dtype)
    return Engine(model, dataclasses.replace(ENGINE, **changes), release=True)


def sampled(engine: Engine, prompts: Any = PROMPTS) -> tuple[list[Any], list[Any]]:
    """Samples, and the log-probabilities that the engine gives them."""
    requests = [
        Request(prompt, Sampling(temperature=1.0, seed=index), 12, logprobs=0)
        for index, prompt in enumerate(prompts)
    ]
    done = engine.generate(requests)
    assert all(one.finish_reason == "length" for one in done)
    samples = [(prompt, one.tokens) for prompt, one in zip(prompts, done, strict=True)]
    return samples, [[token.logprob for token in one.logprobs] for one in done]


def difference(step: AbstractStep, params: Any, samples: Any, logprobs: Any) -> Any:
    """The largest between the log-probabilities of the engine and of the trainer's own program."""
    batch = sample_batch(step, samples)
    own = np.asarray(step.functions.log_probs(params, batch))
    assert own.min() < -3  # so that 1e-5 says something
    return np.abs(own - np.asarray(by_target(step, samples, logprobs))).max()


def hf_config(name: str) -> Any:
    transformers: Any = pytest.importorskip("transformers", reason="the names of its fields")
    kind, fields = MODELS[name]
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return from_hf_config(getattr(transformers, kind)(**fields, **special).to_dict())


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else (pytest.mark.slow,)) for n in MODELS]
)
def test_log_probabilities_of_samples_are_the_trainers(name: str) -> None:
    """Float32; those of llama and qwen 3 are in the tests below."""
    step = trainer(hf_config(name), ONE)
    params = params_of(step, 1)
    with engine_of(step, params, ONE) as engine:
        samples, logprobs = sampled(engine)
    assert difference(step, params, samples, logprobs) <= 1e-5


@pytest.mark.parametrize(
    ("model", "trained_on", "served_on", "lora"),
    [
        # a vocabulary that tp pads, and more devices of tp than KV heads
        pytest.param(
            dataclasses.replace(BASE, vocab=61, kv_heads=2),
            "dp=2,fsdp=2,tp=2,sp=1",
            "tp=4",
            0,
            marks=pytest.mark.slow,
        ),
        # qwen 3, from all devices to some; the adapter is merged
        (dataclasses.replace(BASE, qk_norm=True), "dp=1,fsdp=4,tp=1,sp=2", "fsdp=2,tp=2", 4),
    ],
)
def test_weights_go_from_any_mesh_to_any_mesh(
    model: DecoderConfig, trained_on: str, served_on: str, lora: int, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {}
    if lora:
        settings = {"lora": LoraConfig(rank=lora), "init_from": tmp_path}
    step = trainer(model, trained_on, **settings)
    first, second = params_of(step, 1), params_of(step, 2)
    long = [tuple(range(20)), *PROMPTS]
    with engine_of(step, first, served_on) as engine:
        before = sampled(engine, long)
        assert difference(step, first, *before) <= 1e-5
        assert engine.generate([Request(long[0], max_new=2)])[0].cached_tokens == 16
        compiled = engine.stats().compilations_after_ready
        engine.update_weights(second, step.compute.adapter_scale)
        [again] = engine.generate([Request(long[0], max_new=2)])
        assert again.cached_tokens == 0  # whose keys were those of the first weights
        after = sampled(engine, long)
        assert engine.stats().compilations_after_ready == compiled
        assert difference(step, second, *after) <= 1e-5
        assert difference(step, first, *after) > 0.1
        jax.tree.map(lambda array: array.delete(), second)  # as a step that donates them
        assert sampled(engine, long) == after


def test_the_trainers_program_gives_a_sample_the_same_bits_in_every_batch() -> None:
    """So the scores at sampling time are those of the update, bit for bit."""
    for dtype in ("float32", "bfloat16"):
        compute = mw.TrainConfig("tiny").compute
        step = trainer(BASE, ONE, compute=dataclasses.replace(compute, dtype=dtype))
        params = params_of(step, 1)
        random = np.random.default_rng(0)
        samples = [
            (random.integers(0, 64, n).tolist(), random.integers(0, 64, 9).tolist())
            for n in (3, 11, 1, 20)
        ]
        whole, turned = (
            np.asarray(step.functions.log_probs(params, sample_batch(step, some)))[0]
            for some in (samples, samples[::-1])
        )
        alone = np.asarray(step.functions.log_probs(params, sample_batch(step, samples[:1])))[0]
        np.testing.assert_array_equal(whole, turned[::-1])
        np.testing.assert_array_equal(whole[0], alone[0])
        assert whole.dtype == np.float32


def test_what_cannot_be_taken_is_refused(tmp_path: Path) -> None:
    step = trainer(BASE, ONE)
    params = params_of(step, 1)
    with engine_of(step, params, ONE) as engine:
        before = sampled(engine)
        other = params_of(trainer(dataclasses.replace(BASE, layers=3), ONE), 1)
        with pytest.raises(MeshwrightError, match=r"not those of the engine's model: layers/"):
            engine.update_weights(other)
        with pytest.raises(MeshwrightError, match=r"embedding is missing"):
            engine.update_weights({n: tree for n, tree in params.items() if n != "embedding"})
        quantized = trainer(BASE, ONE, lora=LoraConfig(4, base="int8"), init_from=tmp_path)
        with pytest.raises(MeshwrightError, match="cannot take frozen weights in 8 or 4 bits"):
            engine.update_weights(quantized.state.params)
        with pytest.raises(
            MeshwrightError, match="have an adapter, which is merged with its scale"
        ):
            engine.update_weights(params | {"adapter": {}})
        used_up = jax.tree.map(jnp.copy, params)
        used_up["embedding"].delete()
        with pytest.raises(MeshwrightError, match="are those before a train step"):
            engine.update_weights(used_up)
        assert sampled(engine) == before
    with pytest.raises(MeshwrightError, match="closed"):
        engine.update_weights(params)


def test_requests_must_have_ended() -> None:
    step = trainer(BASE, ONE)
    params = params_of(step, 1)
    with engine_of(step, params, ONE) as engine:
        engine.submit([Request((1, 2), max_new=28, id="long")], lambda *_: None)
        with pytest.raises(MeshwrightError, match="1 request runs; update the weights when"):
            engine.update_weights(params)
        engine.cancel("long")
        engine.update_weights(params)
