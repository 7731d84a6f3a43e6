"""Meshwright: say where every axis goes, see what it costs, run it.

import meshwright as mw

mesh = mw.mesh("dp=1,fsdp=-1,tp=4,sp=1")
w = mw.shard(w, "embed mlp -> embed@fsdp mlp@tp", mesh=mesh)
print(mw.explain(params, rules, mesh))
print(mw.plan("llama-3.1-8b", "v5p:4x4x4", batch=256, seq=4096).mesh)
print(mw.audit(jax.jit(step).lower(state, batch).compile()))
mw.train(mw.TrainConfig("tiny", steps=200, run="runs/first"))
print(mw.load("runs/first").generate("Once upon a time").text)
"""

TYPE_CHECKING = False  # as typing's, whose import takes longer than all that is done here
if TYPE_CHECKING:
    from typing import Any

    from meshwright import testing
    from meshwright import torch as torch
    from meshwright.api import train
    from meshwright.audits import Audit, audit
    from meshwright.errors import MeshwrightError
    from meshwright.layouts import (
        ArraySpec,
        Constant,
        Layout,
        Normal,
        PathRules,
        Rules,
        create,
        explain,
        layout_tree,
        optimizer_layouts,
        shard,
        sharding,
        shardings,
        standard_rules,
    )
    from meshwright.machines import CHIPS, Chip, Machine
    from meshwright.meshes import MachineMesh, MeshSpec, mesh, tile_mesh
    from meshwright.models import LoraConfig, load_hf, save_hf
    from meshwright.planner import Plan, plan
    from meshwright.proofs import Proof, prove
    from meshwright.serving import EngineConfig, LanguageModel, ServeConfig, export, load, serve
    from meshwright.training import TrainConfig

__version__ = "0.2.0"

__all__ = [
    "CHIPS", "ArraySpec", "Audit", "Chip", "Constant", "EngineConfig", "LanguageModel",
    "Layout", "LoraConfig", "Machine", "MachineMesh", "MeshSpec", "MeshwrightError", "Normal",
    "PathRules", "Plan", "Proof", "Rules", "ServeConfig", "TrainConfig", "audit", "create",
    "explain", "export", "layout_tree", "load", "load_hf", "mesh", "optimizer_layouts", "plan",
    "prove", "save_hf", "serve", "shard", "sharding", "shardings", "standard_rules", "testing",
    "tile_mesh", "train",
]  # fmt: skip

# All is loaded when it is first asked for: `import meshwright` takes no time, so that the command
# line can take care of Ctrl-C before jax is imported, and audit and plan need all models and ops.
_MODULES = {
    "meshwright.api": ("train",),
    "meshwright.audits": ("Audit", "audit"),
    "meshwright.errors": ("MeshwrightError",),
    "meshwright.layouts": (
        "ArraySpec", "Constant", "Layout", "Normal", "PathRules", "Rules", "create", "explain",
        "layout_tree", "optimizer_layouts", "shard", "sharding", "shardings", "standard_rules",
    ),
    "meshwright.machines": ("CHIPS", "Chip", "Machine"),
    "meshwright.meshes": ("MachineMesh", "MeshSpec", "mesh", "tile_mesh"),
    "meshwright.models": ("LoraConfig", "load_hf", "save_hf"),
    "meshwright.planner": ("Plan", "plan"),
    "meshwright.proofs": ("Proof", "prove"),
    "meshwright.serving": (
        "EngineConfig", "LanguageModel", "ServeConfig", "export", "load", "serve",
    ),
    "meshwright.training": ("TrainConfig",),
}  # fmt: skip
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> "Any":
    import importlib

    if name in ("testing", "torch"):
        return importlib.import_module(f"meshwright.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "torch"})
