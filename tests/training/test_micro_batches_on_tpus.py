"""Micro-batches with the TPU's compiler, where libtpu is installed; no TPU is needed."""

import importlib.util

import pytest

from meshwright.audits import collectives
from meshwright.proofs import prove
from meshwright.training.config import TrainConfig


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install jax[tpu]"
)
@pytest.mark.parametrize("mesh", ["fsdp=4", "fsdp=2,tp=2", "dp=2,fsdp=2", "dp=4"])
def test_steps_of_micro_batches_compile_and_scatter_gradients_over_fsdp(mesh: str) -> None:
    config = TrainConfig("tiny", mesh=mesh, batch=8, seq=128, accumulation=2)
    proof = prove(config, "v5p:2x2x1", cache=False)
    assert proof.footprint is not None
    shape = {"dp": 1, "fsdp": 1, "tp": 1, "sp": 1} | {
        name: int(size) for name, _, size in (part.partition("=") for part in mesh.split(","))
    }
    rows = collectives(proof.text, shape)
    scattered = {row.axes for row in rows if row.operation == "reduce-scatter"}
    assert scattered == ({("fsdp",)} if "fsdp" in mesh else set())
