"""Meshes and arrays drawn with characters (rich)."""

import itertools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.meshes import MachineMesh, ring_in_words
from meshwright.present import Column, Row, aligned, bytes_text, count
from meshwright.show.scene import ShownArray

# readable on dark and light terminals
COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red", "bright_cyan", "bright_magenta")
MAX_CELLS_ACROSS = 16
MAX_PLANES = 4


def axis_table(mesh: MachineMesh) -> RenderableType:
    """Each mesh axis: its size and the physical dims it lies on."""
    columns = [Column("axis", right=False), Column("size"), Column("lies on", right=False)]
    rows = [
        Row((axis, str(size), lies_on(mesh, axis)), style=COLOURS[i % len(COLOURS)])
        for i, (axis, size) in enumerate(mesh.shape.items())
    ]
    return Group(*aligned(columns, rows, 10**6))


def ring_lines(mesh: MachineMesh) -> list[str]:
    """How far the hops of each ring axis go: `"sp: ring of 128, every hop one link"`."""
    rings = {axis: mesh.ring_hops(axis) for axis in mesh.axis_names}
    return [f"{axis}: {ring_in_words(hops)}" for axis, hops in rings.items() if hops]


def lies_on(mesh: MachineMesh, axis: str) -> str:
    """In words: `"x (4) and y (2)"`, `"2 slices, over the slower network"`."""
    extent = dict(mesh.axis_extent(axis))
    if not extent:
        return "one place"
    words = []
    slices = extent.pop("slice", 0)
    if slices:
        words.append(f"{slices} slices (the slower network)")
    for name, size in extent.items():
        words.append(f"{size} hosts (the network)" if name == "host" else f"{name} ({size})")
    return " and ".join(words)


def machine_grid(mesh: MachineMesh) -> RenderableType:
    """The machine, chip by chip, each with its logical position in axis order: `0,3`.

    Axes of size 1 are left out. Colour follows the last axis that is split.
    """
    shown = [i for i, size in enumerate(mesh.axis_sizes) if size > 1] or [0]
    last = shown[-1]
    cells: dict[tuple[int, ...], list[Text]] = {}
    for index, device in np.ndenumerate(mesh.devices):
        colour = COLOURS[index[last] % len(COLOURS)]
        text = Text(",".join(str(index[i]) for i in shown), style=colour)
        key = (device.slice_index, *_row_column_plane(device))
        cells.setdefault(key, []).append(text)
    slices = sorted({key[0] for key in cells})
    planes = sorted({key[3] for key in cells})
    names = ", ".join(mesh.axis_names[i] for i in shown)
    parts: list[RenderableType] = [Text(f"each {_unit(mesh)} with its position ({names}):")]
    for slice_index, plane in itertools.islice(itertools.product(slices, planes), MAX_PLANES):
        title = " ".join(
            ([f"slice {slice_index}"] if len(slices) > 1 else [])
            + ([f"z={plane}"] if len(planes) > 1 else [])
        )
        parts.append(_plane(mesh, cells, slice_index, plane, title))
    hidden = len(slices) * len(planes) - MAX_PLANES
    if hidden > 0:
        parts.append(Text(f"… and {hidden} more planes like these (all of them: --html)"))
    return Group(*parts)


def _plane(
    mesh: MachineMesh, cells: dict[tuple[int, ...], list[Text]], index: int, plane: int, title: str
) -> Table:
    rows = sorted({k[1] for k in cells})
    columns = sorted({k[2] for k in cells})
    across, down = ("gpu", "host") if mesh.machine.chip.platform == "gpu" else ("x", "y")
    table = Table(box=box.SQUARE, show_lines=True, title=title or None, title_justify="left")
    many = len(columns) > 1
    table.add_column(f"{down}\\{across}" if len(rows) > 1 else "")
    for column in columns[:MAX_CELLS_ACROSS]:
        table.add_column(str(column) if many else "", justify="center", no_wrap=True)
    if len(columns) > MAX_CELLS_ACROSS:
        table.add_column("…")
    for row in rows[:MAX_CELLS_ACROSS]:
        line: list[RenderableType] = [str(row) if len(rows) > 1 else ""]
        for column in columns[:MAX_CELLS_ACROSS]:
            cores = cells.get((index, row, column, plane), [])
            line.append(Text(" | ").join(cores))
        if len(columns) > MAX_CELLS_ACROSS:
            line.append("…")
        table.add_row(*line)
    if len(rows) > MAX_CELLS_ACROSS:
        table.add_row(*["…"] * len(table.columns))
    return table


def array_grid(array: ShownArray, mesh: MachineMesh) -> RenderableType:
    """The array cut into its shards, each with the ids of the devices that hold it."""
    parts = array.parts(mesh)
    shards = array.layout.shard_indices(mesh.shape).reshape(-1, len(parts))
    holders: dict[tuple[int, ...], list[int]] = {}
    for shard, device in zip(shards, mesh.devices.flat, strict=True):
        holders.setdefault(tuple(int(i) for i in shard), []).append(device.id)
    split = [dim for dim, n in enumerate(parts) if n > 1]
    rows_dim, columns_dim = (*([None] * 2), *split[-2:])[-2:]
    outer = [range(parts[dim]) for dim in split[:-2]]
    shard_shape = array.layout.shard_shape(array.shape, mesh.shape)
    itemsize = jnp.dtype(array.dtype).itemsize
    heading = (
        f"{array.layout}   {'×'.join(map(str, array.shape))} {array.dtype}: "
        f"{count(math.prod(parts), 'shard')} of {'×'.join(map(str, shard_shape)) or 'one element'} "
        f"({bytes_text(math.prod(shard_shape) * itemsize)}), "
        f"{count(array.layout.copies(mesh.shape), 'copy')}; cells hold device ids"
    )
    drawn: list[RenderableType] = [Text(heading)]
    blocks = list(itertools.islice(itertools.product(*outer), MAX_PLANES))
    for block in blocks:
        fixed = dict(zip(split[:-2], block, strict=True))
        drawn.append(_shard_table(array, parts, holders, fixed, rows_dim, columns_dim))
    hidden = math.prod(map(len, outer)) - len(blocks)
    if hidden > 0:
        drawn.append(Text(f"… and {hidden} more blocks (all of them: --html)"))
    return Group(*drawn)


def _shard_table(
    array: ShownArray,
    parts: tuple[int, ...],
    holders: dict[tuple[int, ...], list[int]],
    fixed: dict[int, int],
    rows_dim: int | None,
    columns_dim: int | None,
) -> Table:
    def slots(dim: int | None) -> range:
        return range(min(parts[dim], MAX_CELLS_ACROSS) if dim is not None else 1)

    def label(dim: int | None, i: int) -> str:
        if dim is None:
            return ""
        step = array.shape[dim] // parts[dim]
        return f"{array.layout.dims[dim]} {i * step}:{(i + 1) * step}"

    title = " ".join(label(dim, i) for dim, i in fixed.items())
    table = Table(box=box.SQUARE, show_lines=True, title=title or None, title_justify="left")
    table.add_column("")
    for i in slots(columns_dim):
        table.add_column(label(columns_dim, i), justify="center", no_wrap=True)
    for j in slots(rows_dim):
        line: list[Any] = [label(rows_dim, j)]
        for i in slots(columns_dim):
            where = [0] * len(parts)
            for dim, place in [*fixed.items(), (rows_dim, j), (columns_dim, i)]:
                if dim is not None:
                    where[dim] = place
            line.append(id_ranges(holders[tuple(where)]))
        table.add_row(*line)
    if any(d is not None and parts[d] > MAX_CELLS_ACROSS for d in (rows_dim, columns_dim)):
        table.caption = f"the first {MAX_CELLS_ACROSS} each way"
    return table


def id_ranges(ids: list[int]) -> str:
    """`[0, 1, 2, 5]` as `"0-2,5"`, cut short when long."""
    runs: list[list[int]] = []
    for i in sorted(ids):
        if runs and i == runs[-1][-1] + 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ",".join(texts[:6]) + (f",… ({len(ids)})" if len(texts) > 6 else "")


def _row_column_plane(device: Any) -> tuple[int, int, int]:
    if device.platform == "tpu":
        x, y, z = device.coords
        return y, x, z
    host, index = device.coords
    return host, index, 0


def _unit(mesh: MachineMesh) -> str:
    chip = mesh.machine.chip
    if chip.platform != "tpu":
        return {"gpu": "GPU", "cpu": "CPU"}[chip.platform]
    return "chip" if chip.cores_per_chip == 1 else "chip (core | core)"
