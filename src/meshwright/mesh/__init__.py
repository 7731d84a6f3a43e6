"""From what the user said (MeshSpec) to devices in order: meshes, tiles on a torus, slices."""

from meshwright.mesh.build import AnyMesh, mesh
from meshwright.mesh.machine_mesh import MachineMesh
from meshwright.mesh.spec import STANDARD_AXES, MeshSpec
from meshwright.mesh.tiles import tile_mesh

__all__ = ["STANDARD_AXES", "AnyMesh", "MachineMesh", "MeshSpec", "mesh", "tile_mesh"]
