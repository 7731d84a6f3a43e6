"""Meshes: MeshSpec → devices in order; T5X tiles on a torus; slices."""

from meshwright.meshes.arrange import axes_across_slices, device_list
from meshwright.meshes.boxes import Share, Shares, all_shares, closes, sharing
from meshwright.meshes.build import AnyMesh, mesh
from meshwright.meshes.machine_mesh import MachineMesh
from meshwright.meshes.rings import is_ring, ring_in_words
from meshwright.meshes.spec import FIELD_ROLES, RESERVED_AXIS, ROLES, STANDARD_AXES, MeshSpec
from meshwright.meshes.tiles import tile_mesh

__all__ = [
    "FIELD_ROLES",
    "RESERVED_AXIS",
    "ROLES",
    "STANDARD_AXES",
    "AnyMesh",
    "MachineMesh",
    "MeshSpec",
    "Share",
    "Shares",
    "all_shares",
    "axes_across_slices",
    "closes",
    "device_list",
    "is_ring",
    "mesh",
    "ring_in_words",
    "sharing",
    "tile_mesh",
]
