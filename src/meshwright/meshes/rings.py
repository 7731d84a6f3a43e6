"""Rings on a torus: an order along a mesh axis in which every hop is one link.

    >>> mesh = mw.mesh("sp=8", machine="v5e:2x4")
    >>> [place[:2] for place in mesh.coords]
    [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3), (0, 3), (0, 2), (0, 1)]

A ring exchange sends blocks of a sequence from each position of the axis to the next, and from the
last to the first, all at the same time. jax's order is row-major over the chips, so it jumps at the
end of each row of chips. Ours alternates the direction of rows, and keeps one column for the
return.
"""

import itertools
import logging
import math
from collections.abc import Iterator, Sequence

import numpy as np

from meshwright.machines import Machine
from meshwright.meshes.boxes import with_closed_rings

logger = logging.getLogger("meshwright")

RING_AXES = ("sp",)  # axes with ring exchanges


def is_ring(axis: str, size: int, ring_axes: Sequence[str] = RING_AXES) -> bool:
    """Whether the order along the axis matters: two devices are neighbours in any order."""
    return axis in ring_axes and size > 2


def lay_rings(
    placed: np.ndarray,
    names: Sequence[str],
    machine: Machine,
    ring_axes: Sequence[str] = RING_AXES,
) -> np.ndarray:
    """`placed` with the positions along each ring axis reordered so that neighbours are linked.

    Every group of an axis gets the same order, so the mesh stays a grid. A mesh without a ring, one
    of GPUs or a ring across slices is returned as it is.
    """
    rings = [
        axis
        for axis, size in zip(names, placed.shape, strict=True)
        if machine.is_tpu and is_ring(axis, size, ring_axes) and not crosses(placed, names, axis)
    ]
    if any(hop_lengths(groups_along(placed, names.index(a)), machine).max() > 1 for a in rings):
        placed = with_closed_rings(placed, tuple(names), machine, rings)
    for axis in rings:
        index = names.index(axis)
        order = ring_order(groups_along(placed, index), machine)
        placed = np.take(placed, order, axis=index)
        hops = hop_lengths(groups_along(placed, index), machine).max(axis=1)
        if hops.max() > 1:
            logger.info("mesh axis %s on '%s': %s", axis, machine, ring_in_words(hops.tolist()))
    return placed


def groups_along(placed: np.ndarray, index: int) -> np.ndarray:
    """The place of each device, as [position on the axis, group, (x, y, z, core)]."""
    lines = np.moveaxis(placed, index, 0).reshape(placed.shape[index], -1)
    return np.array([[device.position for device in line] for line in lines])


def crosses(placed: np.ndarray, names: Sequence[str], axis: str) -> bool:
    """Whether the axis crosses slices."""
    lines = np.moveaxis(placed, names.index(axis), 0)
    slices = np.vectorize(lambda device: device.slice_index, otypes=[int])(lines)
    return bool((slices != slices[0]).any())


def hop_lengths(places: np.ndarray, machine: Machine) -> np.ndarray:
    """How many links lie between each place and the next, the first coming after the last.

    `places` is [position, …, (x, y, z, core)]; a hop from core to core of one chip takes none.
    """
    return links_between(places, np.roll(places, -1, axis=0), machine)


def links_between(one: np.ndarray, other: np.ndarray, machine: Machine) -> np.ndarray:
    """Links on the shortest way from place to place, around the torus where that is shorter."""
    apart = np.abs(one - other)[..., :3]
    around = np.array(machine.slice_shape[:3]) - apart
    links: np.ndarray = np.where(machine.wraps, np.minimum(apart, around), apart).sum(axis=-1)
    return links


def ring_order(places: np.ndarray, machine: Machine) -> np.ndarray:
    """The order of positions with the fewest long hops; the present one where none is better.

    `places` is [position, group, (x, y, z, core)]. The first position stays the first.
    """

    def badness(order: np.ndarray) -> tuple[int, int, int]:
        hops = hop_lengths(places[order], machine)
        return int((hops > 1).sum()), int(hops.max()), int(hops.sum())

    best = np.arange(len(places))
    least = badness(best)
    for order in itertools.chain(box_orders(places[:, 0]), nearest_first(places, machine)):
        if least[0] == 0:
            break
        if badness(order) < least:
            best, least = order, badness(order)
    return np.roll(best, -int(np.argmin(best)))


def box_orders(places: np.ndarray) -> Iterator[np.ndarray]:
    """Ways to walk through a box of places [position, (x, y, z, core)], as orders of positions.

    None if they fill no box.
    """
    values = [np.unique(column, return_inverse=True) for column in places.T]
    sizes = [len(each) for each, _ in values]
    if math.prod(sizes) != len(places):
        return
    flat = np.ravel_multi_index(tuple(index for _, index in values), sizes)
    position = np.argsort(flat)  # of each cell of the box, row by row
    *chips, cores = sizes
    for dims in itertools.permutations([dim for dim, size in enumerate(chips) if size > 1]):
        for walk in (loop, snake):
            cells = np.zeros((math.prod(chips), 4), int)
            cells[:, dims] = walk([chips[dim] for dim in dims])
            cells = np.repeat(cells, cores, axis=0)  # the cores of a chip one after the other
            cells[:, 3] = np.arange(len(cells)) % cores
            yield position[np.ravel_multi_index(tuple(cells.T), sizes)]
        if cores > 1:  # out on one core of each chip, back on the others
            cells = np.zeros((len(places), 4), int)
            cells[:, (3, *dims)] = loop([cores, *(chips[dim] for dim in dims)])
            yield position[np.ravel_multi_index(tuple(cells.T), sizes)]


def nearest_first(places: np.ndarray, machine: Machine) -> Iterator[np.ndarray]:
    """From each position to the nearest not yet visited: for groups that fill no box.

    jax makes such groups on a few small slices (7x 2x2x2), of an axis that is not the last.
    """
    left, order = list(range(1, len(places))), [0]
    while left:
        away = links_between(places[left], places[order[-1]], machine).max(axis=1)
        order.append(left.pop(int(np.argmin(away))))
    yield np.array(order)


def snake(sizes: Sequence[int]) -> np.ndarray:
    """A path through all cells of a box, each beside the one before: [cell, dim].

    >>> snake([2, 3]).tolist()
    [[0, 0], [0, 1], [0, 2], [1, 2], [1, 1], [1, 0]]
    """
    if not sizes:
        return np.zeros((1, 0), int)
    inner = snake(sizes[1:])
    rows = [
        np.column_stack([np.full(len(inner), i), inner[::-1] if i % 2 else inner])
        for i in range(sizes[0])
    ]
    return np.concatenate(rows)


def loop(sizes: Sequence[int]) -> np.ndarray:
    """A way round all cells of a box: row by row to and fro past column 0, then back through it.

    The rows lie along the first dim. It closes if the number of rows is even, if a row has two
    cells, or if the links of the first dim wrap around.

    >>> loop([3, 2]).tolist()
    [[1, 0], [2, 0], [2, 1], [1, 1], [0, 1], [0, 0]]
    """
    path = snake(sizes[1:])
    row, column = snake([len(path), sizes[0] - 1]).T
    there = np.column_stack([column + 1, path[row]])
    back = np.column_stack([np.zeros(len(path), int), path[::-1]])
    return np.concatenate([there, back])


def ring_in_words(hops: Sequence[int]) -> str:
    """`"ring of 8, every hop one link"`, `"ring of 4, 1 of 4 hops takes 3 links"`."""
    long = [(hops.count(links), links) for links in sorted(set(hops)) if links > 1]
    if not long:
        inside = " or inside a chip" if 0 in hops else ""
        return f"ring of {len(hops)}, every hop one link{inside}"
    times, links = long[0]
    parts = [f"{times} of {len(hops)} hops {_takes(times)} {links} links"]
    parts += [f"{times} {_takes(times)} {links}" for times, links in long[1:]]
    return f"ring of {len(hops)}, {', '.join(parts)}"


def _takes(times: int) -> str:
    return "takes" if times == 1 else "take"
