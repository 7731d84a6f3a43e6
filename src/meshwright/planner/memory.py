"""Bytes of a device at the moment of a step with the most memory in use, and what still fits."""

import math
from collections.abc import Callable

from meshwright.models import OFFLOAD
from meshwright.planner.result import Memory
from meshwright.planner.step import StepModel
from meshwright.planner.terms import term
from meshwright.planner.workload import Choice, Workload
from meshwright.training import LARGEST_COUNT


def memory(step: StepModel) -> Memory:
    """What a device holds at the highest moment, and what it has."""
    kinds = {kind: math.ceil(number) for kind, number in step.fullest.items() if number}
    machine = step.machine
    if step.choice.remat != OFFLOAD:
        return Memory(kinds, machine.usable_memory)
    host = math.ceil(offloaded(step)) * machine.devices_per_host
    return Memory(kinds, machine.usable_memory, host, machine.chip.host_memory_bytes)


def offloaded(step: StepModel) -> float:
    """Bytes of a device's activations in its host's memory, of each micro-batch."""
    return float(sum(stack.offloaded for stack in step.stacks))


def formulas(step: StepModel) -> dict[str, str]:
    """By kind of memory, the formula with its numbers filled in.

    parameters: 4 bytes · ((32 layers · 218,103,808 + 1,050,673,152) / 64 devices + 266,240)
    """
    printed = StepModel(step.workload, step.choice, term)
    return {kind: str(number) for kind, number in printed.fullest.items() if number}


def peak_bytes(step: StepModel) -> dict[str, float]:
    """Total bytes at each moment when memory can be highest."""
    return {peak: sum(kinds.values()) for peak, kinds in step.peaks.items()}


def largest_batch(workload: Workload, choice: Choice) -> int | None:
    """Sequences of a step without micro-batches, with the choice's remat; None if none fit."""
    ranks = workload.data_ranks(choice)
    alone = choice.changed(accumulation=1)

    def fits(sequences: int) -> bool:
        return sequences * ranks <= LARGEST_COUNT and within_budget(
            memory(StepModel(workload.resized(sequences * ranks), alone)), workload
        )

    sequences = _most(fits)
    return sequences * ranks if sequences else None


def largest_seq(workload: Workload, choice: Choice) -> int | None:
    """Tokens of a sequence, one on each data rank, with the remat that keeps least."""
    ranks = workload.data_ranks(choice)
    unit = math.lcm(1024, 2 * (choice.context * choice.tensor))
    remat = least_kept(workload, choice)
    alone = choice.changed(accumulation=1, remat=remat)

    def fits(units: int) -> bool:
        return units * unit <= LARGEST_COUNT and within_budget(
            memory(StepModel(workload.resized(ranks, units * unit), alone)), workload
        )

    units = _most(fits)
    return units * unit if units else None


def least_kept(workload: Workload, choice: Choice) -> str:
    """The remat that keeps least on a device, of those that may be taken."""
    if workload.engine or choice.remat == OFFLOAD:
        return choice.remat
    return OFFLOAD if offers_offload(workload) else "full"


def offers_offload(workload: Workload) -> bool:
    """Whether offload is taken where nothing else fits; a CPU's memory is the host's."""
    return OFFLOAD in workload.remat and workload.machine.chip.platform != "cpu"


def within_budget(need: Memory, workload: Workload) -> bool:
    """Whether it fits; of an engine, into the part of memory that it takes."""
    if workload.engine is None:
        return need.fits
    return need.total <= workload.engine.memory_fraction * need.limit


def _most(fits: Callable[[int], bool]) -> int:
    """The largest number that fits, 0 if 1 does not; fitting must not come back above it."""
    if not fits(1):
        return 0
    high = 2
    while fits(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
