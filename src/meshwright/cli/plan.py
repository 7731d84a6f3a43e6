"""`meshwright plan`: rank every mesh of a machine for a model, with the reasons."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console

from meshwright.errors import MeshwrightError
from meshwright.present import write_page


@dataclass(frozen=True)
class PlanSettings:
    """Model, machine, batch, what is fixed in the search, and how to show the plan."""

    model: tyro.conf.Positional[str]
    """Model preset (llama-3.1-8b), a Hugging Face config.json, or a folder that holds one."""
    on: str
    """Machine: v5p:4x4x8, v5p-256, h100:16x8, 2*v5e:16x16, cpu:8, here."""
    batch: int
    """Global batch size in sequences; with --serve, sequences decoded at a time."""
    seq: int
    """Sequence length in tokens; with --serve, of a prompt and of the cache of each sequence."""
    mesh: str | None = None
    """Only meshes that match: "fsdp=*,tp<=8,sp=1"."""
    objective: Literal["throughput", "latency", "memory"] = "throughput"
    """What to rank by: tokens per second, free memory, or with --serve the time per token."""
    remat: Literal["none", "elementwise", "mlp", "full", "offload"] | None = None
    """Only this remat policy; by default the fastest that fits."""
    accumulation: int | None = None
    """Only this number of micro-batches; by default the fastest that fits."""
    optimizer: str | None = None
    """Optimizer, whose state takes memory; adamw by default."""
    moments: Literal["auto", "float32", "bfloat16", "int8"] | None = None
    """Plan with train's --optimizer.moments; by default moments are kept like the parameters."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of parameters and, by default, of optimizer state."""
    matmul: Literal["auto", "fp8"] = "auto"
    """Plan with train's --compute.matmul: fp8 multiplies layers in 8-bit floats."""
    overlap: Literal["auto", "on", "off"] | None = None
    """Plan with train's --compute.overlap: TPUs all-gather weights during compute."""
    backend: Literal["jax", "torch"] = "jax"
    """Plan train's --backend: torch is FSDP2 and tensor parallelism on the Hugging Face model."""
    serve: bool = False
    """Plan `meshwright serve` instead of training: weights, KV cache, times of tokens."""
    weights: Literal["plain", "int8", "fp8"] | None = None
    """With --serve, only weights kept so; plain: not quantized."""
    cache: Literal["fp8"] | None = None
    """With --serve, the KV cache in 8 bits."""
    cost_per_hour: float | None = None
    """Price of one chip per hour; the report then shows the cost of a trillion tokens."""
    top: int = 8
    """Number of meshes to list."""
    refused: bool = False
    """List every refused mesh with the reason."""
    explain: str | None = None
    """Explain this mesh: every formula with its numbers."""
    json: bool = False
    """Print JSON, which `meshwright prove --plan FILE` reads."""
    html: Path | None = None
    """Write a self-contained HTML page to this file."""


def plan(settings: tyro.conf.OmitArgPrefixes[PlanSettings]) -> None:
    """Rank every mesh of a machine for a model: step time, memory, what limits it, and why.

    Meshes whose times cannot be told apart are one group, the simplest first.

    meshwright plan llama-3.1-8b --on v5p:4x4x4 --batch 256 --seq 4096
    """
    # here, after the settings are read: it imports jax
    from meshwright.planner import plan as make_plan
    from meshwright.planner.report import explain, find_mesh, found_data, page, plan_data, report

    if settings.top < 1:
        raise MeshwrightError(f"--top {settings.top} must be a whole number from 1")
    ranking = make_plan(
        settings.model,
        settings.on,
        settings.batch,
        settings.seq,
        objective=settings.objective,
        mesh=settings.mesh,
        remat=settings.remat,
        accumulation=settings.accumulation,
        kind="serve" if settings.serve else "train",
        optimizer=settings.optimizer,
        moments=settings.moments,
        param_dtype=settings.param_dtype,
        overlap=settings.overlap,
        matmul=settings.matmul,
        backend=settings.backend,
        weights=settings.weights,
        cache=settings.cache,
        cost_per_hour=settings.cost_per_hour,
    )
    mesh = None if settings.explain is None else find_mesh(ranking, settings.explain)
    if settings.html is not None:
        write_page(settings.html, page(ranking))
        print(f"wrote {settings.html}", file=sys.stderr if settings.json else sys.stdout)
    if settings.json:
        print(json.dumps(plan_data(ranking) if mesh is None else found_data(ranking, mesh)))
    if settings.json or settings.html is not None:
        return
    console = Console()
    if mesh is not None:
        console.print(explain(ranking, mesh, console.width))
    else:
        console.print(report(ranking, console.width, top=settings.top, refused=settings.refused))
