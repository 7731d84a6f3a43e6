"""`--mesh auto`: the settings of the mesh that the plan puts first."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.machines import Machine
from meshwright.models import default_dtype
from meshwright.train import AUTO, TrainConfig, model_of


def planned(config: TrainConfig, machine: Machine, words: Sequence[str]) -> tuple[TrainConfig, str]:
    """The settings with a mesh of this machine, and what was chosen, in words.

    With the mesh come remat, micro-batches, the strategy of attention and what else the plan
    chooses, but not what the command line (`words`) or a file says otherwise than usual.
    """
    from meshwright.planner import plan

    assert config.mesh == AUTO
    if config.rules != "standard":
        raise MeshwrightError("--mesh auto knows the standard rules; with others name the mesh")
    said, usual = config.compute, TrainConfig(config.model)
    # --compute.no-scan says as much of --compute.scan as --compute.scan does
    flags = {word.partition("=")[0].replace("_", "-").replace(".no-", ".") for word in words}

    def pinned(flag: str, value: Any, default: Any) -> bool:
        return flag in flags or value != default

    remat = pinned("--compute.remat", said.remat, usual.compute.remat)
    accumulation = pinned("--accumulation", config.accumulation, usual.accumulation)
    found = plan(
        model_of(config),
        machine,
        config.batch,
        config.seq,
        remat=said.remat if remat else None,
        accumulation=config.accumulation if accumulation else None,
        optimizer=config.optimizer.name,
        param_dtype=said.param_dtype,
        dtype=default_dtype(said.dtype, machine.chip.platform),
        scan=said.scan,
        loss_chunk=config.loss.chunk,
        overlap=said.overlap,
    )
    best = found.best
    choice = best.choice
    compute: dict[str, Any] = {"remat": choice.remat}
    if not pinned("--compute.sequence-parallel", said.sequence_parallel, False):
        compute["sequence_parallel"] = choice.sequence_parallel
    if not pinned("--compute.mlp-chunk", said.mlp_chunk, 0):
        compute["mlp_chunk"] = choice.mlp_chunk
    more: dict[str, Any] = {"mesh": choice.mesh, "accumulation": choice.accumulation}
    if choice.sp > 1 and not pinned("--context-parallel", config.context_parallel, "auto"):
        more["context_parallel"] = choice.strategy
    with_it = ", ".join(f"{name} {value}" for name, value in (more | compute).items() if value)
    chosen = dataclasses.replace(config, compute=dataclasses.replace(said, **compute), **more)
    said_too = "".join(f"\nwarning: {one}" for one in found.warnings)
    return chosen, f"mesh auto: {with_it} ({best.reason}){said_too}"


def planned_to_serve(model: Any, machine: Machine, rows: int, longest: int, dtype: str) -> str:
    """The mesh over all devices on which a token of so many rows, that long, comes soonest."""
    from meshwright.planner import plan

    found = plan(
        model, machine, rows, longest,
        kind="serve", objective="latency", dtype=default_dtype(dtype, machine.chip.platform),
    )  # fmt: skip
    return found.mesh
