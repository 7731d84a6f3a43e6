"""What a plan of serving says, against the engine: its speed on a GPU, its arrays, its defaults."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from tests.planner.workloads import workload

from meshwright.cli.commands import run as run_command
from meshwright.errors import MeshwrightError
from meshwright.meshes import mesh as build_mesh
from meshwright.models import ADAPTER, DecoderConfig, LoraConfig, preset, serving_of
from meshwright.planner import plan
from meshwright.planner.memory import memory
from meshwright.planner.result import Estimate
from meshwright.planner.schedules.engine_time import prefill
from meshwright.planner.serving import WEIGHTS, second_formulas
from meshwright.planner.step import StepModel
from meshwright.planner.workload import Choice
from meshwright.serving import EngineConfig
from meshwright.serving.abstract_weights import adapter_targets, targets
from meshwright.serving.settings import served_config

# benchmarks/serve.py, one H200, bfloat16: 512 tokens of context and 128 new ones, 576 on average
LLAMA_8B = preset("llama-3.1-8b")
LLAMA_1B = dataclasses.replace(preset("llama-3.2-1b"), tied_embeddings=False)  # 1.5B parameters
CONTEXT = 576
DECODE = [
    (LLAMA_8B, 1, 228), (LLAMA_8B, 32, 6_207), (LLAMA_8B, 128, 15_778),
    (LLAMA_1B, 1, 647), (LLAMA_1B, 32, 18_226), (LLAMA_1B, 128, 58_747),
]  # fmt: skip
# two constants are fitted to batch 1, one to batch 128: the rest follows
TOLERANCE = 0.05
PREFILL = 35_276  # tokens/s of 8B: prompts of 1,024 tokens, two in a step, beside 256 places


def served(model: Any, on: str, batch: int, seq: int, **settings: Any) -> Estimate:
    return plan(model, on, batch, seq, kind="serve", **settings).best


@pytest.mark.parametrize(("model", "batch", "measured"), DECODE)
def test_decode_is_as_fast_as_measured(model: DecoderConfig, batch: int, measured: float) -> None:
    best = served(model, "h200:1", batch, CONTEXT, weights="plain")
    assert batch / best.step_seconds == pytest.approx(measured, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("batch", "weights", "measured"),
    # one constant is fitted to the second; the third follows from experts alone
    [(32, "plain", 2_113), (128, "plain", 5_404), (32, "fp8", 2_332)],
)
def test_experts_are_as_fast_as_measured(batch: int, weights: str, measured: float) -> None:
    """One sequence is planned a third too slow: it does not wait for launches as 1.5B did."""
    best = served(preset("qwen3-30b-a3b"), "h200:1", batch, CONTEXT, weights=weights)
    assert batch / best.step_seconds == pytest.approx(measured, rel=0.2)


def test_prompts_are_computed_as_fast_as_measured() -> None:
    run = workload(LLAMA_8B, "h200:1", 256, 1024, serve=True)
    run = dataclasses.replace(run, engine=EngineConfig(chunk=2048))
    seconds = prefill(StepModel(run, Choice.of()), prompts=2)
    assert 2 * 1024 / seconds == pytest.approx(PREFILL, rel=TOLERANCE)


def test_a_small_model_waits_for_launches_and_a_large_one_for_memory() -> None:
    assert served(LLAMA_1B, "h200:1", 1, CONTEXT).bound == "idle"
    assert served(LLAMA_8B, "h200:1", 1, CONTEXT).bound == "memory"
    # a TPU runs a step as one program
    assert "idle" not in served(LLAMA_1B, "v5e:1x1", 1, CONTEXT).seconds


def test_each_mesh_is_listed_with_each_kind_of_weights() -> None:
    found = plan(LLAMA_8B, "h100:4", 64, 2048, kind="serve")
    listed = {(one.choice.mesh, one.choice.weights) for one in found.ranked}
    meshes = {mesh for mesh, _ in listed}
    assert len(meshes) == 3
    assert listed == {(mesh, weights) for mesh in meshes for weights in WEIGHTS}
    # weights that change what a model says come last, in groups of their own
    order = [WEIGHTS.index(one.choice.weights) for one in found.ranked]
    assert order == sorted(order)
    kinds: dict[int, set[str | None]] = {}
    for one in found.ranked:
        kinds.setdefault(one.group, set()).add(one.choice.weights)
    assert all(len(weights) == 1 for weights in kinds.values())
    for weights in ("plain", "int8", "fp8"):
        only = plan(LLAMA_8B, "h100:4", 64, 2048, kind="serve", weights=weights)
        assert {one.choice.weights or "plain" for one in only.ranked} == {weights}


def test_eight_bits_read_half_and_leave_room_for_sequences() -> None:
    plain, quantized = (served(LLAMA_8B, "h100:1", 1, 512, weights=w) for w in ("plain", "int8"))
    assert quantized.seconds["weights"] == pytest.approx(plain.seconds["weights"] / 2)
    assert plain.serving is not None
    assert quantized.serving is not None
    assert quantized.serving.largest_batch > plain.serving.largest_batch


def test_a_cache_of_eight_bits_takes_and_reads_half() -> None:
    plain, small = (served(LLAMA_8B, "h100:1", 32, 4096, cache=c) for c in (None, "fp8"))
    assert small.seconds["cache"] == pytest.approx(plain.seconds["cache"] / 2)
    held = [one.memory.kinds["key-value cache"] for one in (plain, small)]
    assert held[1] == pytest.approx(held[0] / 2)
    assert small.serving is not None
    assert plain.serving is not None
    assert small.serving.largest_batch > 1.9 * plain.serving.largest_batch


def test_what_an_engine_does_not_take_by_default_comes_last() -> None:
    """70B: 131 GiB of weights in bfloat16, and a GPU that gives 133."""
    found = plan("llama-3.1-70b", "h200:1", 1, 2048, kind="serve")
    assert [one.choice.weights for one in found.ranked] == ["int8", "fp8", None]
    assert "more than the 90% of memory that an engine takes" in found.ranked[-1].reason


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(
    "model", ["llama-3.2-1b", "llama-3.1-8b", "qwen2.5-7b", "t5-base", "flan-t5-xl"]
)
def test_weights_take_what_the_engines_arrays_take(model: str, weights: str | None) -> None:
    config = preset(model)
    stacks = ("layers", "encoder_layers", "decoder_layers")
    config = dataclasses.replace(config, **{name: 2 for name in stacks if hasattr(config, name)})
    serving = serving_of(config)
    mesh = build_mesh("dp=1,fsdp=1,tp=1,sp=1", devices=jax.devices()[:1])
    params = targets(config, mesh, jnp.bfloat16)
    with jax.set_mesh(mesh):
        arrays = jax.eval_shape(lambda params: serving.weights(params, config, weights), params)
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays))
    run = workload(config, "h100:1", 8, 512, serve=True)
    kinds = memory(StepModel(run, Choice.of(weights=weights))).kinds
    assert kinds["parameters"] == size


@pytest.mark.parametrize(
    ("name", "tp"), [("llama-3.2-1b", 2), ("qwen2.5-7b", 1), ("qwen2.5-1.5b", 4)]
)
def test_slots_of_adapters_are_as_large_as_the_engines(name: str, tp: int) -> None:
    config = dataclasses.replace(preset(name), layers=2)
    mesh = build_mesh(
        f"dp=1,fsdp=1,tp={tp},sp=1", devices=jax.devices()[:tp], axis_types="explicit"
    )
    engine = EngineConfig(max_adapters=3, max_adapter_rank=8)
    held = served_config(config, mesh.shape)
    factors = adapter_targets(held, LoraConfig(8), mesh)[ADAPTER]
    with jax.set_mesh(mesh):
        one = jax.eval_shape(serving_of(held).adapter, factors)
    numbers = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(one))
    run = workload(config, f"h100:{tp}", 8, 512, serve=True)
    choice = Choice.of(tp=tp)
    with_slots = memory(StepModel(dataclasses.replace(run, engine=engine), choice)).kinds
    without = memory(StepModel(run, choice)).kinds
    assert with_slots["parameters"] - without["parameters"] == 3 * 2 * numbers


def test_adapters_are_planned_with_flags(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "llama-3.1-8b", "--on", "h100:1", "--serve", "--batch", "8", "--seq", "512"]
    run_command([*words, "--engine.max-adapters", "8"])
    said = capsys.readouterr().out.replace(" \\\n     ", "")
    assert "--engine.max-adapters 8 --engine.max-adapter-rank 16" in said
    seconds = [
        served(LLAMA_8B, "h100:1", 8, 512, weights="plain", **slots).step_seconds
        for slots in ({}, {"max_adapters": 8}, {"max_adapters": 8, "max_adapter_rank": 64})
    ]
    assert seconds == sorted(set(seconds))
    with pytest.raises(MeshwrightError, match="max_adapters=8 is of serving, and training"):
        plan(LLAMA_8B, "h100:1", 8, 512, max_adapters=8)
    with pytest.raises(MeshwrightError, match="only decoders take adapters by name"):
        plan("t5-small", "h100:1", 8, 512, kind="serve", max_adapters=8)


def test_the_cache_is_whole_pages_and_one_for_scratch() -> None:
    run = workload(LLAMA_8B, "h100:8", 64, 1000, serve=True)
    kinds = memory(StepModel(run, Choice.of(dp=2, tp=4))).kinds
    numbers = 2 * LLAMA_8B.layers * LLAMA_8B.kv_heads * LLAMA_8B.head_dim
    page = EngineConfig().page_size * numbers * 2 // 4
    assert kinds["key-value cache"] == page * (32 * math.ceil(1000 / 64) + 1)


def test_the_largest_batch_fills_the_engines_part_of_memory() -> None:
    found = plan(LLAMA_8B, "h100:1", 8, 2048, kind="serve", weights="plain")
    assert found.best.serving is not None
    full = found.best.serving.largest_batch
    assert full == found.largest_batch
    part = EngineConfig().memory_fraction
    for batch, fits in ((full, True), (full + 1, False)):
        need = memory(StepModel(found.workload.resized(batch), found.best.choice))
        assert (need.total <= part * need.limit) == fits


def test_a_longer_prompt_takes_longer_to_its_first_token() -> None:
    times = []
    for seq in (512, 1024, 8192):
        best = served(LLAMA_8B, "h200:1", 8, seq)
        assert best.serving is not None
        times.append(best.serving.first_token_seconds)
    assert times == sorted(times)
    assert times[2] > 16 * times[0]  # 16 chunks, and keys of those before
    # and tp shares it
    found = plan(LLAMA_8B, "h200:8", 8, 8192, kind="serve", weights="plain", mesh="tp=8").best
    assert found.serving is not None
    assert times[2] / 8 < found.serving.first_token_seconds < times[2]


def test_every_part_of_a_step_has_its_formula() -> None:
    found = plan(LLAMA_8B, "h200:8", 64, 2048, kind="serve")
    for one in found.ranked:
        said = second_formulas(StepModel(found.workload, one.choice), one)
        assert {*said} == {part for part, seconds in one.seconds.items() if seconds} | {
            "first token"
        }
        tokens = EngineConfig().chunk + 64 // one.choice.size("dp")
        assert f"{tokens} tokens" in said["first token"]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"kind": "serve", "weights": "int4"}, "weights='int4' is not known; did you mean 'int8'?"),
        ({"weights": "int8"}, "weights='int8' is of serving, and training is planned"),
    ],
)
def test_weights_that_cannot_be_are_refused(said: dict[str, Any], words: str) -> None:
    with pytest.raises(MeshwrightError) as error:
        plan(LLAMA_8B, "h100:8", 8, 512, **said)
    assert words in str(error.value)


def test_more_tokens_than_an_engine_serves_are_refused() -> None:
    model = dataclasses.replace(LLAMA_8B, max_seq=8192)
    assert plan(model, "h100:8", 8, 8192, kind="serve").ranked
    with pytest.raises(MeshwrightError, match=r"seq=8,193 does not fit .* has 8,192 positions"):
        plan(model, "h100:8", 8, 8193, kind="serve")
