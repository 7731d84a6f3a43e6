"""A plan: what is ranked, what is refused, and what a mistake is told."""

import dataclasses
import itertools
import math
import time
from typing import Literal

import hypothesis
import pytest
from hypothesis import strategies as st

from meshwright.errors import MeshwrightError
from meshwright.machines import Machine
from meshwright.models.decoder import PRESETS, preset
from meshwright.plan import Plan, make_job, plan
from meshwright.plan.candidates import meshes, refusal
from meshwright.plan.memory import memory
from meshwright.plan.result import Choice
from meshwright.plan.shares import lay
from meshwright.plan.time import timed


def small(**options: object) -> Plan:
    return plan("llama-3.1-8b", "v5p:4x4x4", 256, 4096, **options)  # type: ignore[arg-type]


# ---- what is looked at


def test_every_mesh_of_the_devices_is_ranked_or_refused_once() -> None:
    found = small()
    seen = [one.choice for one in found.ranked] + [one.choice for one in found.refused]
    sizes = sorted((c.dp, c.fsdp, c.tp, c.sp) for c in seen)
    twos = [1, 2, 4, 8, 16, 32, 64]
    wanted = [one for one in itertools.product(twos, repeat=4) if math.prod(one) == 64]
    assert sizes == sorted(wanted)
    assert all(one.why for one in found.refused)


def test_what_is_ranked_fits_and_is_in_order() -> None:
    found = small()
    assert all(one.memory.fits for one in found.ranked)
    steps = [one.step_seconds for one in found.ranked]
    # of two within a thousandth the one with less memory goes first
    assert all(a <= b * 1.0011 for a, b in itertools.pairwise(steps))
    assert found.best.step_seconds <= 1.0011 * min(steps)


def test_each_mesh_has_the_best_of_the_rest() -> None:
    """Every remat and number of micro-batches tried by hand."""
    found = small(mesh="dp=1,sp=1")
    machine, job = found.machine, found.job
    for one in found.ranked:
        mesh = one.choice
        times = []
        for remat in ("none", "elementwise", "mlp", "full"):
            for rounds in (1, 2, 4, 8):
                for along in (False, True)[: 1 + (mesh.tp > 1)]:
                    other = dataclasses.replace(
                        mesh, remat=remat, accumulation=rounds, tp_sequence=along
                    )
                    fits = refusal(job, other) is None and memory(job, other, machine).fits
                    times += [timed(job, other, machine).step] if fits else []
        assert one.step_seconds == pytest.approx(min(times))


def test_limits_on_the_mesh_hold_and_what_is_fixed_stays() -> None:
    found = small(mesh="tp>=2,tp<=4,sp=1", remat="full", accumulation=2)
    assert found.ranked
    assert {one.choice.tp for one in found.ranked} == {2, 4}
    assert {one.choice.sp for one in found.ranked} == {1}
    fixed = {(one.choice.remat, one.choice.accumulation) for one in found.ranked}
    assert fixed == {("full", 2)}


def test_the_objective_memory_gives_the_least_of_it() -> None:
    fast, lean = small(), small(objective="memory")
    assert lean.best.memory.total < fast.best.memory.total
    assert lean.best.step_seconds > fast.best.step_seconds
    assert lean.best.memory.total == min(one.memory.total for one in lean.ranked)


def test_attention_over_split_rows_names_its_strategy() -> None:
    found = plan("llama-2-7b", "v4:4x4x4", 8, 2**18, mesh="sp>=4")
    assert {one.choice.strategy for one in found.ranked} <= {"ring", "allgather", "ulysses"}
    # parts of 64K tokens have time to hide their hops, those of 4K have not
    assert {one.choice.strategy for one in found.ranked if one.choice.sp == 4} == {"ring"}
    assert "ring" not in {one.choice.strategy for one in found.ranked if one.choice.sp == 64}


# ---- refusals


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        (Choice(fsdp=4, tp=16), "kv_heads=8 cannot be split in tp=16; tp=8 would fit"),
        (Choice(fsdp=48), "embed=4096 cannot be split in fsdp·sp=48"),
        (Choice(dp=512), "batch=256 has fewer rows than dp·fsdp=512 devices take"),
        (Choice(dp=96), "batch=256 is not divisible by dp·fsdp=96; batch=192 or 288 would fit"),
        (Choice(fsdp=2, sp=128, tp_sequence=True, tp=8), "seq=4000 is not divisible by 1024"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_what_would(choice: Choice, says: str) -> None:
    why = refusal(make_job("llama-3.1-8b", 256, 4000), choice)
    assert why is not None
    assert says in why


def test_a_row_too_short_for_two_chunks_a_device_is_refused() -> None:
    found = plan("tiny", "cpu:8", 8, 1004)
    # ulysses needs no chunks, and four key heads can be split over sp=4
    four = [one.choice for one in found.ranked if one.choice.sp == 4]
    assert {(one.strategy, one.tp) for one in four} == {("ulysses", 1)}
    why = {(one.choice.tp, one.choice.sp): one.why for one in found.refused}
    assert "seq=1004 is not divisible by 8 (two chunks a device" in why[2, 4]
    assert why[1, 8] == "seq=1004 is not divisible by 8; seq=1000 or 1008 would fit"


def test_a_mesh_that_is_too_small_says_what_it_needs() -> None:
    found = plan("llama-3.1-70b", "h100:4x8", 64, 4096)
    large = next(one for one in found.refused if one.choice.dp == 32)
    assert large.memory is not None
    assert not large.memory.fits
    assert f"needs {large.memory.total / 2**30:.1f} of" in large.why


def test_a_model_that_fits_nowhere_is_told_how_many_devices_would_do() -> None:
    with pytest.raises(MeshwrightError) as error:
        plan("llama-3.1-405b", "h100:8", 64, 4096)
    said = str(error.value)
    assert "llama-3.1-405b with batch=64, seq=4096 on 'h100:8' fits on no mesh" in said
    assert " devices would do: 'h100:" in said
    larger = said.rpartition("would do: '")[2].rstrip("'")
    assert plan("llama-3.1-405b", larger, 64, 4096).best.memory.fits
    half = Machine.parse(larger)
    half = dataclasses.replace(half, shape=(half.shape[0] // 2, half.shape[1]))
    with pytest.raises(MeshwrightError, match="fits on no mesh"):
        plan("llama-3.1-405b", half, 64, 4096)


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"model": "llama-3.1-8"}, "did you mean"),
        ({"on": "v5q:4x4x4"}, "v5"),
        ({"batch": 0}, "batch=0 must be a whole number from 1"),
        ({"seq": 1.5}, "seq=1.5 must be a whole number from 1"),
        ({"mesh": "pt=2"}, "'pt' is not an axis; did you mean 'tp'?"),
        ({"mesh": "tp=3"}, "no mesh of 64 devices lies within 'tp=3'"),
        ({"mesh": "tp=16"}, "kv_heads=8 cannot be split in tp=16; tp=8 would fit"),
        ({"remat": "ful"}, "remat='ful' is not a policy; did you mean 'full'?"),
        ({"objective": "speed"}, "objective='speed' is not known"),
        ({"optimizer": "adam"}, "did you mean 'adamw'?"),
        ({"param_dtype": "float3"}, "did you mean 'float32'?"),
        ({"accumulation": 0}, "accumulation=0 must be at least 1"),
        ({"cost_per_hour": float("nan")}, "cost_per_hour=nan must be a number from 0"),
    ],
)
def test_mistakes_say_what_would_work(said: dict[str, object], says: str) -> None:
    given = {"model": "llama-3.1-8b", "on": "v5p:4x4x4", "batch": 256, "seq": 4096} | said
    with pytest.raises(MeshwrightError) as error:
        plan(**given)  # type: ignore[arg-type]
    assert says in str(error.value)


def test_a_model_too_large_to_serve_is_told_of_a_machine_that_can() -> None:
    with pytest.raises(MeshwrightError) as error:
        plan("llama-3.1-70b", "h100:1", 8, 4096, kind="serve")
    larger = str(error.value).rpartition("would do: '")[2].rstrip("'")
    assert larger == "h100:2"  # 141 GB of weights and 11 of cache in 162
    assert plan("llama-3.1-70b", larger, 8, 4096, kind="serve").best.choice.tp == 2


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(
    model=st.sampled_from(sorted(PRESETS)),
    on=st.sampled_from(
        ["h200:1", "cpu:8", "v5e:2x4", "v3:4x4", "2*v5e:4x8", "h100:3x8", "7x:2x2x1", "v5p:4x4x4"]
    ),
    batch=st.sampled_from([1, 6, 16, 24, 100, 384]),
    seq=st.sampled_from([128, 1000, 2048, 24576, 65536]),
    optimizer=st.sampled_from(["adamw", "muon", "lion", "adafactor"]),
    kind=st.sampled_from(["train", "serve"]),
)
def test_any_job_on_any_machine_is_planned_or_refused_in_words(
    model: str, on: str, batch: int, seq: int, optimizer: str, kind: Literal["train", "serve"]
) -> None:
    try:
        found = plan(model, on, batch, seq, optimizer=optimizer, kind=kind)
    except MeshwrightError as reason:
        assert "mesh" in str(reason)
        return
    for one in found.ranked:
        assert one.choice.devices == Machine.parse(on).num_devices
        assert one.memory.fits
        assert 0 < one.mfu < 1
        assert one.step_seconds == pytest.approx(sum(one.seconds.values()))
        assert all(sent.seconds >= sent.hidden >= 0 and sent.link for sent in one.transfers)


# ---- how much more would fit


def test_the_largest_batch_fits_and_one_row_more_on_each_rank_does_not() -> None:
    found = plan("llama-3.1-8b", "h100:8", 64, 1024)
    best, most = found.best.choice, found.largest_batch
    assert most is not None
    ranks = best.dp * best.fsdp
    assert most % ranks == 0

    def fits(batch: int) -> bool:
        job = dataclasses.replace(found.job, batch=batch)
        return memory(job, dataclasses.replace(best, accumulation=1), found.machine).fits

    assert fits(most)
    assert not fits(most + ranks)


def test_the_longest_row_can_itself_be_planned() -> None:
    found = plan("llama-3.1-8b", "h100:8", 64, 1024)
    assert found.largest_seq is not None
    longest = plan("llama-3.1-8b", "h100:8", 8, found.largest_seq, mesh=found.mesh)
    assert longest.best.memory.fits
    with pytest.raises(MeshwrightError, match="fits on no mesh"):
        plan("llama-3.1-8b", "h100:8", 8, 2 * found.largest_seq, mesh=found.mesh)


# ---- reasons


def test_a_step_that_waits_for_tp_says_so_with_numbers() -> None:
    found = small(mesh="tp=8,fsdp=8", remat="none").best
    assert found.bound == "tp"
    assert "tp=8 is network-bound: 4 all-reduces x" in found.reason or (
        "tp=8 is network-bound: 6 all-gathers x" in found.reason
    )
    assert "a layer" in found.reason
    assert "over ICI" in found.reason


def test_a_step_that_computes_says_so() -> None:
    found = small().best
    assert found.bound == "compute"
    assert found.reason.startswith("compute-bound: matmuls ")


# ---- serving


def test_serving_reads_weights_and_cache_once_for_each_token() -> None:
    found = plan("llama-3.1-8b", "h100:8", 64, 8192, kind="serve")
    model = preset("llama-3.1-8b")
    for one in found.ranked:
        assert one.choice.fsdp == one.choice.sp == 1
        weights = 2 * model.matmul_params / one.choice.tp
        cache = 2 * 2 * 32 * 8 * 128 * 8192 * 64 / 8
        assert one.memory_bytes == pytest.approx(weights + cache)
        assert one.step_seconds > one.memory_bytes / 3.35e12
    assert found.tokens_per_second(found.best) == pytest.approx(64 / found.best.step_seconds)
    # of few rows the weights are most: tp shares them
    alone = plan("llama-3.1-8b", "h100:8", 8, 1024, kind="serve")
    assert alone.best.choice.tp == 8


# ---- time


def test_405b_on_4096_chips_takes_less_than_a_second() -> None:
    lay.cache_clear()
    start = time.process_time()  # of this process: other work on the machine does not count
    found = plan("llama-3.1-405b", "v5p:16x16x16", 2048, 8192)
    assert time.process_time() - start < 1.0
    assert len(found.ranked) + len(found.refused) == len(list(meshes(4096))) == 455
