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
from typing import Any

from meshwright.arithmetic import divisors
from meshwright.machines import Machine
from meshwright.meshes import STANDARD_AXES, axes_across_slices

AXES = STANDARD_AXES
Share = tuple[int, ...]  # of one axis, along x, y, z and core
Shares = tuple[Share, ...]  # one share an axis


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
    return Placement(machine, _whole_dims(within, box) or _split_dims(within, box), across)


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
            _shares_of(size, left), key=functools.partial(_worth, box=box, used=tuple(used))
        )
        used = [taken * n for taken, n in zip(used, chosen, strict=True)]
        found.append(chosen)
    return tuple(reversed(found))


def _worth(share: Share, box: Share, used: Share) -> tuple[object, ...]:
    """Whole dims, then many of them, then parts of dims that others have begun."""
    whole = [n for n, side in zip(share, box, strict=True) if n == side]
    begun = [n for n, taken in zip(share, used, strict=True) if taken > 1]
    return math.prod(whole), sum(n > 1 for n in whole), math.prod(begun), share


@functools.lru_cache(maxsize=65536)
def _shares_of(size: int, box: Share) -> tuple[Share, ...]:
    """Every share of this size that divides a box."""
    if not box:
        return ((),) if size == 1 else ()
    return tuple(
        (first, *rest)
        for first in divisors(box[0])
        if size % first == 0
        for rest in _shares_of(size // first, box[1:])
    )
