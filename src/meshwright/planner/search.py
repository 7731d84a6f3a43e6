"""The best way to run on each mesh: remat, micro-batches, what tp splits, chunks of the mlp.

For every mesh the fewest micro-batches that fit are taken for each kind of remat, since each more
costs another round of all-gathers; of these the fastest is kept, or one with fewer micro-batches
whose time cannot be told from those of its group. A way that leaves memory's reserve free is taken
before a faster one that does not.

The order of choices is no finer than their times are known. The fastest and all within UNCERTAINTY
of it are one group; the fastest of the rest begins the next. Inside a group the simplest comes
first. Choices that need some of memory's reserve come after all others, in groups of their own.
Ranked by `fastest`, each mesh has its fastest way and the order is that of their times.
"""

import dataclasses
import enum
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, TypeVar

from meshwright.arithmetic import divisors
from meshwright.errors import MeshwrightError
from meshwright.lazy import cached_property
from meshwright.models import OFFLOAD, experts_of
from meshwright.planner.attention import strategies, with_strategy
from meshwright.planner.constraints import Constraints
from meshwright.planner.memory import memory, offers_offload
from meshwright.planner.result import Estimate, Memory, Refusal, Serving
from meshwright.planner.step import StepModel
from meshwright.planner.time import StepTime, step_time
from meshwright.planner.workload import Choice, Workload
from meshwright.present import GIB, count

LONG = 16384  # tokens of a sequence on a device from which the mlp is tried in chunks
CHUNK = 4096
TRY_ALL = 512  # devices up to which every strategy of attention is tried; beyond, auto's is taken
RankBy = Literal["throughput", "fastest", "latency", "memory"]
Item = TypeVar("Item")
# of a predicted step time: how far it is from published and compiled steps (docs/plan/plan.md)
UNCERTAINTY = 0.10


class Free(enum.Enum):
    """What is to be left of a device's memory; see Memory."""

    RESERVE = "the reserve"
    SOME = "some"
    NOTHING = "nothing"


@dataclasses.dataclass
class Candidate:
    """A way to run a workload on a mesh."""

    step: StepModel
    memory: Memory
    group: int = 0  # of meshes whose times cannot be told apart, from 1; 0: not by time

    @property
    def choice(self) -> Choice:
        return self.step.choice

    @cached_property
    def timing(self) -> StepTime:
        return step_time(self.step)

    @property
    def seconds(self) -> float:
        return self.timing.step

    def fits(self, free: "Free") -> bool:
        """Whether it fits, and leaves so much free."""
        if free == Free.RESERVE:
            return self.memory.fits and not self.memory.tight
        return self.memory.fits and not (free == Free.SOME and self.memory.exhausted)

    def estimate(self, bound: str, reason: str, serving: Serving | None = None) -> Estimate:
        """What it would cost, with what bounds it and why."""
        timing, work, chip = self.timing, self.step.work, self.step.machine.chip
        return Estimate(
            choice=self.choice,
            memory=self.memory,
            flops=work.flops,
            computed_flops=work.computed,
            memory_bytes=work.memory_bytes,
            collectives=timing.collectives,
            seconds=timing.seconds,
            step_seconds=timing.step,
            mfu=work.flops / timing.step / (chip.bf16_flops / chip.cores_per_chip),
            bound=bound,
            reason=reason,
            group=self.group,
            serving=serving,
        )

    @property
    def working_seconds(self) -> float:
        """Seconds of a step that waits for no link."""
        return sum(self.step.work.seconds.values())


def groups(
    items: Iterable[Item], seconds: Callable[[Item], float], memory: Callable[[Item], Memory]
) -> list[tuple[float, Sequence[Item]]]:
    """The items in groups, the fastest first; with each, the longest time that belongs to it."""
    found: list[tuple[float, list[Item]]] = []
    for item in sorted(items, key=lambda one: (memory(one).tight, seconds(one))):
        bound, members = found[-1] if found else (0.0, [item])
        if seconds(item) <= bound and memory(item).tight == memory(members[0]).tight:
            members.append(item)
        else:
            found.append(((1 + UNCERTAINTY) * seconds(item), [item]))
    return list(found)


def simplicity(choice: Choice, memory: Memory) -> tuple[int, int, int, int]:
    """For an order: the fewest axes, micro-batches and settings, then the least memory."""
    axes = sum(size > 1 for size in choice.sizes.values())
    settings = choice.sequence_parallel + bool(choice.mlp_chunk)
    return axes, choice.accumulation, settings, memory.total


def search(
    workload: Workload, limits: Constraints, rank_by: RankBy
) -> tuple[list[Candidate], list[Refusal]]:
    """Every mesh that fits, the best first, and every one that does not, with why."""
    found: list[Candidate] = []
    refused: list[Refusal] = []
    ways: dict[str, list[Candidate]] = {}
    for mesh in allowed_meshes(workload, limits):
        why = why_not(workload, mesh, limits)
        if why is not None:
            refused.append(Refusal(mesh, why))
            continue
        fits, least = feasible(workload, mesh, limits, rank_by == "memory")
        if not fits:
            why = _indivisible(workload, mesh, limits.fixed.get("accumulation", 1))
            refused.append(_too_large(least) if least else Refusal(mesh, why))
        elif rank_by == "memory":
            found.append(min(fits, key=lambda one: one.memory.total))
        else:
            ways[mesh.mesh] = different(fits)
            found.append(_fastest(ways[mesh.mesh]))
    if rank_by == "memory":
        found.sort(key=lambda one: (one.memory.total, one.seconds))
        return found, refused
    if rank_by == "fastest":
        found.sort(key=lambda one: (one.memory.tight, one.seconds))
        return found, refused
    ranked: list[Candidate] = []
    alike = groups(found, lambda one: one.seconds, lambda one: one.memory)
    for number, (bound, members) in enumerate(alike, 1):
        simple = [_simplest(one, ways[one.choice.mesh], bound) for one in members]
        simple.sort(key=lambda one: simplicity(one.choice, one.memory))
        for one in simple:
            one.group = number
        ranked += simple
    return ranked, refused


def quickest(fits: list[Candidate]) -> Candidate:
    """Of the ways to run on a mesh, the one with the shortest step."""
    return _fastest(different(fits))


def different(fits: list[Candidate]) -> list[Candidate]:
    """Drop choices with the same number of micro-batches but stronger remat: they are slower."""
    alike: dict[Choice, Candidate] = {}
    for one in fits:  # of one mesh
        alike.setdefault(one.choice.changed(remat=""), one)
    return list(alike.values())


def _simplest(fastest: Candidate, ways: list[Candidate], bound: float) -> Candidate:
    """The way with the fewest micro-batches whose step is within the bound, the fastest of them."""
    fewer = [one for one in ways if one.choice.accumulation < fastest.choice.accumulation]
    # links only add to the seconds of work
    within = [one for one in fewer if one.working_seconds <= bound and one.seconds <= bound]
    return min([fastest, *within], key=lambda one: (one.choice.accumulation, one.seconds))


def _fastest(ways: list[Candidate]) -> Candidate:
    """The way with the shortest step."""
    first, *others = sorted(ways, key=lambda one: one.working_seconds)
    for one in others:
        if one.working_seconds >= first.seconds:
            break  # links only add to it
        first = min(first, one, key=lambda each: each.seconds)
    return first


def allowed_meshes(workload: Workload, limits: Constraints) -> Iterator[Choice]:
    """The meshes within the limits; of a model with experts, also those that split them over ep."""
    schedule, devices = workload.schedule, workload.machine.num_devices
    experts = workload.sizes.experts
    ways: tuple[int, ...] = (1,)
    if schedule.splits_experts and any(axis == "ep" for axis, _, _ in limits.limits):
        ways = divisors(devices)  # what cannot be is refused, with the reason
    elif schedule.splits_experts and experts is not None:
        ways = divisors(math.gcd(devices, experts.count))
    for ep in ways:
        for mesh in schedule.meshes(devices // ep):
            split = mesh if ep == 1 else Choice.of(**mesh.sizes, ep=ep)
            if limits.allows(split):
                yield split


def why_not(workload: Workload, mesh: Choice, limits: Constraints) -> str | None:
    """Why a mesh cannot be, whatever the memory; None if it can."""

    def find() -> str | None:
        asked = mesh.changed(sequence_parallel=True) if parallel else mesh
        why = workload.schedule.refusal(workload, asked)
        if why is None:
            try:
                _strategies(workload, mesh, limits)
            except MeshwrightError as reason:
                why = str(reason)
        return why

    parallel = limits.fixed.get("sequence_parallel", False)
    strategy = limits.fixed.get("context_parallel", "auto")
    return workload.once(("why not", parallel, strategy, *mesh.key), find)


def feasible(
    workload: Workload,
    mesh: Choice,
    limits: Constraints,
    smallest: bool = False,
) -> tuple[list[Candidate], Candidate | None]:
    """The ways to run on a mesh that fit, and the smallest of those that do not.

    With the fewest micro-batches, or with the most where the `smallest` memory is wanted. Ways
    that leave the reserve free are taken before those that need some of it, offload where nothing
    else fits, and last those that leave nothing.
    """
    fits: list[Candidate] = []
    least: Candidate | None = None
    for free in (Free.RESERVE, Free.SOME):
        fits, least = _feasible(workload, mesh, limits, smallest, free)
        if fits or least is None or not least.memory.fits:
            break
    if fits or least is None:
        return fits, least
    leaves_nothing = least.memory.fits
    if "remat" not in limits.fixed and offers_offload(workload):
        offload = dataclasses.replace(limits, fixed={**limits.fixed, "remat": OFFLOAD})
        fits, least = feasible(workload, mesh, offload, smallest)
    if not fits and leaves_nothing:
        return _feasible(workload, mesh, limits, smallest, Free.NOTHING)
    return fits, least


def _feasible(
    workload: Workload,
    mesh: Choice,
    limits: Constraints,
    smallest: bool,
    free: Free,
) -> tuple[list[Candidate], Candidate | None]:
    policies = tuple(name for name in workload.remat if name != OFFLOAD)
    kinds = (limits.fixed["remat"],) if "remat" in limits.fixed else policies
    accumulation = limits.fixed.get("accumulation")
    sequences = workload.batch // mesh.data_ranks
    numbers = divisors(sequences) if accumulation is None else (accumulation,)
    if smallest:
        numbers = numbers[-1:]
    fits: list[Candidate] = []
    least: Candidate | None = None
    if sequences % numbers[-1]:
        return fits, least
    for base in variants(workload, mesh, limits):
        if base.mlp_chunk and any(not one.choice.mlp_chunk for one in fits):
            break
        # where keeping least does not fit, nothing does
        last = _fewest(workload, base, kinds[-1], numbers, free)
        fewest, most = last.choice.accumulation, math.inf
        for kind in kinds if last.fits(free) else kinds[-1:]:
            one = last
            if kind != kinds[-1]:
                # what keeps less needs no more micro-batches
                between = tuple(number for number in numbers if fewest <= number <= most)
                one = _fewest(workload, base, kind, between, free, most < math.inf)
            if one.fits(free):
                fits.append(one)
                most = one.choice.accumulation
                if most == fewest and not smallest:
                    break  # keeping less is slower
            elif least is None or one.memory.total < least.memory.total:
                least = one
    return fits, least


def variants(workload: Workload, mesh: Choice, limits: Constraints) -> Iterator[Choice]:
    """A mesh with strategies of attention, with and without sequence_parallel; last in chunks."""
    length = workload.lengths["tokens"] // mesh.context
    # experts are not computed in chunks
    long = length >= LONG and workload.schedule.chunks_mlp and experts_of(workload.model) is None
    chunks = (0, CHUNK) if long else (0,)
    # with sequence parallelism tp splits sequences, of which a capacity is
    along = (False, True) if mesh.tensor > 1 and not workload.config.compute.capacity else (False,)
    fixed, able = limits.fixed, _strategies(workload, mesh, limits)
    for chunk in (fixed["mlp_chunk"],) if "mlp_chunk" in fixed else chunks:
        for parallel in (fixed["sequence_parallel"],) if "sequence_parallel" in fixed else along:
            if parallel and workload.seq % (mesh.context * mesh.tensor):
                continue
            for strategy in able:
                yield mesh.changed(
                    sequence_parallel=parallel, mlp_chunk=chunk, context_parallel=strategy
                )


def _strategies(workload: Workload, mesh: Choice, limits: Constraints) -> tuple[str, ...]:
    """The strategies of attention to try on a mesh; an error says why there are none."""
    fixed = limits.fixed.get("context_parallel", "auto")
    if fixed == "auto" and workload.machine.num_devices <= TRY_ALL:
        return strategies(workload, mesh)
    if mesh.context_parallel != fixed:
        mesh = mesh.changed(context_parallel=fixed)
    return (with_strategy(workload, mesh).context_parallel,)


def _fewest(
    workload: Workload,
    base: Choice,
    remat: str,
    numbers: tuple[int, ...],
    free: Free,
    most_fits: bool = False,
) -> Candidate:
    """With the fewest micro-batches of `numbers` that fit, or the most if none does."""

    def at(index: int) -> Candidate:
        choice = base.changed(remat=remat, accumulation=numbers[index])
        step = StepModel(workload, choice)
        return Candidate(step, memory(step))

    first, best = at(0), None
    if first.fits(free) or len(numbers) == 1:
        return first
    if not most_fits:
        best = at(len(numbers) - 1)
        if not best.fits(free):
            return best
    low, high = 0, len(numbers) - 1  # low does not fit, high does
    while high - low > 1:
        middle = (low + high) // 2
        one = at(middle)
        low, high, best = (low, middle, one) if one.fits(free) else (middle, high, best)
    return best or at(high)


def _too_large(smallest: Candidate) -> Refusal:
    choice, need = smallest.choice, smallest.memory
    kind, most = max(need.kinds.items(), key=lambda one: one[1])
    why = (
        f"needs {need.total / GIB:.1f} of {need.limit / GIB:.1f} GiB, with remat="
        f"{choice.remat} and accumulation={choice.accumulation}; most of it: {kind}, "
        f"{most / GIB:.1f}"
    )
    if need.host_limit is not None and not need.fits_host:
        why = (
            f"needs {need.host / GIB:.1f} of the {need.host_limit / GIB:.1f} GiB of a host's "
            f"memory, with remat={choice.remat} and accumulation={choice.accumulation}"
        )
    return Refusal(choice, why, need)


def _indivisible(workload: Workload, mesh: Choice, accumulation: int) -> str:
    """Why the sequences of a device do not divide into so many micro-batches."""
    ranks = mesh.data_ranks
    sequences = workload.batch // ranks
    return (
        f"accumulation={accumulation} does not divide the {count(sequences, 'sequence')} of a "
        f"device (batch={workload.batch} over dp·fsdp{'·ep' * ('ep' in mesh.sizes)}={ranks})"
    )
