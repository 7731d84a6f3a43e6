"""What a plan counts for a run that trains a subset of its arrays."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from tests.planner.compiled import MODELS, Case
from tests.planner.workloads import workload
from tests.training.toy import Setting, parts

from meshwright.errors import MeshwrightError
from meshwright.layouts import select_trainable
from meshwright.models import abstract_arrays, preset
from meshwright.planner import plan
from meshwright.planner.step import StepModel
from meshwright.planner.workload import Choice, Workload
from meshwright.training.optimizer import OptimizerConfig, make_optimizer
from meshwright.training.trainable import trained_specs

LAST = ("layers/-1/",)
SUBSETS = [("norm",), LAST, ("embedding",), ("output", r"layers/[12]\d/mlp", "bq")]


def numbers(specs: Any) -> int:
    return sum(spec.size for spec in jax.tree.leaves(specs))


def always(workload: Workload, choice: Choice) -> Any:
    step = StepModel(workload, choice)
    return step.schedule.always(step)


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "muon"])
@pytest.mark.parametrize("subset", SUBSETS, ids=str)
def test_moments_and_summed_gradients_are_those_of_what_is_trained(
    subset: tuple[str, ...], optimizer: str
) -> None:
    config = preset("qwen2.5-7b")
    arrays = select_trainable(abstract_arrays(config), subset)
    made, _ = make_optimizer(OptimizerConfig(optimizer), 10, arrays)
    state = jax.tree.leaves(jax.eval_shape(made.init, trained_specs(arrays)))
    kept = sum(4 * math.prod(leaf.shape) for leaf in state if leaf.ndim)
    everything = workload(config, "h100:1", 8, 1024, optimizer=optimizer)
    some = workload(config, "h100:1", 8, 1024, optimizer=optimizer, trainable=subset)
    found = always(some, Choice.of(accumulation=2))
    assert found["optimizer"] == pytest.approx(kept, abs=4 * 8)  # muon's coefficients
    matrices = [spec for spec in jax.tree.leaves(trained_specs(arrays)) if spec.is_matrix]
    assert found["gradients"] == 4 * numbers(matrices)
    assert found["parameters"] == always(everything, Choice.of())["parameters"]


@pytest.mark.parametrize("subset", [pytest.param(("norm",), marks=pytest.mark.slow), LAST], ids=str)
def test_the_plan_and_the_compiler_agree_on_what_freezing_saves(subset: tuple[str, ...]) -> None:
    """Arguments of the compiled step: exactly; beside them the sums of gradients are gone."""

    def compiled(trainable: tuple[str, ...]) -> Any:
        run = parts(Setting("dp=1,fsdp=4,tp=2,sp=1", config=MODELS["llama"], trainable=trainable))
        one = jax.ShapeDtypeStruct((2, 8, 32), jnp.int32, sharding=run.functions.batch_sharding)
        batch = dict.fromkeys(("tokens", "targets", "segments", "positions"), one)
        return run.functions.train.lower(run.target, batch).compile().memory_analysis()

    def planned(trainable: tuple[str, ...]) -> Any:
        case = Case("llama", "fsdp=4,tp=2", accumulation=2, trainable=trainable)
        return always(case.workload("h100:8"), case.choice)

    before, after = compiled(()), compiled(subset)
    all_planned, some_planned = planned(()), planned(subset)
    saved = all_planned["optimizer"] - some_planned["optimizer"]
    assert before.argument_size_in_bytes - after.argument_size_in_bytes == saved
    summed = all_planned["gradients"] - some_planned["gradients"]
    assert before.temp_size_in_bytes - after.temp_size_in_bytes >= 0.9 * summed


def test_a_frozen_model_fits_where_it_would_not_be_trained() -> None:
    with pytest.raises(MeshwrightError, match="fits on no mesh"):
        plan("llama-3.1-8b", "h100:1", 1, 2048)
    last = plan("llama-3.1-8b", "h100:1", 1, 2048, trainable=("layers/-1/",)).best
    assert last.memory.fits
    norms = plan("llama-3.1-8b", "h100:1", 1, 2048, trainable=("norm",)).best
    assert norms.memory.total < last.memory.total
    assert norms.step_seconds < last.step_seconds


def test_patterns_are_checked_and_pytorch_has_none() -> None:
    with pytest.raises(MeshwrightError, match=r"trainable 'norms' is found .* no array"):
        plan("llama-3.1-8b", "h100:8", 64, 4096, trainable=("norms",))
    with pytest.raises(MeshwrightError, match="trainable=norm is a setting of the JAX backend"):
        plan("llama-3.1-8b", "h100:8", 64, 4096, trainable=("norm",), backend="torch")
