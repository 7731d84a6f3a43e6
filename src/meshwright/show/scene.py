"""The data of a drawing: a mesh on a machine, and sharded arrays."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.layouts import Explanation, Layout, LayoutLike, resolve
from meshwright.machines import Machine
from meshwright.meshes import MachineMesh, ring_in_words


@dataclasses.dataclass(frozen=True)
class ShownArray:
    """An array under a layout; `count` arrays like it."""

    name: str
    shape: tuple[int, ...]
    layout: Layout
    dtype: str = "float32"
    count: int = 1

    def parts(self, mesh: MachineMesh) -> tuple[int, ...]:
        """Into how many parts each dim is split."""
        return tuple(math.prod(mesh.shape[a] for a in axes) for axes in self.layout.axes)

    def shard_numbers(self, mesh: MachineMesh) -> list[int]:
        """For every device in mesh order, the number of its shard, counted row-major."""
        numbers = np.zeros(mesh.axis_sizes, dtype=int)
        of_device = self.layout.shard_indices(mesh.shape)
        for dim, parts in enumerate(self.parts(mesh)):
            numbers = numbers * parts + of_device[..., dim]
        return numbers.ravel().tolist()


@dataclasses.dataclass(frozen=True)
class Scene:
    """A mesh and the arrays to draw on it."""

    mesh: MachineMesh
    arrays: tuple[ShownArray, ...] = ()
    title: str = ""

    def data(self) -> dict[str, Any]:
        """Everything the page needs, as plain data."""
        machine = self.mesh.machine
        return {
            "title": self.title,
            "mesh": str(self.mesh),
            "machine": str(machine),
            "platform": machine.chip.platform,
            "chip": machine.chip.name,
            "axes": [
                {"name": name, "size": size, "extent": self.mesh.axis_extent(name)}
                | _ring(self.mesh.ring_hops(name))
                for name, size in self.mesh.shape.items()
            ],
            "grid": list(machine.grid),
            "host": list(machine.host_grid),
            "wraps": list(machine.wraps) if machine.is_tpu else [],
            "slices": machine.slices,
            # in mesh order, so the index of a device is its logical position
            "devices": [
                [d.id, d.slice_index, d.process_index, *_drawn_at(machine, d.position)]
                for d in self.mesh.devices.flat
            ],
            "arrays": [
                {
                    "name": array.name,
                    "shape": list(array.shape),
                    "dtype": array.dtype,
                    "dims": list(array.layout.dims),
                    "axes": [list(axes) for axes in array.layout.axes],
                    "layout": str(array.layout),
                    "parts": list(array.parts(self.mesh)),
                    # which shard each device holds, in mesh order, numbered row-major
                    "shards": array.shard_numbers(self.mesh),
                    "count": array.count,
                }
                for array in self.arrays
            ],
        }


def scene(
    mesh: MachineMesh,
    arrays: Sequence[tuple[Sequence[int], LayoutLike]] = (),
    model: Explanation | None = None,
    title: str = "",
) -> Scene:
    """A scene of `mesh`, arrays given as (shape, layout), and the arrays of an explained model."""
    shown = []
    for shape, given in arrays:
        layout, own = resolve(given, len(shape), mesh)
        if own is not mesh:
            raise MeshwrightError(f"layout {given!r} does not line up with the mesh '{mesh}'")
        layout.check(mesh.shape, shape, given=given)
        shown.append(ShownArray(str(given), tuple(shape), layout))
    if model is not None:
        shown += [
            ShownArray(row.path, row.shape, row.layout, row.dtype, row.count)
            for row in model.collapsed().rows
        ]
    return Scene(mesh, tuple(shown), title or f"{mesh} on {mesh.machine}")


def _ring(hops: tuple[int, ...]) -> dict[str, Any]:
    """Of a ring axis: its hops in words, and how many hops take how many links."""
    if not hops:
        return {}
    counts = {str(links): hops.count(links) for links in sorted(set(hops))}
    return {"ring": ring_in_words(hops), "hops_by_links": counts}


def _drawn_at(machine: Machine, position: tuple[int, ...]) -> tuple[int, int, int, int]:
    """A device's position in the drawing as (x, y, z, core); GPUs are in rows by host."""
    if machine.is_tpu:
        x, y, z, core = position
        return x, y, z, core
    host, index = position
    return index, host, 0, 0
