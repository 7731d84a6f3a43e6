"""T5X's meshes: one tile of the slice per model replica, data × model over the tiles.

    >>> mesh = tile_mesh("v3:4x4", submesh=(2, 1, 1, 2))
    >>> mesh.shape
    {'data': 8, 'model': 4}

Positions equal T5X's wherever T5X supports the case. We also support any count that divides the
slice, every TPU generation, GPUs and several slices.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshwright.arithmetic import divisors, whole_number, whole_numbers
from meshwright.errors import MeshwrightError
from meshwright.machines import Machine
from meshwright.meshes.machine_mesh import MachineMesh
from meshwright.present import count


def tile_mesh(
    machine: Machine | str,
    submesh: Sequence[int] | None = None,
    num_partitions: int | None = None,
) -> MachineMesh:
    """Data × model over tiles of `submesh` (x, y, z, cores) or of `num_partitions` devices."""
    machine = Machine.parse(machine)
    if (submesh is None) == (num_partitions is None):
        raise MeshwrightError(
            f"tile_mesh takes either submesh= or num_partitions=, got submesh={submesh!r}, "
            f"num_partitions={num_partitions!r}; give exactly one"
        )
    if num_partitions is not None:
        tile = choose_tile(machine, num_partitions)
    else:
        tile = _checked_tile(machine, submesh)
    by_position = {(d.slice_index, *d.position): d for d in machine.devices}
    per_slice = positions(machine.grid, tile, machine.host_grid)
    devices = np.empty((machine.slices, *per_slice.shape), dtype=object)
    for index in range(machine.slices):
        for place, position in np.ndenumerate(per_slice):
            devices[index, *place] = by_position[index, *position]
    joined = devices.reshape(machine.slices * per_slice.shape[0], per_slice.shape[1])
    return MachineMesh(machine, ("data", "model"), joined)


def positions(grid: tuple[int, ...], tile: tuple[int, ...], host: tuple[int, ...]) -> np.ndarray:
    """The grid position at each (data, model) index, as an object array of tuples."""
    swap = swapped_dims(grid, tile)
    order = list(range(len(grid)))
    if swap is not None:
        order[swap[0]], order[swap[1]] = order[swap[1]], order[swap[0]]
        host = (1,) * len(grid)
    # per dim (data over hosts, data in a host, model over hosts, model in a host)
    parts = [_split(grid[i], tile[i], host[i]) for i in order]
    cells = np.empty(grid, dtype=object)
    for position in np.ndindex(*grid):
        cells[position] = position
    split = cells.transpose(order).reshape([size for part in parts for size in part])
    dims = len(grid)
    grouped = split.transpose([4 * dim + kind for kind in range(4) for dim in range(dims)])
    data = math.prod(grid) // math.prod(tile)
    return grouped.reshape(data, math.prod(tile))


def swapped_dims(grid: tuple[int, ...], tile: tuple[int, ...]) -> tuple[int, int] | None:
    """The two dims T5X swaps (and then ignores hosts) so that rings of data close on the torus."""
    if len(grid) != 4 or tile[3] != grid[3]:
        return None
    (gx, gy, gz), (mx, my, mz) = grid[:3], tile[:3]
    x_is_whole, y_is_whole, z_is_whole = mx == gx > 1, my == gy > 1, mz == gz > 1
    if (x_is_whole and my == mz == 1) or (mx == 1 and y_is_whole and z_is_whole):
        return 1, 2
    if (y_is_whole and mx == mz == 1) or (my == 1 and x_is_whole and z_is_whole):
        return 0, 2
    return None


def choose_tile(machine: Machine, num_partitions: int) -> tuple[int, ...]:
    """The tile of `num_partitions` devices: T5X's table where it fits, else the most compact.

    Compact: inside one host if it can be, aligned with hosts, then with the smallest sum of sides.
    """
    grid, host = machine.grid, machine.host_grid
    per_slice = math.prod(grid)
    num_partitions = whole_number(num_partitions, "num_partitions")
    if num_partitions < 1 or per_slice % num_partitions:
        near = sorted(sorted(divisors(per_slice), key=lambda d: abs(d - num_partitions))[:4])
        raise MeshwrightError(
            f"num_partitions={num_partitions} does not divide the {per_slice} devices of a slice "
            f"of '{machine}'; {', '.join(map(str, near))} would fit"
        )
    known = _table(machine, num_partitions)
    if known is not None and all(g % t == 0 for t, g in zip(known, grid, strict=True)):
        return known
    tiles = [
        tile
        for tile in itertools.product(*map(divisors, grid))
        if math.prod(tile) == num_partitions
    ]

    def preference(tile: tuple[int, ...]) -> tuple[object, ...]:
        inside = all(h % t == 0 for t, h in zip(tile, host, strict=True))
        aligned = all(t % h == 0 or h % t == 0 for t, h in zip(tile, host, strict=True))
        # cores of one chip first, then compact, then long along x
        return (not inside, not aligned, -tile[-1], sum(tile), [-t for t in tile])

    return min(tiles, key=preference)


def _table(machine: Machine, num_partitions: int) -> tuple[int, ...] | None:
    """T5X's choice: its v2/v3 table for 2-D tori of two-core chips, its v4 table for 3-D tori."""
    if not machine.is_tpu:
        return None
    gx, _, gz, cores = machine.slice_shape
    if machine.chip.torus_dims == 2 and cores == 2:
        table = {1: (1, 1, 1, 1), 2: (1, 1, 1, 2), 4: (2, 1, 1, 2), 8: (2, 2, 1, 2)}
        return (table | {16: (4, 2, 1, 2)}).get(num_partitions)
    if machine.chip.torus_dims != 3 or cores != 1:
        return None
    sixteen = (
        (1, 1, 16, 1)
        if gz >= 16
        else (8, 2, 1, 1)
        if gx >= 8
        else (4, 4, 1, 1)
        if gx >= 4
        else (2, 2, 4, 1)
    )
    return {
        1: (1, 1, 1, 1),
        2: (1, 2, 1, 1),
        4: (4, 1, 1, 1) if gx >= 4 else (2, 2, 1, 1),
        8: (1, 1, 8, 1) if gz >= 8 else (4, 2, 1, 1),
        16: sixteen,
    }.get(num_partitions)


def _split(size: int, tile: int, host: int) -> tuple[int, int, int, int]:
    """One dim as (data over hosts, data in a host, model over hosts, model in a host)."""
    data = size // tile
    if tile % host and host % tile:
        # T5X stops here; a tile that straddles hosts keeps whole the part that both share
        host = math.gcd(tile, host)
    if tile >= host:
        return data, 1, tile // host, host
    in_host = host // tile
    return data // in_host, in_host, 1, tile


def _checked_tile(machine: Machine, submesh: Any) -> tuple[int, ...]:
    names = machine.grid_names
    form = f"({', '.join(names)})"
    tile = whole_numbers(submesh, f"submesh (a tile is {form})")
    grid = machine.grid
    if len(tile) != len(grid):
        raise MeshwrightError(
            f"submesh {tuple(submesh)!r} has {count(len(tile), 'size')}; a tile of '{machine}' is "
            f"{form}, at most {grid}; "
            f"num_partitions={math.prod(tile)} chooses a tile on any machine"
        )
    for name, size, whole in zip(names, tile, grid, strict=True):
        if size < 1 or whole % size:
            fits = divisors(whole)
            raise MeshwrightError(
                f"submesh {tuple(submesh)!r} does not divide slice {grid} of '{machine}': "
                f"{name}={size} into {whole}; {name} can be {', '.join(map(str, fits))}"
            )
    return tile
