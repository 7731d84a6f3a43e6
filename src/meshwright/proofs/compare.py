"""How far the plan's numbers are from the compiler's."""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

from meshwright.audits import Audit, Collective
from meshwright.planner import ProgramPlan, StepModel, in_stages, memory, staged
from meshwright.present import Column, Row, bytes_text
from meshwright.proofs.proof import Proof


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A number, as planned and as compiled."""

    what: str
    planned: float
    compiled: float

    @property
    def off(self) -> float | None:
        """Planned over compiled, less one; None where there is nothing to divide by."""
        return self.planned / self.compiled - 1 if self.compiled else None


# the TPU compiler pads what it scatters by up to an eighth, and hops the edges where they belong
_PADDED = 1.13
_FLOAT32 = 2  # a compiler may add up in float32 what is bfloat16


def expected(step: StepModel) -> tuple[Collective, ...]:
    """What the plan would have the step send; anything larger of its kind is something else.

    What a TPU's compiler may make of it instead is told apart: all-reduces of full arrays in place
    of all-gathers and reduce-scatters, permutes of the edges of padded parts, and stages of what is
    sent over several slices, within them and between them.
    """
    machine, choice = step.machine, step.choice
    largest: dict[tuple[str, tuple[str, ...], str], tuple[int, str]] = {}

    def add(operation: str, axes: tuple[str, ...], size: float, what: str, made_of: str) -> None:
        kind = operation, axes, made_of
        largest[kind] = max(largest.get(kind, (0, "")), (int(size), what))

    # sums over micro-batches may be sent after them all, in float32
    summed = 2 if machine.is_tpu and choice.accumulation > 1 else 1
    for one in step.collectives:
        what, over = one.what, one.axes
        meant = one.rewrite_of.partition(" over ")[0] or one.operation
        origin = f"{meant} over {'+'.join(over)}"
        for stage in in_stages(one.changed(operation=meant), step):
            operation, axes, size = stage.operation, stage.axes, _PADDED * summed * stage.bytes
            as_meant = (operation, axes) == (meant, over)
            add(operation, axes, size, what, "" if as_meant else origin)
            if machine.is_tpu and operation in ("all-gather", "reduce-scatter"):
                add("all-reduce", axes, size, what, origin)
            if machine.is_tpu and operation == "reduce-scatter":
                edge = size / math.prod(choice.sizes[axis] for axis in axes)
                add("collective-permute", axes, edge, what, origin)
    if machine.chip.platform == "gpu":
        for axes, size in _combined(step).items():
            add("all-reduce", axes, size, "sums of a step in one array", "")
    return tuple(
        Collective(operation, axes, what=what, bytes=size, rewrite_of=made_of)
        for (operation, axes, made_of), (size, what) in largest.items()
    )


def expected_serving(step: StepModel) -> tuple[Collective, ...]:
    """What the plan would have a decode step send, in float32 at most."""
    return tuple(
        Collective(one.operation, one.axes, what=one.what, bytes=_FLOAT32 * int(one.bytes))
        for one in step.collectives
    )


def _combined(step: StepModel) -> Counter[tuple[str, ...]]:
    """Bytes of all sums over the same axes: the GPU compiler sends those outside of loops as one.

    Gradients of norms and of biases, the loss and the gradient's norm are such.
    """
    total: Counter[tuple[str, ...]] = Counter()
    for one in step.collectives:
        if one.operation == "all-reduce" and not one.layers:
            total[one.axes] += one.bytes * one.times
    return total


def compare_program(plan: ProgramPlan, proof: Proof, audit: Audit | None) -> tuple[Comparison, ...]:
    """The same of any program and its plan."""
    compared = _memory(plan.memory.total, proof)
    if audit is None:
        return tuple(compared)
    planned: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for one in plan.collectives:
        planned[one.operation, one.axes] += one.bytes * one.times
    return (*compared, *_traffic(planned, audit))


def comparison_table(compared: Sequence[Comparison]) -> tuple[list[Column], list[Row]]:
    """Planned, compiled, and how far the one is from the other."""
    rows = []
    for number in compared:
        off = "" if number.off is None else f"{100 * number.off:+.1f}%"
        sizes = (bytes_text(int(size)) for size in (number.planned, number.compiled))
        rows.append(Row((number.what, *sizes, off)))
    return [Column("", right=False), *map(Column, ("plan", "compiler", "off"))], rows


def compare(step: StepModel, proof: Proof, audit: Audit | None) -> tuple[Comparison, ...]:
    """Memory, and the bytes of every kind of collective over every set of axes."""
    compared = _memory(memory(step).total, proof)
    if audit is None:
        return tuple(compared)
    planned: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for one in staged(step):
        planned[one.operation, one.axes] += int(one.bytes) * one.times
    return (*compared, *_traffic(planned, audit))


def _memory(planned: int, proof: Proof) -> list[Comparison]:
    if proof.footprint is not None:
        return [Comparison("memory of a device", planned, proof.footprint.total)]
    if proof.out_of_memory is not None:
        return [Comparison("memory of a device", planned, proof.out_of_memory.needed)]
    return []


def _traffic(planned: Counter[tuple[str, tuple[str, ...]]], audit: Audit) -> list[Comparison]:
    compiled: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for row in audit.rows:
        if row.counted:
            compiled[row.operation, row.axes] += row.bytes * row.times
    kinds = sorted({*planned, *compiled}, key=lambda kind: -compiled[kind])
    return [
        Comparison(
            f"{operation} over {'+'.join(axes)}",
            planned[operation, axes],
            compiled[operation, axes],
        )
        for operation, axes in kinds
    ]
