"""Attention that no fused kernel serves: what the plan says of it and how it prices it."""

import dataclasses
from types import SimpleNamespace

import pytest
from tests.planner.workloads import workload

from meshwright.machines import Machine
from meshwright.models import preset
from meshwright.planner import plan
from meshwright.planner.attention import slow_attention
from meshwright.planner.efficiency import PLAIN_ATTENTION
from meshwright.planner.memory import peak_bytes
from meshwright.planner.step import StepModel
from meshwright.planner.workload import Choice, Workload
from meshwright.training.compute import compute_of
from meshwright.training.config import ComputeConfig, TrainConfig
from meshwright.training.setup import choose_rules

V5E, A100 = Machine.parse("v5e:4x4"), Machine.parse("a100-80:8")
MODEL = preset("llama-3.2-1b")
FSDP = Choice.of(fsdp=16)


def attention_seconds(run: Workload, choice: Choice = FSDP) -> float:
    return StepModel(run, choice).work.seconds["attention"]


@pytest.mark.parametrize("seq", [4000, 3648, 1000])
def test_a_length_that_tpus_pad_costs_what_its_padding_does(seq: int) -> None:
    run = workload(MODEL, V5E, 16, seq)
    assert slow_attention(run, FSDP) is None
    padded = run.resized(16, 4096 if seq > 1000 else 1024)
    ratio = attention_seconds(run) / attention_seconds(padded)
    assert 0.95 <= ratio <= 1.0 + 1 - seq / padded.seq


def test_a_slower_kernel_takes_longer_and_its_scores_take_memory() -> None:
    run = workload(MODEL, V5E, 16, 4096)
    slow = workload(MODEL, V5E, 16, 4096, compute_attention="blockwise")
    assert slow_attention(run, FSDP) is None
    assert slow_attention(slow, FSDP) == ("blockwise", "as requested")
    ratio = attention_seconds(slow) / attention_seconds(run)
    assert ratio == pytest.approx(PLAIN_ATTENTION["tpu"])
    scores = 3 * 4 * 512 * MODEL.heads * 4096
    # fused kernels have head_dim as the last dim of outputs, keys and values, which TPUs pad to 128
    # lanes; queries as rotary embeddings write them, and all of plain JAX, have it not
    heads = MODEL.heads + 2 * MODEL.kv_heads
    padding = 2 * MODEL.layers * 4096 * heads * (128 - MODEL.head_dim)
    more = (
        peak_bytes(StepModel(slow, FSDP))["attention"]
        - peak_bytes(StepModel(run, FSDP))["attention"]
    )
    # the fused backward pass writes gradients of queries once per block of 1,024 keys, beside two
    # arrays of the mlp whose places are too small for them
    of_queries, of_mlp = 4 * 4096 * MODEL.heads * 128, 2 * 4096 * MODEL.mlp
    assert more == scores - padding - 2 * (of_queries + of_mlp)


def test_the_plan_says_which_kernel_is_slow_and_why() -> None:
    near = dataclasses.replace(MODEL, sliding_window=1024)
    found = plan(near, A100, 8, 4096)
    for one in found.ranked:
        assert "; attention in the slower kernel blockwise (not hopper: " in one.reason
        assert "it takes a sliding window or packed documents, not both)" in one.reason
    run, choice = workload(near, A100, 8, 4096), Choice.of(fsdp=8)
    whole = dataclasses.replace(run, model=MODEL)
    # the window spares the kernel in plain JAX nothing
    ratio = attention_seconds(run, choice) / attention_seconds(whole, choice)
    assert ratio == pytest.approx(PLAIN_ATTENTION["gpu"])
    fused = plan(MODEL, A100, 8, 4096)
    assert not any("slower kernel" in one.reason for one in fused.ranked)


def test_train_and_prove_say_so_too() -> None:
    """On a mesh of a machine that is not here; both show what compute_of says."""
    device = SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")
    mesh = SimpleNamespace(
        devices=SimpleNamespace(flat=[device], size=4),
        shape={"dp": 1, "fsdp": 2, "tp": 1, "sp": 2},
        size=4,
    )
    config = TrainConfig("llama-3.2-1b", mesh="fsdp=2,sp=2", batch=2, seq=4000)

    def words(config: TrainConfig) -> str | None:
        return compute_of(config, MODEL, choose_rules(config, MODEL), mesh)[1]  # type: ignore[arg-type]

    assert "slower kernel" not in (words(config) or "")
    asked = dataclasses.replace(config, compute=ComputeConfig(attention="blockwise"))
    assert (words(asked) or "").endswith("; in the slower kernel blockwise (as requested)")
    mesh.shape = {"dp": 1, "fsdp": 4, "tp": 1, "sp": 1}
    assert words(config) is None
    assert words(asked) == "in the slower kernel blockwise (as requested)"
