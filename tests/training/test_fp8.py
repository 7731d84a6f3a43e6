"""Training with matmuls in fp8: on every mesh as on one device, and as well as in float32."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from tests.training.toy import CONFIG, Setting, train

import meshwright as mw
from meshwright.errors import MeshwrightError
from meshwright.machines import CHIPS, Machine
from meshwright.models import Compute, abstract_arrays, blocks, preset
from meshwright.models.decoder import decoder_rules
from meshwright.ops import Fp8Weight
from meshwright.planner import Workload
from meshwright.planner.step import StepModel
from meshwright.planner.workload import Choice
from meshwright.training import TrainConfig, abstract_step, with_settings
from meshwright.training.compute import check_fp8, matmuls_text
from meshwright.training.config import ComputeConfig

slow = pytest.mark.slow
FP8 = Setting(matmul="fp8", steps=5)
EDGES = dataclasses.replace(FP8, fp8_skips=1, config=dataclasses.replace(CONFIG, layers=4))


@functools.cache
def on_one_device(setting):
    return train(setting)


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(dataclasses.replace(FP8, mesh="dp=1,fsdp=8,tp=1,sp=1"), id="fsdp", marks=slow),
        pytest.param(dataclasses.replace(FP8, mesh="dp=1,fsdp=2,tp=2,sp=2"), id="sp", marks=slow),
        pytest.param(dataclasses.replace(EDGES, mesh="dp=2,fsdp=2,tp=2,sp=1"), id="edges", marks=slow),
        pytest.param(dataclasses.replace(EDGES, mesh="dp=1,fsdp=4,tp=2,sp=1", scan=False, remat="full"), id="unrolled", marks=slow),
    ],
)  # fmt: skip
def test_losses_and_gradient_norms_on_eight_devices_are_those_of_one(setting):
    one, _ = on_one_device(dataclasses.replace(setting, mesh=Setting.mesh, scan=True, remat="none"))
    found, _ = train(setting)
    np.testing.assert_allclose(found[0], one[0], rtol=1e-5)
    # later, a sum in another order may round a number of 8 bits the other way
    np.testing.assert_allclose(found, one, rtol=5e-3)
    exact, _ = on_one_device(
        dataclasses.replace(setting, mesh=Setting.mesh, scan=True, remat="none", matmul="auto")
    )
    assert np.abs(one[0] / exact[0] - 1).max() > 1e-4  # fp8 is seen in the first step already


@slow  # benchmarks/real_text.py compares real runs
def test_a_hundred_steps_in_fp8_learn_as_much_as_in_float32():
    def last(setting):
        return train(dataclasses.replace(setting, steps=100))[0][-20:, 0].mean()

    exact, found = last(Setting()), last(FP8)
    assert exact < 0.75 * train(dataclasses.replace(Setting(), steps=1))[0][0, 0]  # it learns
    assert found == pytest.approx(exact, rel=0.03)


def test_settings_that_fp8_cannot_have_are_refused():
    config = with_settings(TrainConfig("tiny"), {"compute.matmul": "fp8"})
    with pytest.raises(MeshwrightError, match="a100-80 has no fp8 units"):
        check_fp8(config, preset("tiny"), CHIPS["a100-80"])
    with pytest.raises(MeshwrightError, match="v4 has no fp8 units"):
        mw.plan("llama-3.1-8b", "v4:4x4x4", 64, 4096, matmul="fp8")
    with pytest.raises(MeshwrightError, match="fp8_skips=2 leaves none of 4 layers"):
        abstract_step(with_settings(config, {"compute.fp8_skips": 2}))
    with pytest.raises(MeshwrightError, match="mlp_chunk"):
        with_settings(config, {"compute.mlp_chunk": 64})


@pytest.mark.parametrize(
    ("settings", "model", "chip", "words"),
    [
        ({}, "llama-3.2-1b", "h200", None),
        ({"fp8_skips": 1}, "llama-3.2-1b", "h200", "note: --compute.fp8-skips has no effect"),
        ({"matmul": "fp8"}, "llama-3.2-1b", "h200", "fp8 in 16 of 16 layers (e4m3, gradients e5m2)"),
        ({"matmul": "fp8", "fp8_skips": 1}, "t5-small", "cpu", "fp8 in 8 of 12 layers (simulated"),
        ({"matmul": "fp8"}, "llama-3.2-1b", "v6e", "v6e has the same peak in bfloat16"),
        ({"matmul": "fp8"}, "mixtral-8x7b", "h200", "in 32 of 32 layers (e4m3, gradients e5m2)"),
        ({"matmul": "fp8"}, "qwen3-30b-a3b", "h200", "matrices 768 wide are slower in it, under 1024)"),
        ({"matmul": "fp8"}, "qwen3-30b-a3b", "7x", "; not of experts: only Hopper GPUs gain by it)"),
        ({"matmul": "fp8"}, "tiny-moe", "h200", "matrices 128 wide are slower in it, under 1024)"),
        ({"matmul": "fp8"}, "gpt-oss-20b", "h100", "needs matrices of multiples of 128, these are (2880, 2880))"),
        ({"matmul": "fp8", "dtype": "float32"}, "mixtral-8x7b", "h100", "is for bfloat16, not float32)"),
    ],
)  # fmt: skip
def test_a_run_says_how_many_layers_are_in_fp8(settings, model, chip, words):
    text = matmuls_text(ComputeConfig(**settings), preset(model), CHIPS[chip])
    assert text is words is None or words in text


@pytest.mark.parametrize(
    ("width", "dtype", "expected"),
    [(2048, "bfloat16", True), (1536, "bfloat16", False), (2176, "bfloat16", False), (2048, "float32", False)],
)  # fmt: skip
def test_experts_are_rounded_to_fp8_only_where_the_kernel_takes_them(
    width, dtype, expected, monkeypatch
):
    """As a step for Hopper GPUs is traced, with tp=2; and as its plan counts it."""
    monkeypatch.setattr(blocks, "current_device", lambda: ("gpu", "NVIDIA H100 80GB HBM3"))
    config = dataclasses.replace(preset("tiny-moe"), embed=1024, mlp=width)
    every = abstract_arrays(config)
    compute = Compute(decoder_rules(), dtype, matmul="fp8")
    mesh = mw.mesh("dp=1,fsdp=2,tp=2,sp=1", devices=jax.devices()[:4], axis_types="explicit")
    specs, shardings = (
        tree["layers"]["mlp"] for tree in (every, mw.shardings(every, compute.rules, mesh=mesh))
    )
    arrays = {
        name: jax.ShapeDtypeStruct(spec.shape, dtype, sharding=shardings[name])
        for name, spec in specs.items()
    }
    with jax.set_mesh(mesh):
        ready = jax.eval_shape(
            lambda arrays: blocks.prepare_weights({"mlp": arrays}, {"mlp": specs}, compute), arrays
        )["mlp"]
    assert [isinstance(ready[name], Fp8Weight) for name in ("gate", "up", "down")] == [expected] * 3
    run = Workload.of(
        with_settings(TrainConfig("tiny-moe"), {"compute.matmul": "fp8", "compute.dtype": dtype}),
        Machine.parse("h100:4"), config,
    )  # fmt: skip
    assert run.fp8_layers(1, "expert", tensor=2) == expected


@pytest.mark.parametrize("matmul", ["auto", "fp8"])
def test_fsdp_gathers_the_weights_of_layers_in_eight_bits(matmul):
    config = with_settings(
        TrainConfig("tiny", batch=8, seq=64),
        {"compute.matmul": matmul, "compute.dtype": "bfloat16", "compute.layers": "unroll"},
    )
    mesh = mw.mesh("dp=1,fsdp=8,tp=1,sp=1", devices=jax.devices()[:8], axis_types="explicit")
    text = abstract_step(config, mesh).lower().as_text()
    gathered = re.findall(r'stablehlo.all_gather"?.*-> tensor<(?:\d+x)*(\w+)>', text)
    # layers of equal programs stand there once: 7 matrices of those in fp8, forward and backward
    assert gathered.count("f8E4M3FN") >= (14 if matmul == "fp8" else 0)
    assert ("f8E4M3FN" in gathered) == (matmul == "fp8")
    assert "f8E5M2" not in gathered
    assert not re.search(r"reduce_scatter[^\n]*f8E", text)  # gradients go in bfloat16


@pytest.mark.parametrize(
    ("model", "least", "most"),
    # experts of 1024 gain little: quantizing takes longer the narrower they are
    [("llama-3.1-8b", 1.4, 1.59), ("mixtral-8x7b", 1.4, 1.6), ("olmoe-1b-7b", 1.05, 1.2)],
)
def test_the_plan_counts_faster_matmuls_and_smaller_all_gathers(model, least, most):
    machine, choice = Machine.parse("h200:1x8"), Choice.of(fsdp=8, remat="full")
    config = TrainConfig(model, batch=64, seq=4096)
    found = {}
    for matmul in ("auto", "fp8"):
        run = Workload.of(with_settings(config, {"compute.matmul": matmul}), machine)
        gathers = [
            one for one in StepModel(run, choice).written if "weights of a layer" in one.what
        ]
        gathered = sum(one.bytes * one.times for one in gathers if one.operation == "all-gather")
        found[matmul] = gathered, StepModel(run, choice).work.seconds["matmuls"]
    # 1 byte instead of 2
    assert found["fp8"][0] == pytest.approx(found["auto"][0] / 2)
    assert least < found["auto"][1] / found["fp8"][1] < most
