"""The fastest way to run a workload on a machine, without ranking all of them.

A comparison of machines asks only for the fastest mesh of each. Bounds from below spare most of the
search. A step cannot be shorter than its work with the least remat and one micro-batch, and what
tp, sp and ep make it wait for; neither depends on how the other devices are split into dp and fsdp.
On one mesh it cannot be shorter than that step with all that it sends: more remat or micro-batches
add more to the work than they give to hide under. And where all of them are fsdp, memory is the
least: no split of them fits with fewer micro-batches. `search` finds the same mesh (tests).
"""

import math
from collections.abc import Iterable, Iterator

from meshwright.models import OFFLOAD
from meshwright.planner.constraints import Constraints
from meshwright.planner.links import over, place_axes
from meshwright.planner.search import (
    Candidate,
    allowed_meshes,
    feasible,
    quickest,
    variants,
    why_not,
)
from meshwright.planner.step import StepModel
from meshwright.planner.time import hides, step_time
from meshwright.planner.workload import Choice, Workload

Bounds = dict[tuple[int, int, int], float]
"""By the sizes of tp, sp and ep: seconds of a step, times devices, that it takes at least."""


def fastest(
    workload: Workload,
    limits: Constraints,
    below: float = math.inf,
    bounds: Bounds | None = None,
) -> Candidate | None:
    """The way with the shortest step of less than `below` seconds; None if there is none.

    A way that leaves memory's reserve free comes before all that do not, however fast. `bounds`
    are kept from one machine to larger ones of the same GPU: more devices that share the same
    tokens do not take less time all together.
    """
    devices = workload.machine.num_devices
    known = {} if bounds is None or workload.machine.is_tpu else bounds
    best: Candidate | None = None
    splits = _splits(workload, limits, known, below * devices)
    for work, steps, meshes in sorted(splits, key=lambda one: one[0]):
        limit = _limit(best, below)
        if work >= limit:
            break
        least = {step: _work(step) + _waits(step) for step in steps}
        known[_but_data(meshes[0])] = devices * min(least.values())
        quick = [step for step, seconds in least.items() if seconds < limit]
        # where a step with the least remat and one micro-batch is too long, every way is
        if meshes := [mesh for mesh in meshes if _may_beat(limit, quick, mesh)]:
            best = _best_split(workload, limits, meshes, best, below)
    if best is not None and best.memory.tight and below < math.inf:
        best = fastest(workload, limits)  # one that is not tight may be slower than `below`
    return best if best is not None and best.seconds < below else None


def _limit(best: Candidate | None, below: float) -> float:
    """Seconds from which a step need not be looked at."""
    return below if best is None or best.memory.tight else min(below, best.seconds)


def _best_split(
    workload: Workload,
    limits: Constraints,
    meshes: list[Choice],
    best: Candidate | None,
    below: float,
) -> Candidate | None:
    """The best so far, or the fastest way on meshes that differ only in dp and fsdp."""
    ways, quick = None, []  # that fit where all is fsdp; that may be shorter than the limit
    sharded = _all_fsdp(meshes[0])
    if why_not(workload, sharded, limits) is None:
        ways, _ = feasible(workload, sharded, limits)
        if not ways:
            return best
        limit = _limit(best, below)
        quick = [one.step for one in ways if one.working_seconds < limit]
    for mesh in meshes:
        limit = _limit(best, below)
        if why_not(workload, mesh, limits) is not None:
            continue
        if ways is not None and mesh.sizes == sharded.sizes:
            fits = ways
        else:
            if ways is not None and not ways[0].memory.tight and not _may_beat(limit, quick, mesh):
                continue
            fits, _ = feasible(workload, mesh, limits)
        if fits:
            one = quickest(fits)
            if best is None or (one.memory.tight, one.seconds) < (best.memory.tight, best.seconds):
                best = one
    return best


def _may_beat(limit: float, steps: Iterable[StepModel], mesh: Choice) -> bool:
    """Whether one of the steps would take less than so many seconds on a mesh."""
    for other in steps:
        if _work(other) < limit:
            step = StepModel(other.workload, other.choice.changed(sizes=mesh.sizes))
            step.work = other.work  # but for the optimizer's, which is no less
            if step_time(step).step < limit:
                return True
    return False


def _all_fsdp(mesh: Choice) -> Choice:
    kept = {axis: mesh.sizes[axis] for axis in ("tp", "sp", "ep") if axis in mesh.sizes}
    return Choice.of(fsdp=mesh.size("dp", "fsdp"), **kept)


def _but_data(mesh: Choice) -> tuple[int, int, int]:
    return mesh.tensor, mesh.context, mesh.size("ep")


def _splits(
    workload: Workload, limits: Constraints, known: Bounds, below: float
) -> Iterator[tuple[float, list[StepModel], list[Choice]]]:
    """The meshes by tp, sp and ep, with steps no longer than theirs, and their work.

    Weights are split over dp and fsdp in all ways; that changes what is sent, and the optimizer's
    work, which is the least where all is fsdp. Without those that are `known` not to be `below`.
    """
    meshes: dict[tuple[int, int, int], list[Choice]] = {}
    for mesh in allowed_meshes(workload, limits):
        meshes.setdefault(_but_data(mesh), []).append(mesh)
    for split, alike in meshes.items():
        if known.get(split, 0.0) >= below:
            continue
        sharded = _all_fsdp(alike[0])
        if any(why_not(workload, mesh, limits) is None for mesh in (sharded, alike[0])):
            steps = list(_relaxed(workload, sharded, limits))
            yield min(map(_work, steps)), steps, alike


def _work(step: StepModel) -> float:
    return sum(step.work.seconds.values())


def _relaxed(workload: Workload, mesh: Choice, limits: Constraints) -> Iterator[StepModel]:
    """The steps on a mesh if memory were no limit: each takes no longer than what fits."""
    remat = next(name for name in workload.remat if name != OFFLOAD)
    fixed = limits.fixed
    for choice in variants(workload, mesh, limits):
        yield StepModel(
            workload,
            choice.changed(
                remat=fixed.get("remat", remat),
                accumulation=fixed.get("accumulation", 1),
            ),
        )


def _waits(step: StepModel) -> float:
    """Seconds of collectives over tp, sp and ep that nothing hides."""
    if step.choice.size("tp", "sp", "ep") == 1:
        return 0.0
    placement = place_axes(step.machine, step.choice.sizes)
    seconds = 0.0
    for one in step.collectives:
        if not hides(one) and not {*one.axes} & {"dp", "fsdp"}:
            seconds += one.times * over(placement, one.axes).seconds(one.operation, one.bytes)
    return seconds
