"""Which part of the machine each mesh axis gets, from sizes alone.

>>> from meshwright.machines import Machine
>>> place_axes(Machine.parse("v5p:4x4x8"), (1, 16, 8, 1)).shares
((1, 1, 1, 1), (4, 4, 1, 1), (1, 1, 8, 1), (1, 1, 1, 1))

meshwright.mesh places devices; here the same answer comes without any, for machines of thousands
of chips and hundreds of meshes. Tests hold both together. Not the same: slices of 4 or 8 chips and
all of v2 and v3, which jax orders by hand; here they are laid out like the others.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

from meshwright.machines import Machine
from meshwright.meshes import (
    STANDARD_AXES,
    Share,
    Shares,
    axes_across_slices,
    closes,
    is_ring,
    shares_of,
    sharing,
)

AXES = STANDARD_AXES


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """Axes on a machine: how each divides x, y, z and core (or host and GPU), and slices.

    There is one for each machine and sizes, so it is told from others by identity.
    """

    machine: Machine
    shares: Shares
    across: tuple[int, ...]  # of each axis, how many slices it spans
    links: dict[tuple[str, ...], Any] = dataclasses.field(default_factory=dict)  # found so far


@functools.lru_cache(maxsize=4096)
def place_axes(machine: Machine, sizes: tuple[int, ...]) -> Placement:
    """The shares of axes (dp, fsdp, tp, sp) of these sizes."""
    across = tuple(axes_across_slices(sizes, machine.slices))
    within = tuple(size // far for size, far in zip(sizes, across, strict=True))
    if not machine.is_tpu:
        return Placement(machine, _in_listed_order(within, machine.grid), across)
    box = machine.slice_shape
    shares = _whole_dims(within, box) or _split_dims(within, box)
    torus = cast(Machine, _Torus(box, machine.wraps))
    if is_ring("sp", sizes[3]) and across[3] == 1 and not closes(shares, 3, torus):
        shares = _closed(shares, within, torus)
    return Placement(machine, shares, across)


class _Torus(NamedTuple):
    """All that mesh.boxes asks of a machine, worked out once."""

    slice_shape: Share
    wraps: tuple[bool, bool, bool]


def _in_listed_order(sizes: tuple[int, ...], grid: tuple[int, ...]) -> Shares:
    """GPUs and CPUs in the order listed: the last axes inside a host."""
    left = grid[1]
    found: list[Share] = []
    for size in reversed(sizes):
        inside = math.gcd(size, left)
        left //= inside
        found.append((size // inside, inside))
    return tuple(reversed(found))


def _whole_dims(sizes: tuple[int, ...], box: Share) -> Shares | None:
    """The last axis first, each on as many whole dims as make up its size."""
    free = list(box)
    found: list[Share] = []
    for size in reversed(sizes):
        share = [1] * len(box)
        if size > 1:
            combinations = (
                dims
                for many in range(len(box), 0, -1)
                for dims in itertools.combinations(range(len(box)), many)
                if math.prod(free[dim] for dim in dims) == size
            )
            chosen = next(combinations, None)
            if chosen is None:
                return None
            for dim in chosen:
                share[dim], free[dim] = free[dim], 0
        found.append(tuple(share))
    return tuple(reversed(found))


def _split_dims(sizes: tuple[int, ...], box: Share) -> Shares:
    """The last axis first, each on the best part of what is left: whole dims before parts."""
    used = [1] * len(box)
    found: list[Share] = []
    for size in reversed(sizes):
        left = tuple(side // taken for side, taken in zip(box, used, strict=True))
        chosen = max(
            shares_of(size, left), key=functools.partial(_worth, box=box, used=tuple(used))
        )
        used = [taken * n for taken, n in zip(used, chosen, strict=True)]
        found.append(chosen)
    return tuple(reversed(found))


def _worth(share: Share, box: Share, used: Share) -> tuple[object, ...]:
    """Whole dims, then many of them, then parts of dims that others have begun."""
    whole = [n for n, side in zip(share, box, strict=True) if n == side]
    begun = [n for n, taken in zip(share, used, strict=True) if taken > 1]
    return math.prod(whole), sum(n > 1 for n in whole), math.prod(begun), share


def _closed(shares: Shares, sizes: tuple[int, ...], machine: Machine) -> Shares:
    """With shares exchanged so that the ring along sp closes, if no other axis pays for it."""

    def costs(some: Shares) -> list[int]:  # of the last axis first: it has the first claim
        return [sharing(some, axis, machine) for axis in (2, 1, 0)]

    limits = [sharing(shares, axis, machine) for axis in range(3)]
    box = machine.slice_shape
    nothing = (1,) * len(box)

    def completed(later: Shares, left: Share) -> Iterator[Shares]:
        """Every share of what is left for the axes before these, none busier than now."""
        axis = len(sizes) - len(later) - 1
        if axis < 0:
            yield later
            return
        for share in shares_of(sizes[axis], left):
            some = (share, *later)
            # how busy an axis is depends on the later ones alone
            if sharing((*(nothing,) * axis, *some), axis, machine) <= limits[axis]:
                yield from completed(some, _without(left, share))

    # sp is the last axis: whether its ring closes depends on its own share alone
    better = [
        complete
        for ring in shares_of(sizes[3], box)
        if closes((nothing, nothing, nothing, ring), 3, machine)
        for complete in completed((ring,), _without(box, ring))
    ]
    if not better:
        return shares

    def preference(other: Shares) -> tuple[object, ...]:
        changed = sum(mine != theirs for mine, theirs in zip(other, shares, strict=True))
        return changed, costs(other), [[-n for n in share] for share in other]

    return min(better, key=preference)


def _without(box: Share, share: Share) -> Share:
    """What a share leaves of a box."""
    return tuple(side // part for side, part in zip(box, share, strict=True))
