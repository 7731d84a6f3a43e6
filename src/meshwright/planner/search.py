"""The best way to run a job on each mesh: remat, micro-batches, what tp splits, chunks of the mlp.

For every mesh the fewest micro-batches that fit are taken for each kind of remat, since each more
costs another round of all-gathers; of these the fastest is kept, or one with fewer micro-batches
whose time cannot be told from those of its group (planner/ranking.py). A way that leaves memory's
reserve free is taken before a faster one that does not.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Literal

from meshwright.arithmetic import divisors
from meshwright.errors import MeshwrightError
from meshwright.machines import Machine
from meshwright.models import OFFLOAD
from meshwright.planner import fsdp2
from meshwright.planner.candidates import meshes, refusal, strategies, with_strategy
from meshwright.planner.constraints import Constraints
from meshwright.planner.largest import offers_offload
from meshwright.planner.memory import memory
from meshwright.planner.parts import length
from meshwright.planner.ranking import groups, simplicity
from meshwright.planner.result import Choice, Job, Memory, Refusal
from meshwright.planner.time import StepTime, step_time
from meshwright.planner.work import Work, work
from meshwright.present import count

LONG = 16384  # tokens of a sequence on a device from which the mlp is tried in chunks
CHUNK = 4096
TRY_ALL = 512  # devices up to which every strategy of attention is tried; beyond, auto's is taken
Objective = Literal["throughput", "latency", "memory"]
Fit = tuple[Choice, Memory]


@dataclasses.dataclass(frozen=True)
class Found:
    """A mesh with the best of the rest."""

    choice: Choice
    memory: Memory
    timing: StepTime
    group: int = 0  # of meshes whose times cannot be told apart, from 1; 0: not by time


def search(
    job: Job,
    machine: Machine,
    limits: Constraints,
    objective: Objective,
) -> tuple[list[Found], list[Refusal]]:
    """Every mesh that fits, the best first, and every one that does not, with why."""
    found: list[Found] = []
    refused: list[Refusal] = []
    ways: dict[str, list[Fit]] = {}
    for mesh, why in possible(job, machine, limits):
        if why is not None:
            refused.append(Refusal(mesh, why))
            continue
        fits, least = fitting(job, mesh, machine, limits, objective == "memory")
        if not fits:
            why = _indivisible(job, mesh, limits.fixed.get("accumulation", 1))
            refused.append(_too_large(*least) if least else Refusal(mesh, why))
            continue
        if objective == "memory":
            choice, need = min(fits, key=lambda one: one[1].total)
            found.append(Found(choice, need, step_time(job, choice, machine)))
        else:
            ways[mesh.mesh] = _different(fits)
            found.append(_fastest(job, machine, ways[mesh.mesh]))
    if objective == "memory":
        found.sort(key=lambda one: (one.memory.total, one.timing.step))
        return found, refused
    ranked: list[Found] = []
    alike = groups(found, _step, lambda one: one.memory)
    for number, (bound, members) in enumerate(alike, 1):
        simple = [_simplest(job, machine, one, ways[one.choice.mesh], bound) for one in members]
        simple.sort(key=lambda one: simplicity(one.choice, one.memory))
        ranked += [dataclasses.replace(one, group=number) for one in simple]
    return ranked, refused


def _different(fits: list[Fit]) -> list[Fit]:
    """Without those that only keep less: with as many micro-batches that is slower."""
    alike: dict[tuple[object, ...], Fit] = {}
    for choice, need in fits:  # of one mesh
        rest = choice.accumulation, choice.sequence_parallel, choice.strategy, choice.mlp_chunk
        alike.setdefault(rest, (choice, need))
    return list(alike.values())


def _simplest(job: Job, machine: Machine, fastest: Found, ways: list[Fit], bound: float) -> Found:
    """The way with the fewest micro-batches whose step is within the bound, the fastest of them."""
    found = [fastest]
    for choice, need in ways:
        if choice.accumulation >= fastest.choice.accumulation:
            continue
        done = work(job, choice, machine)
        if sum(done.seconds.values()) <= bound:  # sends only add to it
            found.append(_found(job, machine, choice, need, done))
    within = [one for one in found if _step(one) <= bound]
    return min(within, key=lambda one: (one.choice.accumulation, _step(one)))


def _fastest(job: Job, machine: Machine, ways: list[Fit]) -> Found:
    """The way with the shortest step."""
    done = [(choice, need, work(job, choice, machine)) for choice, need in ways]
    done.sort(key=lambda one: sum(one[2].seconds.values()))
    best = _found(job, machine, *done[0])
    for one in done[1:]:
        if sum(one[2].seconds.values()) >= _step(best):
            break  # sends only add to it
        best = min(best, _found(job, machine, *one), key=_step)
    return best


def _found(job: Job, machine: Machine, choice: Choice, need: Memory, done: Work) -> Found:
    return Found(choice, need, step_time(job, choice, machine, done))


def _step(found: Found) -> float:
    return found.timing.step


def possible(
    job: Job, machine: Machine, limits: Constraints
) -> Iterator[tuple[Choice, str | None]]:
    """The meshes within the limits, each with why it cannot be."""
    every = fsdp2.meshes if job.backend == "torch" else meshes
    for mesh in filter(limits.allows, every(machine.num_devices)):
        yield mesh, why_not(job, mesh, machine, limits)


def why_not(job: Job, mesh: Choice, machine: Machine, limits: Constraints) -> str | None:
    """Why a mesh cannot be, whatever the memory; None if it can."""
    parallel = limits.fixed.get("sequence_parallel", False)
    asked = dataclasses.replace(mesh, sequence_parallel=True) if parallel else mesh
    why = refusal(job, asked)
    if why is None:
        try:
            _strategies(job, mesh, machine, limits)
        except MeshwrightError as reason:
            why = str(reason)
    return why


def fitting(
    job: Job,
    mesh: Choice,
    machine: Machine,
    limits: Constraints,
    smallest: bool = False,
) -> tuple[list[Fit], Fit | None]:
    """The ways to run on a mesh that fit, and the smallest of those that do not.

    With the fewest micro-batches, or with the most where the `smallest` memory is wanted. Ways
    that leave the reserve free are taken before those that need some of it, and offload where
    nothing else fits.
    """
    fits: list[Fit] = []
    least: Fit | None = None
    for enough in (_leaves_reserve, _fits):
        fits, least = _fitting(job, mesh, machine, limits, smallest, enough)
        if fits or least is None or not least[1].fits:
            break
    if (
        not fits
        and least is not None
        and "remat" not in limits.fixed
        and offers_offload(job, machine)
    ):
        offload = dataclasses.replace(limits, fixed={**limits.fixed, "remat": OFFLOAD})
        return fitting(job, mesh, machine, offload, smallest)
    return fits, least


def _leaves_reserve(need: Memory) -> bool:
    return need.fits and not need.tight


def _fits(need: Memory) -> bool:
    return need.fits


def _fitting(
    job: Job,
    mesh: Choice,
    machine: Machine,
    limits: Constraints,
    smallest: bool,
    enough: Callable[[Memory], bool],
) -> tuple[list[Fit], Fit | None]:
    policies = tuple(name for name in job.remat if name != OFFLOAD)
    kinds = (limits.fixed["remat"],) if "remat" in limits.fixed else policies
    accumulation = limits.fixed.get("accumulation")
    fits: list[Fit] = []
    least: Fit | None = None
    for base in _bases(job, mesh, machine, limits):
        if base.mlp_chunk and any(not one.mlp_chunk for one, _ in fits):
            break
        # where keeping least does not fit, nothing does
        last = _fewest(job, base, kinds[-1], machine, accumulation, smallest, enough)
        for kind in kinds if last is not None and enough(last[1]) else kinds[-1:]:
            one = last
            if kind != kinds[-1]:
                one = _fewest(job, base, kind, machine, accumulation, smallest, enough)
            if one is None:
                continue
            if enough(one[1]):
                fits.append(one)
                if one[0].accumulation == 1 and not smallest:
                    break  # keeping less is slower
            elif least is None or one[1].total < least[1].total:
                least = one
    return fits, least


def _bases(job: Job, mesh: Choice, machine: Machine, limits: Constraints) -> Iterator[Choice]:
    """A mesh with strategies of attention, with and without sequence_parallel; last in chunks."""
    long = length(job, mesh) >= LONG and job.backend == "jax"
    chunks = (0, CHUNK) if long else (0,)
    along = (False, True) if mesh.tp > 1 else (False,)
    fixed, able = limits.fixed, _strategies(job, mesh, machine, limits)
    for chunk in (fixed["mlp_chunk"],) if "mlp_chunk" in fixed else chunks:
        for parallel in (fixed["sequence_parallel"],) if "sequence_parallel" in fixed else along:
            if parallel and job.seq % (mesh.sp * mesh.tp):
                continue
            for strategy in able:
                yield Choice(
                    mesh.dp, mesh.fsdp, mesh.tp, mesh.sp,
                    sequence_parallel=parallel, mlp_chunk=chunk, strategy=strategy,
                )  # fmt: skip


def _strategies(job: Job, mesh: Choice, machine: Machine, limits: Constraints) -> tuple[str, ...]:
    """The strategies of attention to try on a mesh; an error says why there are none."""
    fixed = limits.fixed.get("strategy", "auto")
    if fixed == "auto" and machine.num_devices <= TRY_ALL:
        return strategies(job, mesh)
    if mesh.strategy != fixed:
        mesh = dataclasses.replace(mesh, strategy=fixed)
    return (with_strategy(job, mesh, machine).strategy,)


def _fewest(
    job: Job,
    base: Choice,
    remat: str,
    machine: Machine,
    accumulation: int | None,
    most: bool,
    enough: Callable[[Memory], bool],
) -> Fit | None:
    """With the fewest micro-batches that fit, or the most if none does; None if none divides."""
    sequences = job.batch // (base.dp * base.fsdp)
    numbers = divisors(sequences) if accumulation is None else (accumulation,)
    if most:
        numbers = numbers[-1:]
    if sequences % numbers[-1]:
        return None

    def at(index: int) -> Fit:
        choice = Choice(
            base.dp, base.fsdp, base.tp, base.sp, remat, numbers[index], base.sequence_parallel,
            base.strategy, base.mlp_chunk,
        )  # fmt: skip
        return choice, memory(job, choice, machine)

    first = at(0)
    if enough(first[1]) or len(numbers) == 1:
        return first
    last = at(len(numbers) - 1)
    if not enough(last[1]):
        return last
    low, high, best = 0, len(numbers) - 1, last  # low does not fit, high does
    while high - low > 1:
        middle = (low + high) // 2
        one = at(middle)
        low, high, best = (low, middle, one) if enough(one[1]) else (middle, high, best)
    return best


def _too_large(choice: Choice, need: Memory) -> Refusal:
    kind, most = max(need.kinds.items(), key=lambda one: one[1])
    why = (
        f"needs {need.total / 2**30:.1f} of {need.limit / 2**30:.1f} GiB, with remat="
        f"{choice.remat} and accumulation={choice.accumulation}; most of it: {kind}, "
        f"{most / 2**30:.1f}"
    )
    if need.host_limit is not None and not need.fits_host:
        why = (
            f"needs {need.host / 2**30:.1f} of the {need.host_limit / 2**30:.1f} GiB of a host's "
            f"memory, with remat={choice.remat} and accumulation={choice.accumulation}"
        )
    return Refusal(choice, why, need)


def _indivisible(job: Job, mesh: Choice, accumulation: int) -> str:
    """Why the sequences of a device do not divide into so many micro-batches."""
    sequences = job.batch // (mesh.dp * mesh.fsdp)
    return (
        f"accumulation={accumulation} does not divide the {count(sequences, 'sequence')} of a "
        f"device (batch={job.batch} over dp·fsdp={mesh.dp * mesh.fsdp})"
    )
