"""The largest batch and the longest sequence that fit on a mesh."""

import dataclasses
import math
from collections.abc import Callable

from meshwright.machines import Machine
from meshwright.models import OFFLOAD
from meshwright.planner.memory import memory
from meshwright.planner.result import Choice, Job, Memory
from meshwright.planner.schedules.engine import ENGINE
from meshwright.planner.step import StepModel

_MOST = 1 << 24


def largest_batch(job: Job, choice: Choice, machine: Machine) -> int | None:
    """Sequences of a step without micro-batches, with the choice's remat; None if none fit."""
    ranks = choice.size("dp", "fsdp")
    alone = dataclasses.replace(choice, accumulation=1)

    def fits(sequences: int) -> bool:
        larger = dataclasses.replace(job, batch=sequences * ranks)
        return _fits(memory(StepModel(larger, alone, machine)), job)

    sequences = _most(fits)
    return sequences * ranks if sequences else None


def largest_seq(job: Job, choice: Choice, machine: Machine) -> int | None:
    """Tokens of a sequence, one on each data rank, with the remat that keeps least."""
    ranks = choice.size("dp", "fsdp")
    unit = math.lcm(1024, 2 * choice.size("sp", "tp"))
    remat = least_kept(job, choice, machine)
    alone = dataclasses.replace(choice, accumulation=1, remat=remat)

    def fits(units: int) -> bool:
        longer = dataclasses.replace(job, batch=ranks, seq=units * unit)
        return _fits(memory(StepModel(longer, alone, machine)), job)

    units = _most(fits)
    return units * unit if units else None


def least_kept(job: Job, choice: Choice, machine: Machine) -> str:
    """The remat that keeps least on a device, of those that may be taken."""
    if job.kind == "serve" or choice.remat == OFFLOAD:
        return choice.remat
    return OFFLOAD if offers_offload(job, machine) else "full"


def offers_offload(job: Job, machine: Machine) -> bool:
    """Whether offload is taken where nothing else fits: if it is known how fast it is."""
    return OFFLOAD in job.remat and machine.chip.host_link_bandwidth is not None


def held_by_engine(need: Memory) -> bool:
    """Whether it is no more than the part of memory that an engine takes by default."""
    return need.total <= ENGINE.memory_fraction * need.limit


def _fits(need: Memory, job: Job) -> bool:
    return held_by_engine(need) if job.kind == "serve" else need.fits


def _most(fits: Callable[[int], bool]) -> int:
    """The largest number that fits, 0 if 1 does not; fitting must not come back above it."""
    if not fits(1):
        return 0
    high = 2
    while high < _MOST and fits(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
