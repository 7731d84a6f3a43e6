"""`meshwright machines`: the catalogue of chips."""

from typing import Annotated

import tyro
from rich.console import Console

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.machines import CHIPS, FIGURES, PRICES, Chip, find_chip
from meshwright.present import Column, Row, aligned


def machines(chip: Annotated[str | None, tyro.conf.Positional] = None) -> None:
    """List the chips in the catalogue.

    Args:
        chip: Show one chip, with the source of each figure.
    """
    console = Console()
    if chip is not None:
        known = find_chip(chip)
        if known is None:
            raise MeshwrightError(f"chip {chip!r} is not known{did_you_mean(chip, CHIPS)}")
        _print_figures(console, known)
        return
    names = ("bf16", "fp8", "memory", "bandwidth", "links", "chips/host", "$/hour")
    lines = [
        Row(
            (
                each.name,
                _tera(each.bf16_flops, "FLOP/s"),
                _tera(each.fp8_flops, "FLOP/s"),
                f"{each.memory_bytes / 1e9:.0f} GB",
                f"{each.memory_bandwidth / 1e12:.2f} TB/s",
                f"{each.links} × {each.link_bandwidth / 1e9:.0f} GB/s",
                str(each.chips_per_host),
                f"{PRICES[each.name][0].dollars:.2f}" if each.name in PRICES else "",
            )
        )
        for each in CHIPS.values()
    ]
    least = {"fp8": 1, "links": 2, "chips/host": 3}  # which narrow terminals leave out
    columns = [Column("chip", right=False)]
    columns += [Column(name, importance=least.get(name, 0)) for name in names]
    console.print(*aligned(columns, lines, console.width), sep="\n")
    console.print(
        "Figures are per chip, links per direction, prices the lowest list price on demand. "
        "Sources: meshwright machines CHIP"
    )


def _print_figures(console: Console, chip: Chip) -> None:
    columns = [Column("figure", right=False), Column("value")]
    columns += [Column("source", right=False, least=24)]
    lines = []
    for figure in FIGURES:
        value = getattr(chip, figure)
        number = "none" if value is None else f"{value:,.0f}"
        lines.append(Row((figure, number, chip.source(figure))))
    for price in PRICES.get(chip.name, ()):
        said = f"{price.instance}, on demand, {price.region}, {price.date}: {price.source}"
        lines.append(Row(("dollars an hour", f"{price.dollars:.4g}", said)))
    console.print(*aligned(columns, lines, console.width), sep="\n")


def _tera(value: float | None, unit: str) -> str:
    return "none" if value is None else f"{value / 1e12:,.5g} T{unit}"
