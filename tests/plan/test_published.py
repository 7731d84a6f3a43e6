"""Where the field has published what it runs, and is right, a plan says the same."""

import dataclasses
import re

import pytest

from meshwright.plan import Plan, plan
from meshwright.plan.result import Estimate


def on_mesh(found: Plan, **sizes: int) -> Estimate:
    wanted = {"dp": 1, "fsdp": 1, "tp": 1, "sp": 1} | sizes
    return next(one for one in found.ranked if one.choice.sizes == wanted)


@pytest.mark.parametrize(
    ("model", "on", "batch", "seq"),
    [
        ("llama-3.1-8b", "h100:8", 64, 4096),
        ("llama-3.1-8b", "v5e:16x16", 512, 4096),
        ("llama-2-13b", "v4:4x4x4", 128, 4096),
        ("llama-3.1-70b", "v5p:8x8x8", 1024, 4096),
        ("qwen3-4b", "h200:4x8", 256, 4096),
    ],
)
def test_fsdp_is_preferred_over_dp_for_the_same_devices(
    model: str, on: str, batch: int, seq: int
) -> None:
    found = plan(model, on, batch, seq)
    # of two meshes that differ only in how many of the same devices go to fsdp, more is faster
    best = found.best.choice
    alike = [
        one.choice for one in found.ranked if (one.choice.tp, one.choice.sp) == (best.tp, best.sp)
    ]
    order = [choice.fsdp for choice in alike]
    assert len(order) > 1
    if found.machine.is_tpu and order[0] != max(order):
        # over a whole slice the TPU compiler sums gradients by an all-reduce: half of it may win
        assert order[0] == max(order) // 2
        whole, half = (on_mesh(found, fsdp=n, dp=max(order) // n) for n in sorted(order)[:-3:-1])
        assert whole.step_seconds < 1.10 * half.step_seconds
        order.remove(max(order))
    assert order == sorted(order, reverse=True)


def test_fsdp_alone_is_ahead_of_meshes_with_tp_for_8b_on_eight_h100() -> None:
    """The guide to 2-D parallelism on 8 x H100, at 1,024 tokens: 8 x 1 is the fastest."""
    found = plan("llama-3.1-8b", "h100:8", 56, 1024, mesh="dp=1,sp=1")
    order = [one.choice.tp for one in found.ranked]
    assert order[0] == 1
    assert order == sorted(order)


def test_the_largest_batch_of_a_data_rank_grows_with_tp() -> None:
    """There: 7 < 10 < 14 < 18 rows for tp of 1, 2, 4 and 8."""
    rows = []
    for tp in (1, 2, 4, 8):
        found = plan(
            "llama-3.1-8b", "h100:8", 8, 1024, mesh=f"dp=1,sp=1,tp={tp}", remat="none",
            param_dtype="float32",
        )  # fmt: skip
        assert found.largest_batch is not None
        rows.append(found.largest_batch // found.best.choice.fsdp)
    assert rows == sorted(set(rows))


@pytest.mark.parametrize("model", ["llama-2-7b", "llama-2-70b"])
def test_tp_stays_inside_the_hosts_of_gpus(model: str) -> None:
    found = plan(model, "h100:16x8", 256, 4096, mesh="dp=1,sp=1")
    assert found.best.choice.tp <= 8
    if model == "llama-2-7b":  # whose 32 key heads would let it go further
        inside, outside = on_mesh(found, fsdp=16, tp=8), on_mesh(found, fsdp=8, tp=16)
        assert outside.step_seconds > 1.3 * inside.step_seconds
        assert outside.bound == "tp"
        assert "host network" in outside.reason


def test_tp_stays_on_one_ring_of_a_pod() -> None:
    found = plan("llama-2-7b", "v5e:16x16", 256, 4096, mesh="dp=1,sp=1,tp>=2")
    times = [on_mesh(found, fsdp=256 // tp, tp=tp).step_seconds for tp in (2, 4, 8, 16, 32)]
    assert times == sorted(times)


# LWM's meshes for 7B, 4M tokens a batch, on 256 and on 512 chips of v4
LWM = {2**15: (4, 1), 2**17: (8, 1), 2**18: (16, 1), 2**19: (16, 2), 2**20: (16, 4)}


@pytest.mark.parametrize("on", ["v4:4x8x8", "v4:8x8x8"])
@pytest.mark.parametrize("seq", LWM)
def test_a_mesh_is_found_faster_than_lwms_or_the_same(seq: int, on: str) -> None:
    tp, sp = LWM[seq]
    chips = 256 if on == "v4:4x8x8" else 512
    fsdp = chips // (tp * sp)
    batch = max(2**22 // seq, fsdp)
    found = plan("llama-2-7b", on, batch, seq)
    theirs = on_mesh(found, fsdp=fsdp, tp=tp, sp=sp)
    best = found.best
    same = best.choice.sizes == theirs.choice.sizes
    assert same or best.step_seconds < 0.95 * theirs.step_seconds
    # what bounds it is named, and is what takes longest
    parts = best.seconds
    if best.bound == "compute":
        assert best.reason.startswith("compute-bound: matmuls ")
        assert parts["matmuls"] + parts["attention"] > 0.5 * best.step_seconds
    else:
        assert f"{best.bound.replace('+', ' · ')}" in re.sub(r"=\d+", "", best.reason)
        assert "is network-bound" in best.reason
        assert parts["waiting for links"] > 0.25 * best.step_seconds


def test_a_million_tokens_on_512_chips_are_split_over_rows_and_heads() -> None:
    found = plan("llama-2-7b", "v4:8x8x8", 8, 2**20)
    best = found.best
    assert best.memory.fits
    assert best.choice.sp > 1
    assert best.choice.strategy == "ring"
    assert best.seconds["attention"] > 0.7 * best.step_seconds
    # one ring over more devices than rows leave is always possible: LWM's largest
    assert any(dataclasses.astuple(one.choice)[:4] == (1, 1, 4, 128) for one in found.ranked)
