"""Where the field has published what it runs, and is right, a plan says the same."""

import re
from typing import Any

import pytest

import published
from meshwright.errors import MeshwrightError
from meshwright.machines import Machine
from meshwright.planner import Plan, plan
from meshwright.planner.report import plan_data, plan_from_data
from meshwright.planner.result import Estimate
from meshwright.planner.stacks import STACKS


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
    found = plan(model, on, batch, seq, accumulation=1)
    # of two meshes that differ only in how many of the same devices go to fsdp, more is faster
    best = found.best.choice
    alike = [
        one for one in found.ranked
        if all(one.choice.size(axis) == best.size(axis) for axis in ("tp", "sp"))
        and not one.memory.tight
    ]  # fmt: skip
    assert best.size("fsdp") == max(one.choice.size("fsdp") for one in alike)
    order = [one.choice.size("fsdp") for one in sorted(alike, key=lambda one: one.step_seconds)]
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
    assert found.best.choice.size("tp") == 1
    order = [
        one.choice.size("tp") for one in sorted(found.ranked, key=lambda one: one.step_seconds)
    ]
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
        rows.append(found.largest_batch // found.best.choice.size("fsdp"))
    assert rows == sorted(set(rows))


@pytest.mark.parametrize("model", ["llama-2-7b", "llama-2-70b"])
def test_tp_stays_inside_the_hosts_of_gpus(model: str) -> None:
    found = plan(model, "h100:16x8", 256, 4096, mesh="dp=1,sp=1")
    assert found.best.choice.size("tp") <= 8
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


@pytest.mark.parametrize("on", ["v4:4x8x8", pytest.param("v4:8x8x8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("seq", LWM)
def test_a_mesh_is_found_faster_than_lwms_or_the_same(seq: int, on: str) -> None:
    tp, sp = LWM[seq]
    chips = 256 if on == "v4:4x8x8" else 512
    fsdp = chips // (tp * sp)
    batch = max(2**22 // seq, fsdp)
    found = plan("llama-2-7b", on, batch, seq)
    theirs = on_mesh(found, fsdp=fsdp, tp=tp, sp=sp)
    best = found.best
    fastest = min(one.step_seconds for one in found.ranked if not one.memory.tight)
    same = best.choice.sizes == theirs.choice.sizes
    assert same or fastest < 0.95 * theirs.step_seconds
    assert best.step_seconds < 1.05 * theirs.step_seconds
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
    assert best.choice.size("sp") > 1
    assert best.choice.context_parallel == "ring"
    assert best.seconds["attention"] > 0.7 * best.step_seconds
    # one ring over more devices than rows leave is always possible: LWM's largest
    assert any(one.choice.mesh == "dp=1,fsdp=1,tp=4,sp=128" for one in found.ranked)


def tokens_per_gpu(model: str, on: str, batch: int, seq: int, mesh: str) -> float:
    """Tokens a second and chip, of the best the plan has on this mesh."""
    machine = Machine.parse(on)
    found = plan(model, machine, batch, seq, mesh=mesh)
    return batch * seq / found.best.step_seconds / machine.num_chips


def test_a_fast_host_network_costs_a_twentieth_where_a_slow_one_costs_a_quarter() -> None:
    def share(on: str) -> float:
        mesh, one, many = "tp=1,sp=1,fsdp=8", (32, 4096), (512, 4096)
        return tokens_per_gpu("llama-2-7b", f"{on}:16x8", *many, mesh) / tokens_per_gpu(
            "llama-2-7b", f"{on}:8", *one, mesh
        )

    assert 0.90 < share("h100") < 1.0
    assert 0.70 < share("a3-high") < 0.80


@pytest.fixture(scope="module")
def judged() -> list[published.Judged]:
    """Every published result with its plan, like the stack that published it."""
    return [published.judge(one, ours=False) for one in published.results()]


@pytest.mark.parametrize("kind", ["bf16", "fp8", "long"])
def test_most_published_results_are_planned_like_their_stack(
    judged: list[published.Judged], kind: str
) -> None:
    for half in ("", "judged"):  # all of them, and those that no number was fitted to
        near, count = published.within(judged, kind, half)
        assert near >= published.WANTED[kind] * count, [
            one.result for one in judged if abs(one.off(one.like)) > published.WITHIN[kind]
        ]


def test_the_table_has_results_of_every_stack_with_sources_and_halves() -> None:
    found = published.results()
    assert len(found) >= 40
    assert {one["stack"] for one in found} == set(STACKS)
    assert all(one["source"] and one["half"] in ("fit", "judged") for one in found)
    judged = [one for one in found if one["half"] == "judged"]
    assert len(judged) >= 0.4 * len(found)
    # nothing is planned for a stack on chips or in a precision of which it published nothing
    for name, groups in STACKS.items():
        for group in groups:
            for precision in group.matmul:
                assert any(
                    one["stack"] == name
                    and one.get("matmul", "bf16") == precision
                    and Machine.parse(one["on"]).chip.kind in group.chips
                    for one in found
                )
            assert group.long == any(
                one["stack"] == name
                and published.kind(one) == "long"
                and Machine.parse(one["on"]).chip.kind in group.chips
                for one in found
            )


def test_a_stack_without_a_result_is_refused_in_a_sentence() -> None:
    no_chip, no_precision = "is known; there are some on '", "in bf16; there are some in 'fp8'"
    for stack, on, settings, why in (
        ("maxtext", "v5e:4x4", {}, no_chip),
        ("torchtitan", "h100:8", {}, no_precision),
        ("megatron", "b200:8", {}, no_precision),
        ("torchtitan", "7x:4x4x4", {"matmul": "fp8"}, no_chip),
    ):
        with pytest.raises(MeshwrightError, match=f"--like {stack}: no published .* {why}"):
            plan("llama-3.1-8b", on, 64, 8192, like=stack, **settings)
    with pytest.raises(MeshwrightError, match="on h200 has sequences of 32,768 tokens or more"):
        plan("llama-3.1-8b", "h200:8", 8, 65536, like="torchtitan", matmul="fp8")
    with pytest.raises(MeshwrightError, match="--like 'nemo' is not a stack; known: torchtitan"):
        plan("llama-3.1-8b", "h100:8", 64, 8192, like="nemo")
    with pytest.raises(MeshwrightError, match="leave it out"):
        plan("llama-3.1-8b", "h100:8", 64, 8192, like="megatron", kind="serve")


def test_a_plan_says_whose_times_it_has_and_keeps_our_memory() -> None:
    given: dict[str, Any] = {"mesh": "fsdp=32", "matmul": "fp8", "remat": "none"}
    ours, theirs = (
        plan("llama-3.1-8b", "h200:4x8", 64, 8192, like=like, **given)
        for like in ("", "torchtitan")
    )
    assert theirs.best.memory == ours.best.memory
    assert theirs.best.step_seconds > 1.1 * ours.best.step_seconds
    assert ours.warnings == ()
    assert "times are an estimate for torchtitan, from its published results" in theirs.warnings[0]
    assert plan_from_data(plan_data(theirs)).workload.like == theirs.workload.like


def test_a_stack_that_recomputes_nothing_is_not_said_to() -> None:
    given: dict[str, Any] = {"mesh": "fsdp=64", "remat": "full"}
    ours, theirs = (
        plan("llama-3.1-8b", "h100:8x8", 128, 8192, like=like, **given) for like in ("", "megatron")
    )
    assert "remat=full makes" in ours.best.reason
    assert "remat" not in theirs.best.reason


EXPERTS = published.results(published.EXPERTS)


@pytest.mark.parametrize(
    "one",
    EXPERTS,
    ids=[f"{one['model']} on {one['on']}, {one['tokens']:.0f}" for one in EXPERTS],
)
def test_mixtures_of_experts_are_planned_beside_published_results(one: dict[str, Any]) -> None:
    """Where settings are alike, 0.9 to 1.1 of it; the others say why not."""
    least, most = one["between"]
    assert least <= published.planned_over_published(one) <= most
