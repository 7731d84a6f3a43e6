"""Remat offload in the plan: bytes on the device and on the host, time, and when it is offered."""

import dataclasses
from typing import Any

import pytest
from tests.planner.workloads import workload

from meshwright.errors import MeshwrightError
from meshwright.machines import CHIPS, Machine
from meshwright.models import preset
from meshwright.planner import efficiency, plan
from meshwright.planner.memory import memory
from meshwright.planner.report import explain
from meshwright.planner.step import StepModel
from meshwright.planner.time import step_time
from meshwright.planner.workload import Choice

GIB = 2**30


@pytest.mark.parametrize(
    ("on", "mesh", "sequence_parallel"),
    [
        ("h200:1", {}, False),
        ("h100:2x8", {"fsdp": 8, "tp": 2}, False),
        ("h100:2x8", {"fsdp": 8, "tp": 2}, True),
        ("v4:2x2x2", {"fsdp": 8}, False),
    ],
)
def test_inputs_of_layers_are_counted_on_the_host(
    on: str, mesh: dict[str, int], sequence_parallel: bool
) -> None:
    run = workload(preset("llama-3.1-8b"), on, 128, 2048)
    choice = Choice.of(**mesh, sequence_parallel=sequence_parallel)
    full, offload = (
        memory(StepModel(run, dataclasses.replace(choice, remat=remat)))
        for remat in ("full", "offload")
    )
    # 32 layers of an 8B model save 4,096 numbers of two bytes for each token
    split = choice.size("tp") if sequence_parallel else 1
    layer = 128 * 2048 // (choice.size("dp") * choice.size("fsdp")) * 4096 * 2 // split
    on_device = [one.kinds["saved activations"] for one in (full, offload)]
    assert on_device == [32 * layer, 2 * layer]
    assert full.total - offload.total == 30 * layer
    devices = {"h200:1": 1, "h100:2x8": 8, "v4:2x2x2": 4}[on]  # of a host
    assert (full.host, offload.host) == (0, 32 * layer * devices)
    assert offload.host_limit == CHIPS[run.machine.chip.name].host_memory_bytes


# (model, batch of 2,048 tokens, moments): GiB of a step in a loop over layers, as XLA for an H200
# counts them (jax 0.10.2, compiled without the GPU as `prove` does)
COMPILED = {
    ("llama-3.2-1b", 16, "auto"): 21.791,
    ("llama-3.1-8b", 24, "bfloat16"): 97.006,
    ("llama-3.1-8b", 64, "bfloat16"): 110.447,
    ("llama-3.1-8b", 112, "bfloat16"): 129.243,
}


@pytest.mark.parametrize(("case", "compiled"), COMPILED.items())
def test_memory_is_that_of_the_compiler(case: tuple[str, int, str], compiled: float) -> None:
    model, batch, moments = case
    run = workload(preset(model), "h200:1", batch, 2048, moments=moments)
    need = memory(StepModel(run, Choice.of(remat="offload")))
    assert need.total / GIB == pytest.approx(compiled, rel=0.07)


def test_time_is_that_of_full_and_of_what_the_link_does_not_hide() -> None:
    run = workload(preset("llama-3.1-8b"), "h100:8", 8, 4096)
    for accumulation in (1, 2):
        choice = Choice.of(tp=8, accumulation=accumulation)
        full, offload = (
            step_time(StepModel(run, dataclasses.replace(choice, remat=remat)))
            for remat in ("full", "offload")
        )
        done = StepModel(run, dataclasses.replace(choice, remat="full")).work
        sent = 32 * 8 * 4096 * 4096 * 2  # all micro-batches, whole on each tp rank
        seconds = sent / (efficiency.HOST_LINK * 64e9)
        waits = max(0, seconds - 0.75 * done.forward) + max(0, seconds - 0.09 * done.backward)
        assert waits > 0
        assert offload.step - full.step == pytest.approx(waits)
        assert offload.seconds["waiting for the host"] == pytest.approx(waits)
    # and a loop where layers would be unrolled
    unrolled = workload(preset("llama-3.1-8b"), "h100:8", 8, 4096, layers="unroll")
    assert step_time(StepModel(unrolled, offload_of(choice))).step == pytest.approx(offload.step)


def offload_of(choice: Choice) -> Choice:
    return dataclasses.replace(choice, remat="offload")


def test_it_is_tried_by_itself_where_nothing_else_fits_and_the_host_has_room() -> None:
    def best(on: str | Machine, seq: int) -> Choice:
        return plan("llama-3.1-8b", on, 1, seq, moments="bfloat16").best.choice

    def h200(**host: Any) -> Machine:
        return Machine(dataclasses.replace(CHIPS["h200"], **host), (1, 1))

    assert best("h200:1", 96 * 1024).remat == "full"
    longer = 192 * 1024
    assert best("h200:1", longer).remat == "offload"
    # how fast the link is matters to the time alone
    assert best(h200(host_link_bandwidth=None), longer).remat == "offload"
    with pytest.raises(MeshwrightError, match="GiB of a host's memory, with remat=offload"):
        best(h200(host_memory_bytes=GIB), longer)


def test_a_step_that_maxtext_runs_with_offload_fits_by_itself() -> None:
    """MaxText keeps activations of 70B on v6e-32, with weights in bfloat16, on the hosts."""
    found = plan("llama-3.1-70b", "v6e:4x8", 64, 8192, mesh="fsdp=32", param_dtype="bfloat16")
    assert found.best.choice.remat == "offload"
    assert found.best.memory.fits_host


def test_405b_on_one_v6e_256_is_told_the_dtypes_with_which_it_fits() -> None:
    """MaxText trains it there, with weights in bfloat16 and activations on the hosts."""
    asked: tuple[Any, ...] = ("llama-3.1-405b", "v6e:16x16", 256, 8192)
    flags = "--optimizer.moments bfloat16 or --compute.param-dtype bfloat16 would fit"
    with pytest.raises(MeshwrightError, match=flags):
        plan(*asked)
    for setting in ("optimizer_moments", "param_dtype"):
        found = plan(*asked, **{setting: "bfloat16"}).best
        assert found.memory.fits
        assert found.choice.remat == "offload"


def test_a_choice_with_it_has_a_larger_batch() -> None:
    full, offload = (
        plan("llama-3.1-8b", "h200:1", 1, 4096, moments="bfloat16", remat=remat)
        for remat in ("full", "offload")
    )
    # compiled: 37 and 60, with what XLA computes again by itself near the limit
    assert (full.largest_batch, offload.largest_batch) == (31, 50)
    assert full.largest_seq == offload.largest_seq  # with offload in any case
    said = " ".join(_text(explain(offload, offload.best, 200)).split())
    assert "in the memory of each host: 1.0 of 1,862.6 GiB of activations" in said


def test_waiting_for_the_host_is_said() -> None:
    found = plan("llama-3.2-1b", "b200:1", 16, 2048, remat="offload")
    assert "waits for activations in the host's memory" in found.best.reason
    assert found.best.seconds["waiting for the host"] > 0.03 * found.best.step_seconds


def _text(renderable: object) -> str:
    import io

    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=200).print(renderable)
    return out.getvalue()


def test_a_host_with_too_little_memory_is_refused() -> None:
    chip = dataclasses.replace(CHIPS["h200"], host_memory_bytes=8 * GIB)
    machine = Machine(chip, (1, 1))
    given = {"moments": "bfloat16", "accumulation": 1}
    assert plan("llama-3.1-8b", machine, 16, 2048, remat="offload", **given).best.memory.fits
    with pytest.raises(MeshwrightError, match=r"needs 10\.0 of the 8\.0 GiB of a host's memory"):
        plan("llama-3.1-8b", machine, 20, 2048, remat="offload", **given)


def test_on_cpus_nothing_moves() -> None:
    run = workload(preset("tiny"), "cpu:1", 8, 128)
    full, offload = (
        memory(StepModel(run, Choice.of(remat=remat))) for remat in ("full", "offload")
    )
    assert offload == full
    assert (
        step_time(StepModel(run, Choice.of(remat="offload"))).seconds["waiting for the host"] == 0
    )


@pytest.mark.parametrize(
    ("on", "batch", "seq", "mesh"),
    [("v5e:8x16", 128, 4096, {"fsdp": 128}), ("v6e:8x8", 64, 8192, {"fsdp": 64})],
)
def test_offload_comes_before_a_step_that_leaves_nothing_free(
    on: str, batch: int, seq: int, mesh: dict[str, int]
) -> None:
    """Without it the first needs all memory, as the compiler would schedule it."""
    run = workload(preset("llama-2-70b"), on, batch, seq)
    best = plan("llama-2-70b", on, batch=batch, seq=seq).best
    assert best.choice.remat == "offload"
    assert not best.memory.tight
    assert {axis: best.choice.size(axis) for axis in mesh} == mesh
    full = memory(StepModel(run, Choice.of(**mesh, remat="full")))
    assert full.exhausted


def test_a_step_that_leaves_nothing_free_is_taken_where_remat_is_fixed() -> None:
    """It compiles into 15.73 of 15.75 GiB (benchmarks/compiled.json)."""
    found = plan(
        "llama-3.1-8b", "v5e:4x4", batch=64, seq=4096, mesh="fsdp=16", remat="full", accumulation=1
    ).best
    assert (found.memory.fits, found.memory.tight, found.memory.exhausted) == (True, True, True)
