"""Deployments for a load, in the terminal and as data."""

from typing import TYPE_CHECKING, Any

from meshwright.planner.load import Deployment, Deployments, Load
from meshwright.planner.report.phrases import (
    derivation,
    folded,
    serve_command,
    short_mesh,
    unpriced_note,
)
from meshwright.present import (
    Column,
    Row,
    aligned,
    amount,
    count,
    paragraph,
    seconds_text,
)
from meshwright.serving import EngineConfig

if TYPE_CHECKING:
    from rich.console import Group, RenderableType


def load_report(found: Deployments, width: int = 120, *, top: int | None = None) -> "Group":
    """One line for each machine, the cheapest first; then why, and what to type."""
    from rich.console import Group
    from rich.text import Text

    load = found.load
    title = Text()
    title.append(found.model or "a model", style="bold")
    title.append(f": {load.rate:g} requests/s, prompts of {load.prompt:,} tokens, answers of ")
    title.append(f"{load.output:,}")
    at = f"p{load.percentile:g}"
    asked = (
        f"{at}: at most {seconds_text(load.first_token)} to the first token, "
        f"{seconds_text(load.per_token)} between tokens; cheapest first"
    )
    parts: list[RenderableType] = [title, Text(asked), Text("")]
    columns = [
        Column("replica", right=False, style="bold"),
        Column("mesh", right=False, importance=4),
        Column("batch"), Column("replicas"), Column("chips"),
        Column("first p50", importance=2), Column(f"first {at}"),
        Column("token p50", importance=1), Column(f"token {at}"),
        Column("req/s each", importance=3), Column("$/h"), Column("$/M tokens"),
    ]  # fmt: skip
    rows = [
        Row(_cells(one, load), style="green" if number == 0 else "")
        for number, one in enumerate(found.found[:top])
    ]
    parts += aligned(columns, rows, width)
    if found.refused:
        parts += [Text(""), Text("not possible", style="bold")]
        parts += [paragraph(f"{one.name}: {one.why}", width, hanging=4) for one in found.refused]
    names = [one.machine.chip.name for one in found.found if one.price is None]
    if notes := unpriced_note([*names, *found.unpriced]):
        parts += [Text(""), *(paragraph(note, width, 0, hanging=2) for note in notes)]
    parts += [Text(""), paragraph(_why(found), width, 0, hanging=2), Text("")]
    parts += [Text("next", style="bold"), Text(folded(_command(found), width), no_wrap=True)]
    return Group(*parts)


def _cells(one: Deployment, load: Load) -> list[str]:
    waits, at = one.waits, load.percentile
    hourly, each = one.dollars_per_hour, one.dollars_per_million(load)
    return [
        str(one.machine),
        short_mesh(one.estimate.choice),
        str(one.max_batch),
        f"{one.replicas:,}",
        f"{one.chips:,}",
        *(seconds_text(waits.first_token(p)) for p in (50, at)),
        *(seconds_text(waits.per_token(p)) for p in (50, at)),
        f"{one.highest_rate:.3g}",
        "" if hourly is None else f"{hourly:,.2f}",
        "" if each is None else f"{each:.2f}",
    ]


def _why(found: Deployments) -> str:
    """The numbers of the first machine, step by step."""
    load, best = found.load, found.best
    replicas, chips = count(best.replicas, "replica"), count(best.machine.num_chips, "chip")
    rate, tokens = load.rate / best.replicas, load.rate * load.output / best.replicas
    steps = (
        f"{best.machine}: a replica serves {best.highest_rate:.3g} requests/s with these waits; "
        f"{load.rate:g} / {best.highest_rate:.3g}, rounded up: {replicas} of {chips}, with "
        f"{rate:.3g} requests/s and {amount(tokens)} tokens/s"
    )
    hourly = best.dollars_per_hour
    cost = f"; {count(best.chips, 'chip')}", "" if hourly is None else f"{hourly:,.2f} an hour"
    return derivation(steps, *cost, best.price, best.estimate.reason)


def _command(found: Deployments) -> str:
    best = found.best
    engine = EngineConfig(max_batch=best.max_batch, max_length=found.load.longest)
    return serve_command(best.estimate, engine, found.dtype)


def load_data(found: Deployments) -> dict[str, Any]:
    """Plain data: what is asked, each machine with its numbers, and those that cannot do it."""
    load = found.load

    def deployment(one: Deployment) -> dict[str, Any]:
        percentiles = sorted({50.0, 90.0, load.percentile})
        return {
            "replica": str(one.machine),
            "mesh": one.estimate.choice.mesh,
            "weights": one.estimate.choice.weights,
            "cache": one.estimate.choice.cache,
            "max_batch": one.max_batch,
            "highest_rate": one.highest_rate,
            "replicas": one.replicas,
            "chips": one.chips,
            "first_token_seconds": {f"p{p:g}": one.waits.first_token(p) for p in percentiles},
            "per_token_seconds": {f"p{p:g}": one.waits.per_token(p) for p in percentiles},
            "busy": one.waits.busy,
            "dollars_per_hour": one.dollars_per_hour,
            "dollars_per_million_tokens": one.dollars_per_million(load),
            "price": None if one.price is None else vars(one.price),
        }

    return {
        "format": "meshwright deployments",
        "version": 1,
        "model": found.model,
        "load": vars(load),
        "deployments": [deployment(one) for one in found.found],
        "refused": [{"machine": one.name, "why": one.why} for one in found.refused],
        "unpriced": list(found.unpriced),
    }
