"""`meshwright plan`: every mesh of a machine for a model, ranked, with the reasons."""

import json as jsonlib
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from meshwright.errors import MeshwrightError
from meshwright.planner import plan as make_plan
from meshwright.planner.report import explain as explained
from meshwright.planner.report import find_mesh, found_data, page, plan_data, report


def plan(
    model: Annotated[str, tyro.conf.Positional],
    on: str,
    batch: int,
    seq: int,
    mesh: str | None = None,
    objective: Literal["throughput", "latency", "memory"] = "throughput",
    remat: Literal["none", "elementwise", "mlp", "full"] | None = None,
    accumulation: int | None = None,
    optimizer: str | None = None,
    param_dtype: Literal["float32", "bfloat16"] = "float32",
    overlap: bool = False,
    serve: bool = False,
    cost_per_hour: float | None = None,
    top: int = 8,
    refused: bool = False,
    explain: str | None = None,
    json: bool = False,
    html: Path | None = None,
) -> None:
    """Rank every mesh of a machine for a model: time, memory, what it waits for, and why.

    Meshes whose times cannot be told apart are one group, the simplest first.

    meshwright plan llama-3.1-8b --on v5p:4x4x4 --batch 256 --seq 4096

    Args:
        model: A preset (llama-3.1-8b), a Hugging Face config.json, or a folder that holds one.
        on: The machine: v5p:4x4x8, v5p-256, h100:16x8, 2*v5e:16x16, cpu:8, here.
        batch: Rows of an optimizer step, over all devices; with --serve, rows that are decoded.
        seq: Tokens of a row.
        mesh: Only meshes like this: "fsdp=*,tp<=8,sp=1".
        objective: What comes first: tokens a second, room in memory, or, serving, a short wait for
            each token.
        remat: Only this; otherwise the fastest that fits.
        accumulation: Only so many micro-batches; otherwise the fastest number that fits.
        optimizer: The optimizer, whose state is kept: adamw if not said.
        param_dtype: What parameters and the optimizer's state are kept in.
        overlap: With train's --compute.overlap: TPUs gather weights while they compute.
        serve: Plan decoding with a KV cache instead of training.
        cost_per_hour: Of one chip; gives the money for a trillion tokens.
        top: How many meshes to list.
        refused: List every mesh that was refused, and why.
        explain: One mesh in full: its formulas with numbers filled in.
        json: Print plain data instead; `meshwright prove --plan FILE` reads it.
        html: Write one self-contained page here instead.
    """
    if top < 1:
        raise MeshwrightError(f"--top {top} must be a whole number from 1")
    made = make_plan(
        model,
        on,
        batch,
        seq,
        objective=objective,
        mesh=mesh,
        remat=remat,
        accumulation=accumulation,
        kind="serve" if serve else "train",
        optimizer=optimizer,
        param_dtype=param_dtype,
        overlap=overlap,
        cost_per_hour=cost_per_hour,
    )
    found = None if explain is None else find_mesh(made, explain)
    if html is not None:
        _write(html, page(made))
        print(f"wrote {html}", file=sys.stderr if json else sys.stdout)
    if json:
        print(jsonlib.dumps(plan_data(made) if found is None else found_data(made, found)))
    if json or html is not None:
        return
    console = Console()
    if found is not None:
        console.print(explained(made, found, console.width))
    else:
        console.print(report(made, console.width, top=top, refused=refused))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as reason:
        raise MeshwrightError(f"--html {str(path)!r} cannot be written: {reason}") from None
