"""What a plan expects of a compiled step, and what would be a surprise."""

import pytest

from meshwright.audit import Collective
from meshwright.audit.expected import judged
from meshwright.machines import Machine
from meshwright.prove.compare import expected, job_and_choice
from meshwright.train.config import TrainConfig


def judge(config: TrainConfig, on: str, *rows: Collective) -> list[str]:
    """For each row why it is planned, what it was made of, or nothing for a surprise."""
    machine = Machine.parse(on)
    known = job_and_choice(config, machine)
    assert known is not None
    found = judged(rows, expected(*known, machine))
    return [row.rewritten or row.why if row.planned else "" for row in found]


def row(operation: str, axes: tuple[str, ...], shape: tuple[int, ...], dtype: str) -> Collective:
    return Collective(operation, axes, 8, dtype, shape, (), "", ())


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
