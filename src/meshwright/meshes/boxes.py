"""The part of the torus that each mesh axis gets, and when a ring axis should get another one.

A mesh on a torus is a table of shares: for each axis, into how many places it divides x, y, z and
core. Of a dim that several axes divide, the last axis has neighbouring places, the one before it
places a stride apart, and so on.

    fsdp=8,tp=16,sp=4 on v4:8x8x8, as jax lays it      with a ring that closes
            x  y  z                                            x  y  z
      fsdp        8                                      fsdp        8
      tp    2  8                                         tp    4  4
      sp    4                                            sp    2  2

On the left sp is four chips in a row, half of a ring along x. On the right it is a square, so
that all four hops take one link.
"""

import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from meshwright.arithmetic import divisors
from meshwright.machines import Machine

Share = tuple[int, ...]  # of one axis, along x, y, z and core
Shares = tuple[Share, ...]  # one share an axis


def with_closed_rings(
    placed: np.ndarray, names: tuple[str, ...], machine: Machine, rings: Sequence[str]
) -> np.ndarray:
    """`placed`, with shares exchanged between axes if that closes more rings at no other cost.

    An exchange is made only if it makes no axis's links busier than on the mesh given: a ring
    that does not close sends its last block back over links that are otherwise idle, which costs a
    little latency; links shared between the groups of another axis would cost it bandwidth.
    """
    blocks = slice_blocks(placed)
    found = read_shares(blocks[0][1], machine)
    if found is None:
        return placed
    ring_indices = [names.index(axis) for axis in rings]

    def open_rings(shares: Shares) -> int:
        return sum(not closes(shares, axis, machine) for axis in ring_indices)

    def costs(shares: Shares) -> list[int]:  # of the last axis first: it has the first claim
        others = [axis for axis in range(len(shares)) if axis not in ring_indices]
        return [sharing(shares, axis, machine) for axis in reversed(others)]

    if open_rings(found) == 0:
        return placed
    limits = costs(found)
    sizes = blocks[0][1].shape
    better = [
        shares
        for shares in all_shares(sizes, machine.slice_shape)
        if open_rings(shares) < open_rings(found)
        and all(cost <= limit for cost, limit in zip(costs(shares), limits, strict=True))
    ]
    if not better:
        return placed

    def preference(shares: Shares) -> tuple[object, ...]:
        changed = sum(mine != theirs for mine, theirs in zip(shares, found, strict=True))
        return open_rings(shares), changed, costs(shares), [[-n for n in s] for s in shares]

    chosen = min(better, key=preference)
    result = np.empty_like(placed)
    for where, block in blocks:
        result[where] = deal(block, chosen, machine)
    return result


def slice_blocks(placed: np.ndarray) -> list[tuple[tuple[slice, ...], np.ndarray]]:
    """The part of the mesh on each slice of the machine, and where in the mesh it is."""
    slices = np.vectorize(lambda device: device.slice_index, otypes=[int])(placed)
    blocks = []
    for number in np.unique(slices):
        corners = np.argwhere(slices == number)
        where = tuple(
            slice(int(a), int(b) + 1)
            for a, b in zip(corners.min(axis=0), corners.max(axis=0), strict=True)
        )
        blocks.append((where, placed[where]))
    return blocks


def read_shares(block: np.ndarray, machine: Machine) -> Shares | None:
    """The shares of a mesh on one slice; None if it is laid out in another way."""
    places = np.array([device.position for device in block.flat]).reshape(*block.shape, 4)
    lines = [
        places[tuple(slice(None) if i == axis else 0 for i in range(block.ndim))]
        for axis in range(block.ndim)
    ]
    shares = tuple(tuple(len(np.unique(line[:, dim])) for dim in range(4)) for line in lines)
    divides = tuple(map(math.prod, zip(*shares, strict=True))) == machine.slice_shape
    if not divides or tuple(map(math.prod, shares)) != block.shape:
        return None
    regular = all(
        np.array_equal(np.unique(line[:, dim]), stride(shares, axis, dim) * np.arange(size))
        for axis, line in enumerate(lines)
        for dim, size in enumerate(shares[axis])
    )
    grid = np.zeros(places.shape, int)
    for axis, line in enumerate(lines):
        along = [1] * block.ndim
        along[axis] = block.shape[axis]
        grid = grid + line.reshape(*along, 4)
    return shares if regular and np.array_equal(grid, places) else None


def deal(block: np.ndarray, shares: Shares, machine: Machine) -> np.ndarray:
    """The devices of one slice dealt to the mesh by shares."""
    by_place = {device.position: device for device in block.flat}
    grid = np.empty(machine.slice_shape, dtype=object)
    for place in np.ndindex(grid.shape):
        grid[place] = by_place[place]
    axes = len(shares)
    split = grid.reshape([shares[axis][dim] for dim in range(4) for axis in range(axes)])
    order = [dim * axes + axis for axis in range(axes) for dim in range(4)]
    return split.transpose(order).reshape(block.shape)


def stride(shares: Shares, axis: int, dim: int) -> int:
    """How many places apart the axis's neighbours along the dim are."""
    return math.prod(share[dim] for share in shares[axis + 1 :])


def sharing(shares: Shares, axis: int, machine: Machine) -> int:
    """How busy one collective of the axis makes its busiest links, all its groups at work.

    Groups a stride apart use the same links. Where a group goes all the way round a dim, both
    directions carry it.
    """
    busiest = 1
    for dim, wraps in enumerate(machine.wraps):
        if shares[axis][dim] > 1:
            step = stride(shares, axis, dim)
            round_about = wraps and shares[axis][dim] * step == machine.slice_shape[dim]
            busiest = max(busiest, step if round_about else 2 * step)
    return busiest


def closes(shares: Shares, axis: int, machine: Machine) -> bool:
    """Whether the axis's devices can be walked round with every hop at most one link."""
    *chips, cores = shares[axis]
    sizes = [size for size in chips if size > 1]
    if any(size > 1 and stride(shares, axis, dim) > 1 for dim, size in enumerate(chips)):
        return False
    if math.prod(sizes) <= 2 or cores > 1:
        return True
    whole = any(
        wraps and share == size > 1
        for share, size, wraps in zip(chips, machine.slice_shape[:3], machine.wraps, strict=True)
    )
    return whole or (len(sizes) > 1 and math.prod(sizes) % 2 == 0)


def all_shares(sizes: Sequence[int], box: Share) -> Iterator[Shares]:
    """Every way to divide a box among axes of these sizes."""
    if len(sizes) == 1:  # the last axis gets what is left
        if math.prod(box) == sizes[0]:
            yield (box,)
        return
    for share in shares_of(sizes[0], box):
        left = tuple(whole // part for whole, part in zip(box, share, strict=True))
        for others in all_shares(sizes[1:], left):
            yield (share, *others)


@functools.lru_cache(maxsize=65536)
def shares_of(size: int, box: Share) -> tuple[Share, ...]:
    """Every share of this size that divides a box."""
    if not box:
        return ((),) if size == 1 else ()
    return tuple(
        (first, *rest)
        for first in divisors(box[0])
        if size % first == 0
        for rest in shares_of(size // first, box[1:])
    )
