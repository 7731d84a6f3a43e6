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

from meshwright.lazy import import_when_used

TYPE_CHECKING = False  # as typing's, whose import takes longer than all that is done here
if TYPE_CHECKING:
    from meshwright import testing
    from meshwright import torch as torch
    from meshwright.api import plan, prove, train
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
        einshard,
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
    from meshwright.planner import Plan, ProgramPlan
    from meshwright.proofs import ProgramProof, Proof
    from meshwright.serving import EngineConfig, LanguageModel, ServeConfig, export, load, serve
    from meshwright.training import OptimizerConfig, TrainConfig

__version__ = "0.2.0"

__all__ = [
    "CHIPS", "ArraySpec", "Audit", "Chip", "Constant", "EngineConfig", "LanguageModel", "Layout",
    "LoraConfig", "Machine", "MachineMesh", "MeshSpec", "MeshwrightError", "Normal",
    "OptimizerConfig", "PathRules", "Plan", "ProgramPlan", "ProgramProof", "Proof", "Rules",
    "ServeConfig", "TrainConfig", "audit", "create", "einshard", "explain", "export", "layout_tree",
    "load", "load_hf", "mesh", "optimizer_layouts", "plan", "prove", "save_hf", "serve", "shard",
    "sharding", "shardings", "standard_rules", "testing", "tile_mesh", "train",
]  # fmt: skip

# All is loaded when it is first asked for: `import meshwright` takes no time, so that the command
# line can take care of Ctrl-C before jax is imported, and audit and plan need all models and ops.
import_when_used(__name__)
