"""Meshes of jax; the other files of this package work without it."""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh as AbstractMesh
from jax.sharding import AxisType
from jax.sharding import Mesh as Mesh

from meshwright.meshes.machine_mesh import MachineMesh

AnyMesh = Mesh | AbstractMesh | MachineMesh


def all_devices() -> list[Any]:
    return jax.devices()


def jax_mesh(
    devices: np.ndarray, names: Sequence[str], axis_types: Literal["auto", "explicit"]
) -> Mesh:
    """The jax Mesh of an array of devices."""
    return Mesh(devices, names, axis_types=_axis_types(axis_types, len(names)))


def abstract_mesh(
    sizes: Sequence[int], names: Sequence[str], axis_types: Literal["auto", "explicit"]
) -> AbstractMesh:
    """Axis names and sizes without devices."""
    kinds = _axis_types(axis_types, len(names))
    return AbstractMesh(tuple(sizes), tuple(names), axis_types=kinds)


def torus_order(within: Sequence[int], across: Sequence[int], devices: Sequence[Any]) -> np.ndarray:
    """TPU devices so that the last axes get the nearest neighbours; `across`: over slices."""
    if max(across) > 1:
        return mesh_utils.create_hybrid_device_mesh(
            within, across, devices, allow_split_physical_axes=True
        )
    return mesh_utils.create_device_mesh(within, devices, allow_split_physical_axes=True)


def _axis_types(name: Literal["auto", "explicit"], number: int) -> tuple[AxisType, ...]:
    return ({"auto": AxisType.Auto, "explicit": AxisType.Explicit}[name],) * number
