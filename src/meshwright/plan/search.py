"""The best way to run a job on each mesh: remat, micro-batches, what tp splits, chunks of the mlp.

For every mesh the fewest micro-batches that fit are taken for each kind of remat, since each more
costs another round of gathers; of these the fastest is kept.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Literal

from meshwright.arithmetic import divisors
from meshwright.machines import Machine
from meshwright.plan.candidates import meshes, refusal, with_strategy
from meshwright.plan.constraints import Constraints
from meshwright.plan.memory import memory
from meshwright.plan.parts import length
from meshwright.plan.result import Choice, Job, Memory, Refusal
from meshwright.plan.time import Timed, timed
from meshwright.plan.work import work

REMATS = ("none", "elementwise", "mlp", "full")
LONG = 16384  # tokens of a row on a device from which the mlp is tried in chunks
CHUNK = 4096
Objective = Literal["throughput", "latency", "memory"]
Fit = tuple[Choice, Memory]


@dataclasses.dataclass(frozen=True)
class Found:
    """A mesh with the best of the rest."""

    choice: Choice
    memory: Memory
    timing: Timed


def search(
    job: Job,
    machine: Machine,
    limits: Constraints,
    objective: Objective,
    remat: str | None = None,
    accumulation: int | None = None,
) -> tuple[list[Found], list[Refusal]]:
    """Every mesh that fits, the best first, and every one that does not, with why."""
    found: list[Found] = []
    refused: list[Refusal] = []
    for mesh, why in possible(job, machine, limits):
        if why is not None:
            refused.append(Refusal(mesh, why))
            continue
        fits, least = fitting(job, mesh, machine, remat, accumulation, objective == "memory")
        if not fits:
            refused.append(_too_large(*least) if least else Refusal(mesh, _no_rows(job, mesh)))
            continue
        if objective == "memory":
            choice, need = min(fits, key=lambda one: one[1].total)
            found.append(Found(choice, need, timed(job, choice, machine)))
        else:
            found.append(_fastest(job, machine, fits))
    return sorted(found, key=ranking(objective)), refused


def _fastest(job: Job, machine: Machine, fits: list[Fit]) -> Found:
    best: Found | None = None
    for choice, need in fits:
        done = work(job, choice, machine)
        if best is None or sum(done.seconds.values()) < best.timing.step:
            one = Found(choice, need, timed(job, choice, machine, done))
            if best is None or one.timing.step < best.timing.step:
                best = one
    assert best is not None
    return best


def ranking(objective: Objective) -> Callable[[Found], tuple[float, ...]]:
    """The order of meshes; of two within a thousandth, the one that needs less memory first."""
    if objective == "memory":
        return lambda one: (one.memory.total, one.timing.step)
    return lambda one: (round(1000 * math.log(one.timing.step)), one.memory.total)


def possible(
    job: Job, machine: Machine, limits: Constraints
) -> Iterator[tuple[Choice, str | None]]:
    """The meshes within the limits, each with why it cannot be."""
    chip = machine.chip
    links = chip.links if chip.platform == "gpu" else 1  # a GPU's all lead to the one switch
    flops_per_byte = chip.bf16_flops / (chip.link_bandwidth * links)
    for mesh in meshes(machine.num_devices):
        if not limits.allows(mesh):
            continue
        why = refusal(job, mesh)
        if why is not None:
            yield mesh, why
            continue
        able = with_strategy(job, mesh, flops_per_byte)
        yield (mesh, able) if isinstance(able, str) else (able, None)


def fitting(
    job: Job,
    mesh: Choice,
    machine: Machine,
    remat: str | None,
    accumulation: int | None,
    smallest: bool = False,
) -> tuple[list[Fit], Fit | None]:
    """The ways to run on a mesh that fit, and the smallest of those that do not.

    With the fewest micro-batches, or with the most where the `smallest` memory is wanted.
    """
    fits: list[Fit] = []
    least: Fit | None = None
    for chunk in (0, CHUNK):
        if chunk and (fits or length(job, mesh) < LONG):
            break
        for tp_sequence in (False, True) if mesh.tp > 1 else (False,):
            if tp_sequence and job.seq % (mesh.sp * mesh.tp):
                continue
            kinds = REMATS if remat is None else (remat,)
            base = dataclasses.replace(mesh, tp_sequence=tp_sequence, mlp_chunk=chunk)
            # where keeping least does not fit, nothing does
            last = _fewest(job, base, kinds[-1], machine, accumulation, smallest)
            for kind in kinds if last is not None and last[1].fits else kinds[-1:]:
                one = last
                if kind != kinds[-1]:
                    one = _fewest(job, base, kind, machine, accumulation, smallest)
                if one is None:
                    continue
                if one[1].fits:
                    fits.append(one)
                    if one[0].accumulation == 1 and not smallest:
                        break  # keeping less is slower
                elif least is None or one[1].total < least[1].total:
                    least = one
    return fits, least


def _fewest(
    job: Job, base: Choice, remat: str, machine: Machine, accumulation: int | None, most: bool
) -> Fit | None:
    """With the fewest micro-batches that fit; the most if none does, None if rows do not divide."""
    rows = job.batch // (base.dp * base.fsdp)
    numbers = divisors(rows) if accumulation is None else (accumulation,)
    if most:
        numbers = numbers[-1:]
    if rows % numbers[-1]:
        return None

    def at(index: int) -> Fit:
        choice = Choice(
            base.dp, base.fsdp, base.tp, base.sp, remat, numbers[index], base.tp_sequence,
            base.strategy, base.mlp_chunk,
        )  # fmt: skip
        return choice, memory(job, choice, machine)

    first, last = at(0), at(len(numbers) - 1)
    if first[1].fits or not last[1].fits:
        return first if first[1].fits else last
    low, high, best = 0, len(numbers) - 1, last  # low does not fit, high does
    while high - low > 1:
        middle = (low + high) // 2
        one = at(middle)
        low, high, best = (low, middle, one) if one[1].fits else (middle, high, best)
    return best


def _too_large(choice: Choice, need: Memory) -> Refusal:
    kind, most = max(need.kinds.items(), key=lambda one: one[1])
    why = (
        f"needs {need.total / 2**30:.1f} of {need.limit / 2**30:.1f} GiB, with remat="
        f"{choice.remat} and accumulation={choice.accumulation}; most of it: {kind}, "
        f"{most / 2**30:.1f}"
    )
    return Refusal(choice, why, need)


def _no_rows(job: Job, mesh: Choice) -> str:
    rows = job.batch // (mesh.dp * mesh.fsdp)
    return f"the {rows} rows of a device do not divide into the micro-batches asked for"
