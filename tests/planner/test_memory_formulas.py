"""Every formula that `--explain` shows, worked out, gives the bytes that the plan counts."""

import dataclasses
import io
import itertools
import math
import re
from typing import Any, Literal

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console
from tests.planner.workloads import workload

from meshwright.models import preset
from meshwright.models.decoder import abstract_arrays
from meshwright.planner import Plan, plan
from meshwright.planner.memory import formulas, memory, peak_bytes
from meshwright.planner.report import explain, report
from meshwright.planner.report.explain import SMALL
from meshwright.planner.result import Estimate
from meshwright.planner.step import StepModel
from meshwright.planner.time import byte_formulas
from meshwright.planner.workload import Choice
from meshwright.training.optimizer import OptimizerConfig, make_optimizer


def explained(found: Plan, one: Estimate) -> str:
    """The text of `--explain`, its lines joined."""
    out = io.StringIO()
    Console(file=out, width=100).print(explain(found, one, 100))
    return " ".join(out.getvalue().split())


def worked_out(formula: str) -> float:
    """A formula's value: its words are left out, what stays is arithmetic."""
    text = re.sub(r"[a-z]+", "", formula).replace(",", "").replace("·", "*")
    assert re.fullmatch(r"[\d.()+*/ ]+", text), formula
    return float(eval(text))


CHOICES = [
    Choice.of(fsdp=8),
    Choice.of(dp=8, remat="elementwise"),
    Choice.of(fsdp=4, tp=2, remat="mlp", accumulation=2),
    Choice.of(fsdp=2, tp=2, sp=2, context_parallel="ring", sequence_parallel=True, mlp_chunk=1024),
    Choice.of(fsdp=4, sp=2, context_parallel="allgather", remat="full", accumulation=2),
    Choice.of(fsdp=4, sp=2, context_parallel="ulysses", remat="full"),
    Choice.of(fsdp=4, sp=2),
]


MODELS = ("llama-3.1-8b", "llama-3.2-1b", "qwen3-4b", "mistral-7b")
SETTINGS = list(
    itertools.product(
        ("v5e:2x4", "v5p:2x2x2", "h100:8"), (256, 8192), ("adamw", "muon", "lion", "adafactor")
    )
)


def fullest(step: StepModel) -> str:
    found = peak_bytes(step)
    return max(found, key=lambda moment: found[moment])


@pytest.mark.parametrize("choice", CHOICES, ids=lambda one: f"{one.mesh} {one.remat}")
@pytest.mark.parametrize("model", MODELS)
def test_a_formula_gives_what_is_counted(model: str, choice: Choice) -> None:
    for (on, seq, optimizer), overlap in itertools.product(SETTINGS, ("off", "on")):
        step = StepModel(
            workload(preset(model), on, 16, seq, optimizer=optimizer, overlap=overlap), choice
        )
        kinds, said = memory(step).kinds, formulas(step)
        assert said.keys() == kinds.keys()
        for kind, words in said.items():
            assert worked_out(words) == pytest.approx(kinds[kind], rel=1e-3, abs=2), (kind, words)


@pytest.mark.parametrize("kind", ["train", "serve"])
def test_a_formula_counts_the_padding_of_the_vocabulary(kind: Literal["train", "serve"]) -> None:
    config = dataclasses.replace(preset("llama-3.1-8b"), vocab=128257)
    served = kind == "serve"
    for choice in (Choice.of(dp=2, tp=4), Choice.of(fsdp=2 if kind == "train" else 1, tp=4)):
        step = StepModel(workload(config, "h100:8", 16, 1024, serve=served), choice)
        kinds, said = memory(step).kinds, formulas(step)
        for name, words in said.items():
            assert worked_out(words) == pytest.approx(kinds[name], rel=1e-3, abs=2), (name, words)


def test_each_moment_is_the_fullest_of_some_job() -> None:
    seen = {
        fullest(StepModel(workload(preset(model), on, 16, seq), choice))
        for model, choice, (on, seq, _) in itertools.product(MODELS, CHOICES, SETTINGS)
    }
    assert seen == {"loss", "backward", "attention", "end"}


@pytest.mark.parametrize("model", ["llama-3.1-8b", "llama-3.2-1b", "qwen2.5-7b", "qwen3-4b"])
def test_parameters_are_counted_as_the_models_arrays_are(model: str) -> None:
    config = preset(model)
    leaves = jax.tree.leaves(abstract_arrays(config))
    bytes_of_all = 4 * sum(math.prod(leaf.shape) for leaf in leaves)
    said = formulas(StepModel(workload(config, "h100:1", 8, 1024), Choice.of()))
    assert worked_out(said["parameters"]) == bytes_of_all


MOMENTS = list(itertools.product(("adamw", "lion"), ("auto", "float32", "bfloat16", "int8")))


@pytest.mark.parametrize(
    ("optimizer", "moments"), [*MOMENTS, ("muon", "auto"), ("muon", "bfloat16")]
)
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_moments_are_counted_as_the_optimizers_state_is(
    param_dtype: str, optimizer: str, moments: Any
) -> None:
    config = preset("llama-3.2-1b")
    arrays = abstract_arrays(config, jnp.dtype(param_dtype))
    made, _ = make_optimizer(OptimizerConfig(optimizer, moments=moments), 10, arrays)
    state = jax.tree.leaves(jax.eval_shape(made.init, arrays))
    kept = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in state if leaf.ndim > 1)
    settings = {"optimizer": optimizer, "moments": moments, "param_dtype": param_dtype}
    said = formulas(StepModel(workload(config, "h100:1", 8, 1024, **settings), Choice.of()))
    assert worked_out(said["optimizer"]) == pytest.approx(kept, rel=1e-5)  # and norms


def test_a_plan_says_what_fewer_bits_in_moments_save() -> None:
    usual = plan("llama-3.1-8b", "h100:8", 64, 4096, mesh="fsdp=8")
    fewer = plan("llama-3.1-8b", "h100:8", 64, 4096, mesh="fsdp=8", moments="int8")
    saved = usual.best.memory.kinds["optimizer"] - fewer.best.memory.kinds["optimizer"]
    assert saved == pytest.approx(6 * 8_030_261_248 / 8, rel=1e-3)
    out = io.StringIO()
    Console(file=out, width=100).print(report(fewer, 100))
    assert (
        f"adamw with moments in int8 (saves {saved / 2**30:.1f} GiB of a device)" in out.getvalue()
    )
    assert fewer.largest_batch > usual.largest_batch


@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("tp", [1, 4])
def test_a_formula_of_serving_gives_what_is_counted(tp: int, weights: str | None) -> None:
    served = workload(preset("llama-3.1-8b"), "h100:8", 64, 16384, serve=True)
    step = StepModel(served, Choice.of(dp=8 // tp, tp=tp, weights=weights))
    kinds, said = memory(step).kinds, formulas(step)
    assert {kind: pytest.approx(worked_out(said[kind]), abs=2) for kind in said} == kinds


def test_explain_shows_formulas_the_moments_and_the_reserve() -> None:
    found = plan("llama-3.1-8b", "h100:8", 64, 4096, mesh="tp=2,sp=1,dp=1")
    text = explained(found, found.best)
    said = formulas(StepModel(found.workload, found.best.choice))
    for kind, words in said.items():
        assert f"{words} = {found.best.memory.kinds[kind]:,}" in text
    assert "moments, in GiB: loss " in text
    assert re.search(r"the fullest is (loss|backward|attention|end)", text)
    assert f"5%, {0.05 * found.best.memory.limit / 2**30:.1f} GiB" in text


def test_a_formula_that_does_not_give_the_number_is_not_shown() -> None:
    found = plan("llama-3.1-8b", "h100:8", 64, 4096, mesh="tp=2,sp=1,dp=1")
    kinds = dict(found.best.memory.kinds) | {"parameters": 1}
    other = dataclasses.replace(
        found.best, memory=dataclasses.replace(found.best.memory, kinds=kinds)
    )
    text = explained(found, other)
    assert "layers ·" not in text.partition("work of a step")[0]


@pytest.mark.parametrize(
    ("model", "on", "mesh"),
    [
        ("llama-3.1-8b", "h100:8", "fsdp=4,tp=2"),
        ("llama-3.1-8b", "v5p:2x2x2", "fsdp=2,tp=2,sp=2"),
        ("qwen3-4b", "v5e:4x4", "dp=2,fsdp=4,tp=2"),
    ],
)
def test_explain_shows_the_formula_of_each_transfer_that_counts(
    model: str, on: str, mesh: str
) -> None:
    found = plan(model, on, 64, 4096, mesh=mesh)
    one = found.best
    said = byte_formulas(StepModel(found.workload, one.choice), one.collectives)
    assert one.collectives
    text = explained(found, one)
    large = [sent for sent in one.collectives if sent.seconds >= SMALL * one.step_seconds]
    assert large
    for sent, words in zip(one.collectives, said, strict=True):
        assert worked_out(words) == pytest.approx(sent.bytes, rel=1e-3, abs=2), (sent.what, words)
        if sent in large:
            assert f"{words} = {sent.bytes:,}" in text, sent.what
