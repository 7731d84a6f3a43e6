"""Programs as the compilers for TPUs and GPUs print them, trimmed: what is in them by formula.

The texts are of `programs.compiled_step`, FSDP left to the partitioner, made without the machines.
"""

import math
from pathlib import Path

import pytest
from tests.audits.programs import HIDDEN, LAYERS, WIDTH

from meshwright.audits import Audit, audit, expected_of

MIB = 2**20
WEIGHTS = 2 * LAYERS * 2 * WIDTH * HIDDEN  # bytes of bfloat16, of all layers
FSDP = {"fsdp": ["all-gather", "reduce-scatter"], "dp": ["all-reduce"]}
MESHES = {
    "gpu_8": {"fsdp": 8},
    "tpu_v5e_4": {"fsdp": 4},
    "tpu_v5e_16": {"fsdp": 16},
    "tpu7x_8": {"fsdp": 8},
    "tpu_slices_2x4": {"dp": 2, "fsdp": 4},
}


def text_of(name: str) -> str:
    return (Path(__file__).parent / "texts" / f"{name}.txt").read_text()


def found_in(name: str) -> Audit:
    return audit(text_of(name), MESHES[name], expected=expected_of(FSDP))


@pytest.mark.parametrize("name", MESHES)
def test_weights_are_all_gathered_once_forward_and_once_backward(name: str) -> None:
    """However it is printed: in halves, in three fusions, or on another core's thread."""
    rows = [row for row in found_in(name).rows if row.operation == "all-gather"]
    assert {row.axes for row in rows} == {("fsdp",)}
    assert {math.prod(row.shape) for row in rows} == {WIDTH * HIDDEN}
    assert sum(row.bytes * row.times for row in rows) == 2 * WEIGHTS


@pytest.mark.parametrize("name", MESHES)
def test_gradients_are_added_once(name: str) -> None:
    operation = "all-reduce" if name == "tpu_v5e_16" else "reduce-scatter"
    rows = [row for row in found_in(name).rows if row.axes == ("fsdp",) and row.phase == "backward"]
    added = [row for row in rows if row.operation != "all-gather"]
    assert {row.operation for row in added} == {operation}
    assert sum(row.bytes * row.times for row in added) == WEIGHTS


@pytest.mark.parametrize("name", ["gpu_8", "tpu_v5e_4", "tpu_v5e_16", "tpu7x_8"])
def test_loops_count_by_their_trips(name: str) -> None:
    """Said beside the loop by one compiler, to be found from the condition by the other."""
    assert ("known_trip_count" in text_of(name)) == (name == "gpu_8")
    assert {row.loops for row in found_in(name).rows} == {(LAYERS,)}
    assert not any(row.unsure for row in found_in(name).rows)


def test_an_all_reduce_in_place_of_a_scatter_is_a_surprise_with_its_line() -> None:
    """What the TPU compiler made of it on sixteen chips."""
    surprises = found_in("tpu_v5e_16").surprises
    assert [(row.operation, row.shape) for row in surprises] == [
        ("all-reduce", (WIDTH, HIDDEN)),
        ("all-reduce", (HIDDEN, WIDTH)),
    ]
    assert {row.source for row in surprises} == {"tests/audit/programs.py:31"}
    assert "twice the bytes" in surprises[0].why
    ring = 2 * 15 / 16 * WEIGHTS
    assert sum(row.wire_bytes * row.times for row in surprises) == ring
    assert all(not found_in(name).surprises for name in MESHES if name != "tpu_v5e_16")


def test_an_all_reduce_fused_with_the_slice_that_is_kept_is_a_reduce_scatter() -> None:
    assert "all-reduce(" in text_of("tpu_v5e_4")
    assert "reduce-scatter(" not in text_of("tpu_v5e_4")
    rows = [row for row in found_in("tpu_v5e_4").rows if row.operation == "reduce-scatter"]
    assert {row.shape for row in rows} == {(WIDTH // 4, HIDDEN), (HIDDEN // 4, WIDTH)}


def test_what_goes_between_slices_goes_over_the_outermost_axis() -> None:
    """Host transfers that name no devices: each device's quarter of the gradients."""
    rows = [row for row in found_in("tpu_slices_2x4").rows if "dp" in row.axes]
    assert {(row.operation, row.axes, row.devices) for row in rows} == {("all-reduce", ("dp",), 2)}
    assert sum(row.bytes * row.times for row in rows) == WEIGHTS // 4
    assert all(row.asynchronous for row in rows)


def test_a_gather_in_two_halves_knows_what_lies_between() -> None:
    rows = found_in("gpu_8").rows
    assert all(row.asynchronous and row.hidden_under > 0 for row in rows)
    text = text_of("gpu_8")
    # nothing but the done after the start: nothing hides it
    start = next(line for line in text.splitlines() if " all-gather-start(" in line)
    done = next(line for line in text.splitlines() if " all-gather-done(" in line)
    before, _, after = text.partition(start + "\n")
    moved = before + start + "\n" + done + "\n" + after.replace(done + "\n", "", 1)
    rows = audit(moved, MESHES["gpu_8"]).rows
    assert [row.hidden_under for row in rows if row.phase == "forward"] == [0, 0]


def test_the_largest_buffers_have_their_source() -> None:
    buffers = found_in("tpu_v5e_4").buffers
    # what every layer keeps for the backward pass: the hidden activations of 1,024 tokens
    assert buffers[0].shape == (LAYERS, 1024, HIDDEN)
    assert buffers[0].bytes == 2 * LAYERS * 1024 * HIDDEN
    assert any(one.source == "tests/audit/programs.py:31" for one in buffers)
    assert [one.bytes for one in buffers] == sorted((one.bytes for one in buffers), reverse=True)
