"""Plans of models whose layers differ, held to what the GPU compiler made of them."""

import json
from pathlib import Path

import pytest

from meshwright.machines import Machine
from meshwright.models import from_hf_config
from meshwright.planner import StepModel, Workload, memory
from meshwright.training import TrainConfig
from meshwright.training.config import ComputeConfig

PUBLISHED = json.loads(
    (Path(__file__).parents[1] / "models" / "published_configs.json").read_text()
)
GEMMA2 = from_hf_config(PUBLISHED["gemma-2-2b"])
MACHINE = Machine.parse("h100:8")


# `meshwright prove` of gemma-2-2b with seq 4,096: XLA for GPUs of jax 0.11.2, x86-64, 2026-11-17
@pytest.mark.parametrize(
    ("mesh", "batch", "remat", "compiled", "over_tp"),
    [
        ("fsdp=8", 16, "full", 12_153_191_564, 0),
        ("fsdp=4,tp=2", 8, "full", 9_104_078_220, 5_964_382_208),
        ("dp=2,fsdp=4", 16, "mlp", 22_519_193_612, 0),
    ],
)
def test_memory_and_traffic_of_gemma_2_are_those_of_the_compiler(
    mesh: str, batch: int, remat: str, compiled: int, over_tp: int
) -> None:
    compute = ComputeConfig(remat=remat)  # type: ignore[arg-type]
    config = TrainConfig("", mesh=mesh, batch=batch, seq=4096, compute=compute)
    step = StepModel(Workload.of(config, MACHINE, GEMMA2))
    assert memory(step).total == pytest.approx(compiled, rel=0.08)
    sent = sum(one.bytes * one.times for one in step.collectives if one.axes == ("tp",))
    assert sent == pytest.approx(over_tp, rel=0.01)
