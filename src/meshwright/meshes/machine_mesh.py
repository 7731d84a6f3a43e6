"""A mesh on an absent machine: the physical chip at each logical position."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.machines import Machine, slice_of
from meshwright.meshes.arrange import device_list
from meshwright.meshes.rings import RING_AXES, ring_hops
from meshwright.present import Column, Row, count, mesh_text, table_html, text_html

if TYPE_CHECKING:
    from meshwright.meshes.jax_mesh import AbstractMesh, Mesh


@dataclasses.dataclass(frozen=True, eq=False)
class MachineMesh:
    """Like a jax Mesh, but over devices that need not exist.

    >>> mesh = mw.mesh("fsdp=4,tp=4", machine="v5e:4x4")
    >>> mesh.shape, mesh.coords[0][1]
    ({'fsdp': 4, 'tp': 4}, (1, 0, 0, 0))
    """

    machine: Machine
    axis_names: tuple[str, ...]
    devices: np.ndarray  # of AbstractDevice, one array dim per axis
    axis_types: Literal["auto", "explicit"] = "auto"  # for jax

    @property
    def shape(self) -> dict[str, int]:
        return dict(zip(self.axis_names, self.devices.shape, strict=True))

    @property
    def axis_sizes(self) -> tuple[int, ...]:
        return self.devices.shape

    @property
    def size(self) -> int:
        return self.devices.size

    @functools.cached_property
    def coords(self) -> np.ndarray:
        """The physical position of each logical one; `coords[i][j]` is (x, y, z, core) on a TPU."""
        positions = np.empty(self.devices.shape, dtype=object)
        for index, device in np.ndenumerate(self.devices):
            positions[index] = device.position
        return positions

    @property
    def abstract_mesh(self) -> "AbstractMesh":
        """For jax: axis names and sizes without devices."""
        from meshwright.meshes.jax_mesh import abstract_mesh

        return abstract_mesh(self.axis_sizes, self.axis_names, self.axis_types)

    def __getitem__(self, axes: str | tuple[str, ...]) -> "MachineMesh":
        """The part along some axes, as `mesh["dp"]` in PyTorch: of the groups, that of device 0.

        >>> [device.id for device in mw.mesh("dp=2,tp=4", machine="h100:8")["dp"].devices]
        [0, 4]
        """
        names = (axes,) if isinstance(axes, str) else axes
        kept = [self._axis_index(axis) for axis in names]
        first = tuple(slice(None) if i in kept else 0 for i in range(len(self.axis_names)))
        order = [sorted(kept).index(i) for i in kept]
        devices = self.devices[first].transpose(order)
        return dataclasses.replace(self, axis_names=names, devices=devices)

    def axis_extent(self, axis: str) -> dict[str, int]:
        """How far one axis reaches along each physical dim: `{"x": 4, "y": 2}`.

        `slice` counts slices: an axis with it crosses the slower network.
        """
        index = self._axis_index(axis)
        line = np.moveaxis(self.devices, index, 0).reshape(self.devices.shape[index], -1)[:, 0]
        names = ("slice", *self.machine.grid_names)
        places = np.array([(device.slice_index, *device.position) for device in line])
        extents = {name: len(set(places[:, i])) for i, name in enumerate(names)}
        return {name: extent for name, extent in extents.items() if extent > 1}

    def ring_hops(self, axis: str) -> tuple[int, ...]:
        """The number of links of each hop around a ring axis (sp); the last hop goes to the first.

        >>> mw.mesh("sp=8", machine="v5e:2x4").ring_hops("sp")
        (1, 2, 1, 2, 1, 2, 1, 2)

        The maximum over all groups, since they send at the same time. Empty where links cannot be
        counted: an axis that is not a ring or has two devices, an axis across slices, GPUs.
        """
        index = self._axis_index(axis)
        if not self.machine.is_tpu or axis not in RING_AXES or self.devices.shape[index] <= 2:
            return ()
        return ring_hops(self.devices, index, self.machine)

    def to_jax(self, devices: Sequence[Any] | None = None) -> "Mesh":
        """A jax Mesh of `devices` (default: all), each at the position of its abstract counterpart.

        TPU devices are matched by slice and coordinates, others by their order.
        """
        from meshwright.meshes.jax_mesh import all_devices, jax_mesh

        devices = all_devices() if devices is None else device_list(devices)
        if len(devices) != self.size:
            raise MeshwrightError(
                f"machine '{self.machine}' has {self.size} devices, {len(devices)} were given; "
                f"pass as many, or name the machine you have (it has {len(devices)} devices)"
            )
        if self.machine.is_tpu and devices[0].platform == "tpu":
            real = _by_place(devices)
            twins = _by_place(self.machine.devices)
            if real.keys() != twins.keys():
                raise MeshwrightError(
                    f"the TPU devices given are not at the positions of machine '{self.machine}'; "
                    f"they are {Machine.of_devices(devices)}"
                )
            found = {id(twin): real[place] for place, twin in twins.items()}
        else:
            ordered = zip(self.machine.devices, devices, strict=True)
            found = {id(twin): device for twin, device in ordered}
        array = np.empty(self.devices.shape, dtype=object)
        for index, twin in np.ndenumerate(self.devices):
            array[index] = found[id(twin)]
        return jax_mesh(array, self.axis_names, self.axis_types)

    def _axis_index(self, axis: str) -> int:
        if axis not in self.axis_names:
            raise MeshwrightError(
                f"mesh axis {axis!r} is not one of {', '.join(self.axis_names)}"
                f"{did_you_mean(axis, self.axis_names)}"
            )
        return self.axis_names.index(axis)

    def __str__(self) -> str:
        return mesh_text(self.shape)

    def _repr_html_(self) -> str:
        columns = [Column("axis", right=False), Column("size"), Column("reaches", right=False)]
        rows = []
        for axis, size in self.shape.items():
            extent = ", ".join(f"{n} in {name}" for name, n in self.axis_extent(axis).items())
            rows.append(Row((axis, str(size), extent)))
        title = f"mesh {self} on {self.machine}: {count(self.size, 'device')}"
        return text_html(title) + table_html(columns, rows)

    def __repr__(self) -> str:
        return f"MachineMesh({str(self)!r} on {str(self.machine)!r})"


def _by_place(devices: Sequence[Any]) -> dict[tuple[int, ...], Any]:
    """Devices by (slice, x, y, z, core), counted from the corner of their own box."""
    corner = np.min([tuple(device.coords) for device in devices], axis=0)
    return {
        (
            slice_of(device),
            *(int(c) for c in np.asarray(tuple(device.coords)) - corner),
            device.core_on_chip,
        ): device
        for device in devices
    }
