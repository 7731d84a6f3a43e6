"""Machines compared, in the terminal, as a page and as data."""

import math
import shlex
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.planner.goodput import LongRun
from meshwright.planner.machines_compared import Comparison, Offer, Size
from meshwright.planner.report.phrases import derivation, folded, short_mesh, unpriced_note
from meshwright.planner.workload import CHOSEN
from meshwright.present import (
    Column,
    Row,
    aligned,
    amount,
    bar,
    count,
    duration_text,
    paragraph,
    percent,
    render,
)
from meshwright.training import TrainConfig, settings_flags, with_settings

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

BAR = 24  # characters


def comparison_page(found: Comparison, sizes: Sequence[Size] = ()) -> str:
    """The same as one HTML page, with every reason in full; it needs nothing from outside."""
    asked = f"{amount(found.run.tokens)} tokens{_limits(found)}"
    return render(
        Path(__file__).with_name("comparison.html"),
        title=f"{found.config.model or 'a model'}: {asked}",
        data={"next": [_command(found, one) for one in found.offers[:1]]},
        about=_heading(found),
        columns=[(column.name, not column.right) for column in _COLUMNS],
        offers=[(_cells(one), one.estimate.reason) for one in found.offers],
        refused=[(one.name, one.why) for one in found.refused],
        notes=_notes(found),
        why=why(found),
        curve=curve_cells(sizes),
    )


def curve_cells(sizes: Sequence[Size]) -> list[tuple[str, str, str, str, float]]:
    """Machine, chips, tokens/s and MFU in words, and MFU as a number, for pages."""
    return [(*_in_words(one), round(one.estimate.mfu, 4)) for one in sizes]


def _in_words(one: Size) -> tuple[str, str, str, str]:
    chips, rate = f"{one.machine.num_chips:,}", amount(one.tokens_per_second)
    return str(one.machine), chips, rate, percent(one.estimate.mfu)


def _heading(found: Comparison) -> str:
    config, run = found.config, found.run
    first = "cheapest first" if found.best.cost is not None else "shortest first"
    if run.budget < math.inf and run.within == math.inf:
        first = "fastest first"
    times = f"; times are an estimate for {found.like}" if found.like else ""
    step = f"batch {config.batch:,} × {config.seq:,} tokens"
    return f"{step}; fastest mesh of each; {first}{times}"


def _notes(found: Comparison) -> list[str]:
    """A smaller size that costs hardly more than the best; chips not compared by their cost."""
    names = [one.machine.chip.name for one in found.offers if one.price is None]
    return [*_smaller_note(found.best), *unpriced_note([*names, *found.unpriced])]


def _smaller_note(best: Offer) -> list[str]:
    smaller = best.smaller
    if smaller is None or best.cost is None or smaller.cost is None:
        return []
    more = f"{smaller.cost / best.cost - 1:.1%}"
    costs = "about as much" if more == "0.0%" else f"{more} more"
    return [
        f"{smaller.machine}, with {count(smaller.machine.num_chips, 'chip')} instead of "
        f"{best.machine.num_chips:,}, costs {costs} (${amount(smaller.cost)}) and takes "
        f"{duration_text(smaller.seconds)}"
    ]


_COLUMNS = [
    Column("machine", right=False, style="bold"), Column("chips"),
    Column("mesh", right=False, importance=5), Column("tokens/s"),
    Column("MFU", importance=3), Column("goodput", importance=1), Column("time"),
    Column("cost"), Column("$/chip·h", importance=2),
    Column("bound", right=False, importance=4),
]  # fmt: skip


def comparison_report(
    found: Comparison, width: int = 120, sizes: Sequence[Size] = (), *, top: int | None = None
) -> "Group":
    """One line for each machine, the best first; then how the best scales, and what to type."""
    from rich.console import Group
    from rich.text import Text

    title = Text()
    title.append(found.config.model or "a model", style="bold")
    title.append(f": {amount(found.run.tokens)} tokens{_limits(found)}")
    parts: list[RenderableType] = [title, Text(_heading(found)), Text("")]
    rows = [
        Row(_cells(one), style="green" if number == 0 else "")
        for number, one in enumerate(found.offers[:top])
    ]
    parts += aligned(_COLUMNS, rows, width)
    if found.refused:
        parts += [Text(""), Text("not possible", style="bold")]
        parts += [paragraph(f"{one.name}: {one.why}", width, hanging=4) for one in found.refused]
    if notes := _notes(found):
        parts += [Text(""), *(paragraph(note, width, 0, hanging=2) for note in notes)]
    if sizes:
        parts += [Text(""), *curve_lines(sizes, width)]
    best = found.best
    parts += [Text(""), paragraph(why(found), width, 0, hanging=2), Text("")]
    parts += [Text("next", style="bold"), Text(folded(_command(found, best), width), no_wrap=True)]
    return Group(*parts)


def _limits(found: Comparison) -> str:
    run = found.run
    within = f" within {duration_text(run.within)}" if run.within < math.inf else ""
    budget = f" for at most ${amount(run.budget)}" if run.budget < math.inf else ""
    return within + budget


def _cells(one: Offer) -> list[str]:
    return [
        str(one.machine),
        f"{one.machine.num_chips:,}",
        short_mesh(one.estimate.choice),
        amount(one.tokens_per_second),
        percent(one.estimate.mfu),
        percent(one.goodput),
        duration_text(one.seconds),
        "" if one.cost is None else f"${amount(one.cost)}",
        "" if one.price is None else f"{one.price.dollars:.2f}",
        one.estimate.bound,
    ]


def why(found: Comparison) -> str:
    """The numbers of the first machine, step by step."""
    run, best = found.run, found.best
    steps = (
        f"{best.machine}: {amount(run.tokens)} tokens / {amount(best.tokens_per_second)} a second "
        f"/ goodput {best.goodput:.3f} = {best.seconds / 3600:,.1f} hours"
    )
    chips = f"; × {count(best.machine.num_chips, 'chip')}"
    cost = "" if best.cost is None else f"{best.cost:,.0f}"
    return derivation(steps, chips, cost, best.price, best.estimate.reason)


def curve_lines(sizes: Sequence[Size], width: int) -> "list[RenderableType]":
    """Tokens/s and MFU against chips."""
    most = max(one.estimate.mfu for one in sizes)
    rows = [Row([*_in_words(one), bar(one.estimate.mfu / most, BAR)]) for one in sizes]
    columns = [
        Column("scaling", right=False), Column("chips"), Column("tokens/s"), Column("MFU"),
        Column("", right=False, style="cyan", importance=1),
    ]  # fmt: skip
    return list(aligned(columns, rows, width))


def _command(found: Comparison, best: Offer) -> str:
    """The plan of the first machine: of the same meshes, with the same time and cost."""
    limits, run = found.limits, found.run
    kept = {CHOSEN[field]: value for field, value in limits.fixed.items() if field in CHOSEN}
    usual = TrainConfig(found.config.model)
    meshes = {"mesh": usual.mesh, "num_partitions": None, "submesh": None}  # limits have them
    config = with_settings(found.config, kept | meshes)
    words = ["meshwright", "plan", config.model or "MODEL", "--on", str(best.machine)]
    words += settings_flags(config, {"batch", "seq", *kept})
    words += ["--mesh", str(limits)] if limits.limits else []
    words += ["--rank-by", "fastest"]
    words += ["--like", found.like] if found.like else []
    words += ["--catalogue", found.catalogue] if found.catalogue else []
    return shlex.join([*words, "--tokens", _quantity(run.tokens), *_stops(run.long_run)])


def _stops(long_run: LongRun) -> list[str]:
    """What stops a run, where it is not the default, as the command line takes it."""
    usual, words = LongRun(), []
    if long_run.failures != usual.failures:
        words += ["--failures", f"{Decimal(repr(long_run.failures)):f}"]
    if long_run.restart != usual.restart:
        words += ["--restart", f"{Decimal(repr(long_run.restart)):f}s"]
    if long_run.write != usual.write:
        words += ["--checkpoint-write", _quantity(long_run.write)]
    return words


def _quantity(number: float) -> str:
    """An amount as the command line takes it, to the last digit: `1.5T`."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        text = f"{number / size:g}"
        if number >= size and float(text) * size == number:
            return text + letter
    return f"{Decimal(repr(number)):f}"


def comparison_data(found: Comparison, sizes: Sequence[Size] = ()) -> dict[str, Any]:
    """Plain data: what is asked, each machine with its numbers, and those that cannot do it."""
    run = found.run
    return {
        "format": "meshwright comparison",
        "version": 1,
        "model": found.config.model,
        "batch": found.config.batch,
        "seq": found.config.seq,
        "tokens": run.tokens,
        "like": found.like,
        "within_seconds": run.within if run.within < math.inf else None,
        "budget": run.budget if run.budget < math.inf else None,
        "machines": [_offer_data(one) for one in found.offers],
        "refused": [{"machine": one.name, "why": one.why} for one in found.refused],
        "unpriced": list(found.unpriced),
        "curve": curve_data(sizes),
    }


def curve_data(sizes: Sequence[Size]) -> list[dict[str, Any]]:
    """Each number of chips with what it reaches."""
    return [
        {
            "machine": str(one.machine),
            "chips": one.machine.num_chips,
            "tokens_per_second": one.tokens_per_second,
            "mfu": one.estimate.mfu,
        }
        for one in sizes
    ]


def _offer_data(one: Offer) -> dict[str, Any]:
    choice, price = one.estimate.choice, one.price
    return {
        "machine": str(one.machine),
        "chip": one.machine.chip.name,
        "chips": one.machine.num_chips,
        "mesh": choice.mesh,
        "remat": choice.remat,
        "accumulation": choice.accumulation,
        "step_seconds": one.estimate.step_seconds,
        "tokens_per_second": one.tokens_per_second,
        "mfu": one.estimate.mfu,
        "memory": one.estimate.memory.total,
        "memory_limit": one.estimate.memory.limit,
        "goodput": one.goodput,
        "seconds": one.seconds,
        "days": one.days,
        "chip_hours": one.chip_hours,
        "cost": one.cost,
        "price": None if price is None else vars(price),
        "bound": one.estimate.bound,
        "reason": one.estimate.reason,
        "smaller": None if one.smaller is None else _smaller_data(one.smaller),
    }


def _smaller_data(one: Offer) -> dict[str, Any]:
    return {
        "machine": str(one.machine),
        "chips": one.machine.num_chips,
        "seconds": one.seconds,
        "cost": one.cost,
    }
