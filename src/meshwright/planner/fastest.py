"""The fastest way to run a workload on a machine, without ranking all of them.

A comparison of machines asks only for the fastest mesh of each: a best-first search by bounds from
below, each refined only while it is the least of all. A step cannot be shorter than its work with
the least remat and one micro-batch; nor than that and what tp, sp and ep make it wait for; neither
depends on how the other devices are split into dp and fsdp. On one mesh it cannot be shorter than
that step with all that it sends: more remat or micro-batches add more to the work than they give
to hide under. And of the splits whose gradients are summed alike, the one with the most fsdp needs
the least memory: no other fits with fewer micro-batches, but it may run the mlp in chunks or
offload, which are tried where nothing else fits. `search` finds the same mesh (tests).
"""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

from meshwright.arithmetic import divisors
from meshwright.lazy import cached_property
from meshwright.machines import Machine
from meshwright.models import OFFLOAD
from meshwright.planner.compilers import all_reduces
from meshwright.planner.constraints import Constraints
from meshwright.planner.links import over, place_axes
from meshwright.planner.memory import offers_offload
from meshwright.planner.search import (
    Candidate,
    allowed_meshes,
    different,
    feasible,
    quickest,
    variants,
    why_not,
)
from meshwright.planner.step import StepModel
from meshwright.planner.time import StepTime, hides, least_seconds, step_time
from meshwright.planner.workload import Choice, Workload

Bounds = dict[tuple[int, int, int], float]
"""By the sizes of tp, sp and ep: seconds of a step, times devices, that it takes at least."""
_OVER_DATA = frozenset({"dp", "fsdp"})
Variant = tuple[bool, int, str]
"""What tells relaxed steps on one mesh from each other."""
_Ways = dict[Variant, list[StepModel]]


def fastest(
    workload: Workload,
    limits: Constraints,
    below: float = math.inf,
    bounds: Bounds | None = None,
) -> Candidate | None:
    """The way with the shortest step of less than `below` seconds; None if there is none.

    A way that leaves memory's reserve free comes before all that do not, however fast. `bounds`
    are kept from one machine to larger ones of the same chip: more devices that share the same
    tokens do not work less time all together. Nor do they wait less, but on a torus, whose links
    may close.
    """
    machine, known = workload.machine, {} if bounds is None else bounds
    devices, order = machine.num_devices, itertools.count()
    best: Candidate | None = None
    # seconds that it takes at least, a number, what they are of, and of one mesh that mesh
    queue: list[tuple[float, int, _Split, Choice | None, bool]] = []
    for split in _splits(workload, limits, known, below * devices):
        known[split.sizes] = devices * split.work
        heapq.heappush(queue, (split.work, next(order), split, None, False))
    while queue:
        bound, _, split, mesh, fits = heapq.heappop(queue)
        limit = best.seconds if best is not None and not best.memory.tight else math.inf
        limit = min(limit, below)
        if bound >= limit:
            break
        if mesh is None and bound < split.waiting:
            heapq.heappush(queue, (split.waiting, next(order), split, None, False))
            if not machine.is_tpu:
                known[split.sizes] = devices * split.waiting
        elif mesh is None:
            seconds = [split.relaxed(each, limit) for each in split.meshes]
            for each, least in zip(split.meshes, seconds, strict=True):
                if least < limit:
                    heapq.heappush(queue, (least, next(order), split, each, False))
            if not machine.is_tpu:
                known[split.sizes] = devices * min(limit, *seconds)
        elif not fits:
            least = max(bound, split.fitting(mesh, limit))
            if least < limit:
                heapq.heappush(queue, (least, next(order), split, mesh, True))
        elif (one := split.quickest(mesh)) is not None and (
            best is None or (one.memory.tight, one.seconds) < (best.memory.tight, best.seconds)
        ):
            best = one
    if best is not None and best.memory.tight and below < math.inf:
        best = fastest(workload, limits)  # one that is not tight may be slower than `below`
    return best if best is not None and best.seconds < below else None


class _Split:
    """Meshes with the same tp, sp and ep, which differ in dp and fsdp, and steps on them."""

    def __init__(self, workload: Workload, limits: Constraints, meshes: list[Choice]) -> None:
        self.workload, self.limits, self.meshes = workload, limits, meshes
        self.sizes, self.sharded = _but_data(meshes[0]), _all_fsdp(meshes[0])
        self.steps = list(_relaxed(workload, self.sharded, limits))
        # with sequence parallelism a device computes no more than without
        along = [step for step in self.steps if step.choice.sequence_parallel]
        self.work = min(map(_work, along or self.steps))
        self._times: dict[tuple[Choice, Variant], StepTime] = {}  # of relaxed steps
        self._alike: dict[bool, _MostSharded] = {}

    @cached_property
    def _waits(self) -> dict[Variant, tuple[float, StepModel]]:
        """Of each relaxed step, what tp, sp and ep make it wait for."""
        return {_variant(step.choice): (_waits(step), step) for step in self.steps}

    @cached_property
    def _least(self) -> list[tuple[float, Variant]]:
        """Seconds at least of each relaxed step, the shortest first."""
        waits = self._waits.items()
        return sorted((_work(step) + seconds, variant) for variant, (seconds, step) in waits)

    @property
    def waiting(self) -> float:
        """Seconds at least, with what tp, sp and ep make it wait for."""
        return self._least[0][0]

    def _time(self, mesh: Choice, variant: Variant) -> StepTime:
        """Of a relaxed step on a mesh."""
        if (mesh, variant) not in self._times:
            other = self._waits[variant][1]
            step = StepModel(other.workload, other.choice.changed(sizes=mesh.sizes))
            step.work = other.work  # but for the optimizer's, which is no less
            self._times[mesh, variant] = step_time(step)
        return self._times[mesh, variant]

    def relaxed(self, mesh: Choice, limit: float) -> float:
        """Seconds at least on a mesh, if memory were no limit; `limit` if not less than that."""
        shortest = limit
        for least, variant in self._least:
            if least >= shortest:
                break
            shortest = min(shortest, self._time(mesh, variant).step)
        return shortest

    def _most_sharded(self, mesh: Choice) -> "_MostSharded":
        """Of the meshes whose gradients are summed as on this one, that with the most fsdp."""
        summed = _sums(mesh, self.workload.machine)
        if summed not in self._alike:
            devices = mesh.size("dp", "fsdp")
            splits = (
                mesh.changed(sizes={**mesh.sizes, "dp": dp, "fsdp": devices // dp})
                for dp in divisors(devices)
            )
            first = next(each for each in splits if _sums(each, self.workload.machine) == summed)
            self._alike[summed] = _MostSharded(self.workload, self.limits, first)
        return self._alike[summed]

    def fitting(self, mesh: Choice, limit: float) -> float:
        """Seconds at least of what fits on a mesh, 0 if that says nothing."""
        least = self._most_sharded(mesh)
        if why_not(self.workload, mesh, self.limits) is not None or least.fits == []:
            return math.inf
        # of ways that need the reserve, others may be better that do not
        if least.fits is None or least.fits[0].memory.tight or not self.limits.allows(least.mesh):
            return 0.0
        shortest = self._shortest(mesh, least.ways, limit)
        if mesh.sizes != least.mesh.sizes:
            for more in least.sparing:
                # if memory were no limit, then what fits
                if self._shortest(mesh, more.relaxed, shortest) < shortest:
                    shortest = self._shortest(mesh, more.ways, shortest)
        return shortest

    def _shortest(self, mesh: Choice, ways: _Ways, limit: float) -> float:
        """Seconds at least of some ways on a mesh; `limit` if not less than that."""
        shortest = limit
        for least, variant in self._least:
            if least >= shortest:
                break
            waits, _ = self._waits[variant]
            for step in ways.get(variant, ()):
                if _work(step) + waits < shortest:
                    shortest = min(shortest, least_seconds(step, self._time(mesh, variant)))
        return shortest

    def quickest(self, mesh: Choice) -> Candidate | None:
        """The fastest way that fits on a mesh."""
        least = self._most_sharded(mesh)
        if mesh.sizes == least.mesh.sizes and least.fits is not None:
            fits = least.fits
        else:
            fits, _ = feasible(self.workload, mesh, self.limits)
        return quickest(fits) if fits else None


class _MostSharded:
    """What fits on the mesh with the most fsdp of those whose gradients are summed alike.

    No other of them needs less memory: what fits there fits here, with no more micro-batches.
    """

    def __init__(self, workload: Workload, limits: Constraints, mesh: Choice) -> None:
        self.workload, self.limits, self.mesh = workload, limits, mesh

    @cached_property
    def fits(self) -> list[Candidate] | None:
        """The ways that fit; None if that mesh cannot be."""
        if why_not(self.workload, self.mesh, self.limits) is not None:
            return None
        step = StepModel(self.workload, self.mesh)
        if sum(step.schedule.always(step).values()) > step.machine.usable_memory:
            return []  # whatever the remat and micro-batches
        return feasible(self.workload, self.mesh, self.limits)[0]

    @cached_property
    def ways(self) -> _Ways:
        """Steps that fit and leave the reserve free."""
        fits = [one for one in self.fits or () if not one.memory.tight]
        return _by_variant(one.step for one in different(fits))

    @cached_property
    def relaxed(self) -> _Ways:
        """The steps if memory were no limit."""
        return _by_variant(_relaxed(self.workload, self.mesh, self.limits))

    @cached_property
    def sparing(self) -> "list[_MostSharded]":
        """With what is tried only where nothing else fits, as it may on another mesh."""
        if not self.fits:
            return []
        first, fixed = self.fits[0].choice, self.limits.fixed
        chunk = max(each.mlp_chunk for each in variants(self.workload, self.mesh, self.limits))
        chunks: list[dict[str, Any]] = [{"mlp_chunk": chunk}] if chunk > first.mlp_chunk else []
        offload: list[dict[str, Any]] = []
        if "remat" not in fixed and first.remat != OFFLOAD and offers_offload(self.workload):
            offload = [{"remat": OFFLOAD} | more for more in ({}, *chunks)]
        return [
            _MostSharded(
                self.workload,
                dataclasses.replace(self.limits, fixed={**fixed, **more}),
                self.mesh,
            )
            for more in chunks + offload
        ]


def _by_variant(steps: Iterable[StepModel]) -> _Ways:
    ways: _Ways = {}
    for step in steps:
        ways.setdefault(_variant(step.choice), []).append(step)
    return ways


def _sums(mesh: Choice, machine: Machine) -> bool:
    """Whether gradients are all-reduced within a TPU's slice: the LM head's waits unsharded."""
    return machine.is_tpu and all_reduces(mesh, machine)


def _variant(choice: Choice) -> Variant:
    return choice.sequence_parallel, choice.mlp_chunk, choice.context_parallel


def _all_fsdp(mesh: Choice) -> Choice:
    kept = {axis: mesh.sizes[axis] for axis in ("tp", "sp", "ep") if axis in mesh.sizes}
    return Choice.of(fsdp=mesh.size("dp", "fsdp"), **kept)


def _but_data(mesh: Choice) -> tuple[int, int, int]:
    return mesh.tensor, mesh.context, mesh.size("ep")


def _splits(
    workload: Workload, limits: Constraints, known: Bounds, below: float
) -> Iterator[_Split]:
    """The meshes by tp, sp and ep, without those that are `known` not to be `below`."""
    meshes: dict[tuple[int, int, int], list[Choice]] = {}
    for mesh in allowed_meshes(workload, limits):
        meshes.setdefault(_but_data(mesh), []).append(mesh)
    for split, alike in meshes.items():
        if known.get(split, 0.0) < below and any(
            why_not(workload, mesh, limits) is None for mesh in (_all_fsdp(alike[0]), *alike)
        ):
            yield _Split(workload, limits, alike)


def _work(step: StepModel) -> float:
    return sum(step.work.seconds.values())


def _relaxed(workload: Workload, mesh: Choice, limits: Constraints) -> Iterator[StepModel]:
    """The steps on a mesh if memory were no limit: each takes no longer than what fits.

    Of one micro-batch, also where their number is given: `least_seconds` counts what more send.
    """
    least_remat = next(name for name in workload.remat if name != OFFLOAD)
    remat = limits.fixed.get("remat", least_remat)
    for choice in variants(workload, mesh, limits):
        yield StepModel(workload, choice.changed(remat=remat, accumulation=1))


def _waits(step: StepModel) -> float:
    """Seconds of collectives over tp, sp and ep that nothing hides."""
    if step.choice.size("tp", "sp", "ep") == 1:
        return 0.0
    placement = place_axes(step.machine, step.choice.sizes)
    seconds = 0.0
    for one in step.collectives:
        if not hides(one) and _OVER_DATA.isdisjoint(one.axes):
            seconds += one.times * over(placement, one.axes).seconds(one.operation, one.bytes)
    return seconds
