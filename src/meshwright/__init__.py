"""Meshwright: say where every axis goes, see what it costs, run it.

import meshwright as mw

mesh = mw.mesh("dp=1,fsdp=-1,tp=4,sp=1")
w = mw.shard(w, "embed mlp -> embed@fsdp mlp@tp", mesh=mesh)
print(mw.explain(params, rules, mesh))
"""

from meshwright.errors import MeshwrightError
from meshwright.layout import (
    ArraySpec,
    Constant,
    Layout,
    Normal,
    PathRules,
    Rules,
    create,
    explain,
    layouts,
    optimizer_layouts,
    shard,
    sharding,
    shardings,
    standard_rules,
)
from meshwright.machines import CHIPS, Chip, Machine
from meshwright.mesh import MachineMesh, MeshSpec, mesh, tile_mesh

__version__ = "0.1.0"

__all__ = [
    "CHIPS",
    "ArraySpec",
    "Chip",
    "Constant",
    "Layout",
    "Machine",
    "MachineMesh",
    "MeshSpec",
    "MeshwrightError",
    "Normal",
    "PathRules",
    "Rules",
    "create",
    "explain",
    "layouts",
    "mesh",
    "optimizer_layouts",
    "shard",
    "sharding",
    "shardings",
    "standard_rules",
    "tile_mesh",
]
