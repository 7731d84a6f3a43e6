"""What a plan expects of a compiled step, and what would be a surprise."""

import dataclasses

import pytest

from meshwright.audits import SentCollective
from meshwright.audits.expected import judged
from meshwright.machines import Machine
from meshwright.planner import Workload
from meshwright.planner.compilers import staged
from meshwright.planner.step import StepModel
from meshwright.proofs.compare import expected
from meshwright.training.config import TrainConfig


def judge(config: TrainConfig, on: str, *rows: SentCollective) -> list[str]:
    """For each row why it is planned, what it was made of, or nothing for a surprise."""
    machine = Machine.parse(on)
    step = StepModel(Workload.of(config, machine))
    found = judged(rows, expected(step))
    return [row.rewritten or row.why if row.planned else "" for row in found]


def row(
    operation: str, axes: tuple[str, ...], shape: tuple[int, ...], dtype: str
) -> SentCollective:
    return SentCollective(operation, axes, 8, dtype, shape, (), "", ())


@pytest.mark.parametrize(
    ("mesh", "tp", "combined"),
    # as the GPU compiler had them: 49 norms of 896, biases of 24 layers, the loss, the norm
    [("fsdp=8", 1, 71_562), ("fsdp=4,tp=2", 2, 57_730)],
)
def test_norms_and_biases_may_be_summed_as_one_array_on_gpus(
    mesh: str, tp: int, combined: int
) -> None:
    config = TrainConfig("qwen2.5-0.5b", mesh=f"dp=1,sp=1,{mesh}", batch=32, seq=2048)
    assert combined - (49 * 896 + 24 * 18 * 64 // tp) < 64
    said = judge(
        config,
        "h100:8",
        row("all-reduce", ("fsdp",), (combined,), "f32"),
        row("all-reduce", ("fsdp",), (2 * combined,), "f32"),
    )
    assert said == ["sums of a step in one array", ""]


def test_a_sum_over_slices_may_be_taken_in_stages() -> None:
    """As libtpu has it for 2*v5e:8x8: within slices over 4 of dp's 8, between them over 2."""
    config = TrainConfig("llama-3.2-1b", mesh="dp=8,fsdp=16,tp=1,sp=1", batch=128, seq=2048)
    # the gradient of a layer's mlp, of which a device has a sixteenth
    said = judge(
        config,
        "2*v5e:8x8",
        dataclasses.replace(row("reduce-scatter", ("dp",), (32, 8192), "bf16"), devices=4),
        dataclasses.replace(
            row("all-reduce", ("dp",), (256, 8, 128), "bf16"), devices=2, between_slices=True
        ),
        dataclasses.replace(row("all-gather", ("dp",), (128, 8192), "bf16"), devices=4),
        # larger than anything that is summed over dp
        dataclasses.replace(row("all-gather", ("dp",), (8192, 8192), "bf16"), devices=4),
    )
    assert said[0] == said[2] == "all-reduce over dp"
    assert said[1].startswith("gradient of")
    assert said[3] == ""


@pytest.mark.parametrize(
    ("on", "mesh", "scattered"),
    [
        # over all devices of the only slice the compiler sums; with several slices it scatters
        ("v5e:8x8", "dp=1,fsdp=64", False),
        ("2*v5e:8x8", "dp=2,fsdp=64", True),
        ("2*v5e:8x8", "dp=8,fsdp=16", True),
    ],
)
def test_gradients_are_summed_whole_only_over_all_of_one_slice(
    on: str, mesh: str, scattered: bool
) -> None:
    machine = Machine.parse(on)
    config = TrainConfig("llama-3.2-3b", mesh=f"{mesh},tp=1,sp=1", batch=128, seq=2048)
    step = StepModel(Workload.of(config, machine))
    mlp = [
        one for one in staged(step)
        if one.what == "gradient of the mlp weights of a layer" and one.axes == ("fsdp",)
    ]  # fmt: skip
    assert {one.operation for one in mlp} == {"reduce-scatter" if scattered else "all-reduce"}


def test_only_a_devices_part_goes_between_slices() -> None:
    machine = Machine.parse("2*v5e:8x8")
    config = TrainConfig("llama-3.2-3b", mesh="dp=8,fsdp=16,tp=1,sp=1", batch=128, seq=2048)
    step = StepModel(Workload.of(config, machine))
    rows = [
        (one.operation, one.bytes) for one in staged(step)
        if one.what == "gradient of the mlp weights of a layer" and one.axes == ("dp",)
    ]  # fmt: skip
    size = 2 * 3 * 3072 * 8192 // 16
    assert rows == [("reduce-scatter", size), ("all-reduce", size // 4), ("all-gather", size)]
