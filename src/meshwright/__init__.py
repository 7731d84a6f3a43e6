"""Meshwright: say where every axis goes, see what it costs, run it.

import meshwright as mw

mesh = mw.mesh("dp=1,fsdp=-1,tp=4,sp=1")
w = mw.shard(w, "embed mlp -> embed@fsdp mlp@tp", mesh=mesh)
print(mw.explain(params, rules, mesh))
print(mw.plan("llama-3.1-8b", "v5p:4x4x4", batch=256, seq=4096).mesh)
print(mw.audit(jax.jit(step).lower(state, batch).compile()))
"""

import importlib
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from meshwright import testing
    from meshwright.audit import Audit, audit
    from meshwright.plan import Plan, plan

__version__ = "0.1.0"

__all__ = [
    "CHIPS",
    "ArraySpec",
    "Audit",
    "Chip",
    "Constant",
    "Layout",
    "Machine",
    "MachineMesh",
    "MeshSpec",
    "MeshwrightError",
    "Normal",
    "PathRules",
    "Plan",
    "Rules",
    "audit",
    "create",
    "explain",
    "layouts",
    "mesh",
    "optimizer_layouts",
    "plan",
    "shard",
    "sharding",
    "shardings",
    "standard_rules",
    "testing",
    "tile_mesh",
]

# loaded when first asked for: they need all models and ops. The packages plan and audit are called
# like the functions in them, so that either can be the attribute
_LATER = {
    "Audit": "meshwright.audit",
    "Plan": "meshwright.plan",
    "audit": "meshwright",
    "plan": "meshwright",
    "testing": "meshwright",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    if _LATER[name] == "meshwright":
        return importlib.import_module(f"meshwright.{name}")
    return getattr(importlib.import_module(_LATER[name]), name)
