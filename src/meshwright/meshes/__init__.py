"""Meshes: MeshSpec → devices in order; T5X tiles on a torus; slices."""

from typing import TYPE_CHECKING

from meshwright.lazy import import_when_used
from meshwright.meshes.arrange import axes_across_slices, device_list
from meshwright.meshes.build import mesh
from meshwright.meshes.machine_mesh import MachineMesh
from meshwright.meshes.rings import ring_in_words
from meshwright.meshes.spec import (
    FIELD_ROLES,
    MOST_TRIED,
    RESERVED_AXIS,
    ROLES,
    STANDARD_AXES,
    Accepts,
    MeshShape,
    MeshSpec,
    check_role,
    nearest_sizes,
)
from meshwright.meshes.tiles import tile_mesh

if TYPE_CHECKING:
    from meshwright.meshes.jax_mesh import AnyMesh

__all__ = [
    "FIELD_ROLES", "MOST_TRIED", "RESERVED_AXIS", "ROLES", "STANDARD_AXES", "Accepts", "AnyMesh",
    "MachineMesh", "MeshShape", "MeshSpec", "axes_across_slices", "check_role", "device_list",
    "mesh", "nearest_sizes", "ring_in_words", "tile_mesh",
]  # fmt: skip

import_when_used(__name__)
