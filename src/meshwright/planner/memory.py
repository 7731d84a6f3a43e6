"""Bytes of a device at the moment of a step with the most memory in use, by kind."""

import math

from meshwright.models import OFFLOAD
from meshwright.planner.result import Memory
from meshwright.planner.step import Kinds, StepModel
from meshwright.planner.terms import Number, term


def memory(step: StepModel) -> Memory:
    """What a device holds at the highest moment, and what it has."""
    kinds = {kind: math.ceil(number) for kind, number in _fullest(step).items() if number}
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
    printed = StepModel(step.job, step.choice, step.machine, term)
    return {kind: str(number) for kind, number in _fullest(printed).items() if number}


def peak_bytes(step: StepModel) -> dict[str, float]:
    """Total bytes at each moment when memory can be highest."""
    return {peak: sum(kinds.values()) for peak, kinds in step.peaks.items()}


def _fullest(step: StepModel) -> Kinds:
    return max(step.peaks.values(), key=_total)


def _total(kinds: Kinds) -> Number:
    return sum(kinds.values())
