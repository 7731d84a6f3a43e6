"""Plans of DPO: the reference is counted as the step holds it, and takes a forward pass."""

import jax
import pytest

import meshwright as mw
from meshwright.errors import MeshwrightError
from meshwright.models import LoraConfig
from meshwright.planner import plan
from meshwright.planner.memory import memory
from meshwright.planner.step import StepModel
from meshwright.planner.workload import Workload
from meshwright.training import ComputeConfig, TrainConfig, abstract_step
from meshwright.training.prepare import bytes_per_device

MESH = "dp=1,fsdp=4,tp=2,sp=1"


@pytest.mark.parametrize("trainable", [(), ("layers/-1/mlp", "norm")], ids=str)
def test_the_reference_takes_what_the_step_holds_of_it(trainable: tuple[str, ...]) -> None:
    config = TrainConfig(
        "tiny", mesh=MESH, batch=8, seq=64, objective="dpo", trainable=trainable,
        compute=ComputeConfig(dtype="bfloat16"),
    )  # fmt: skip
    step = abstract_step(config, mw.mesh(MESH, devices=jax.devices()[:8], axis_types="explicit"))
    kinds = memory(StepModel(Workload.of(config, mw.Machine.parse("h100:8")))).kinds
    assert kinds["reference"] == bytes_per_device(step.state.reference)


def test_an_adapter_needs_no_copy_and_other_objectives_have_none() -> None:
    sizes = {"batch": 64, "seq": 4096}

    def best(**settings: object) -> object:
        config = TrainConfig("llama-3.1-8b", mesh="fsdp=64", **sizes, **settings)
        return plan(config, "v5p:4x4x4").best

    plain, pairs = best(), best(objective="dpo")
    assert "reference" not in plain.memory.kinds
    assert pairs.memory.kinds["reference"] == pytest.approx(2 * 8.03e9 / 64, rel=0.01)
    assert 1.2 < pairs.step_seconds / plain.step_seconds < 1.5
    adapted = best(objective="dpo", lora=LoraConfig(16))
    assert "reference" not in adapted.memory.kinds


def test_pytorch_and_t5_are_refused() -> None:
    config = TrainConfig(
        "llama-3.1-8b", mesh="auto", batch=8, seq=64, objective="dpo", backend="torch"
    )
    with pytest.raises(MeshwrightError, match="objective"):
        plan(config, "h100:8")
    with pytest.raises(MeshwrightError, match="not one of this model"):
        plan(TrainConfig("t5-tiny", mesh="auto", batch=8, seq=64, objective="dpo"), "h100:8")
