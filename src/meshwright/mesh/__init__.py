"""From what the user said (MeshSpec) to devices in order: meshes, tiles on a torus, slices."""

import sys
import types
from typing import Any

from meshwright.mesh.arrange import device_list
from meshwright.mesh.build import AnyMesh, mesh
from meshwright.mesh.machine_mesh import MachineMesh
from meshwright.mesh.spec import RESERVED_AXIS, STANDARD_AXES, MeshSpec
from meshwright.mesh.tiles import tile_mesh

__all__ = [
    "RESERVED_AXIS",
    "STANDARD_AXES",
    "AnyMesh",
    "MachineMesh",
    "MeshSpec",
    "device_list",
    "mesh",
    "tile_mesh",
]


class _Callable(types.ModuleType):
    """`mw.mesh(…)` is the function, though this package has its name."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return mesh(*arguments, **options)


_Callable.__doc__ = mesh.__doc__
sys.modules[__name__].__class__ = _Callable
