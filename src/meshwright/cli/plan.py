"""`meshwright plan`: rank every mesh of a machine for a model, with the reasons."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from meshwright.cli.flags import named_settings, take, take_integer, take_switch
from meshwright.errors import MeshwrightError
from meshwright.present import write_page

if TYPE_CHECKING:
    from meshwright.planner import Plan

HELP = """usage: meshwright plan MODEL --on MACHINE --batch N --seq N [the settings of train]
       meshwright plan MODEL --on MACHINE --serve --batch N --seq N
                       [--engine.weights int8|fp8|plain] [--engine.cache fp8]

Rank every mesh of a machine for a model: step time, memory, what limits it, and why. Meshes whose
times cannot be told apart are one group, the simplest first. A setting of train that is named is
kept (--compute.remat full, --accumulation 4, --context-parallel ring, --backend torch …); the
others are chosen with the mesh where they change what fits or how fast it is.

  MODEL                a preset (llama-3.1-8b), a Hugging Face config.json, its folder, or a name
                       on the Hub (org/name, org/name@revision)
  --on MACHINE         v5p:4x4x8, v5p-256, h100:16x8, 2*v5e:16x16, cpu:8, here
  --batch N            global batch size in sequences; with --serve, sequences decoded at a time
  --seq N              sequence length in tokens; with --serve, of a prompt and of its cache
  --mesh LIMITS        only meshes that match: "fsdp=*,tp<=8,sp=1"
  --serve              plan `meshwright serve` instead: weights, KV cache, times of tokens
  --rank-by WHAT       rank by throughput, memory, or with --serve latency (default: throughput)
  --imbalance X        assume that the experts of one device get X times the average number of
                       tokens (default 1: an even load)
  --cost-per-hour X    price of one chip per hour; shows the cost of a trillion tokens
  --top N              meshes to list (default 8)
  --refused            list every refused mesh with the reason
  --explain MESH       explain one mesh: every formula with its numbers
  --json               print JSON, which `meshwright prove --plan FILE` reads
  --html FILE          write a self-contained HTML page

meshwright train --help lists the settings."""


def plan_command(arguments: Sequence[str]) -> None:
    """Rank every mesh of a machine for a model: step time, memory, what limits it, and why.

    meshwright plan llama-3.1-8b --on v5p:4x4x4 --batch 256 --seq 4096
    """
    words = list(arguments)  # the flags of plan are taken out, the rest are train's
    if not words or "--help" in words or "-h" in words:
        print(HELP)
        return
    shown, html = take(words, "--explain"), take(words, "--html")
    top, refused = take_integer(words, "--top", 1), take_switch(words, "--refused")
    as_json = take_switch(words, "--json")
    ranking = _ranking(words)
    from meshwright.planner.report import explain, find_mesh, found_data, page, plan_data, report

    mesh = None if shown is None else find_mesh(ranking, shown)
    if html is not None:
        write_page(Path(html), page(ranking))
        print(f"wrote {html}", file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps(plan_data(ranking) if mesh is None else found_data(ranking, mesh)))
    if as_json or html is not None:
        return
    console = Console()
    if mesh is not None:
        console.print(explain(ranking, mesh, console.width))
    else:
        console.print(report(ranking, console.width, top=top or 8, refused=refused))


def _ranking(words: list[str]) -> "Plan":
    """The plan that the command line asks for."""
    on, mesh = take(words, "--on"), take(words, "--mesh")
    rank_by, price = take(words, "--rank-by") or "throughput", take(words, "--cost-per-hour")
    imbalance = take(words, "--imbalance")
    serves = take_switch(words, "--serve")
    if on is None:
        raise MeshwrightError("--on says for which machine: --on v5p:4x4x4, --on h100:8, --on here")
    weights, cache = take(words, "--engine.weights"), take(words, "--engine.cache")
    named = named_settings(words)
    for name in ("batch", "seq"):
        if not named & {name, "config"}:
            raise MeshwrightError(f"--{name} is missing; give it, as in --{name} 256")
    # here, since they import jax
    from meshwright.cli.train import settings
    from meshwright.planner import plan

    config = settings(words, prog="meshwright plan")
    return plan(
        config, on, mesh=mesh, kind="serve" if serves else "train",
        rank_by=rank_by,  # type: ignore[arg-type]
        cost_per_hour=_price(price), named=named, weights=weights, cache=cache,
        imbalance=_ratio(imbalance),
    )  # fmt: skip


def _ratio(text: str | None) -> float:
    try:
        return 1.0 if text is None else float(text)
    except ValueError:
        raise MeshwrightError(f"--imbalance {text!r} is not a number, such as 1.2") from None


def _price(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        raise MeshwrightError(f"--cost-per-hour {text!r} is not a price, such as 4.2") from None
