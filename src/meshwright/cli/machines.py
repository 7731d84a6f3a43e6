"""`meshwright machines`: the catalogue of chips."""

import dataclasses
import math

from rich.console import Console

from meshwright.cli.parser import POSITIONAL
from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.machines import CHIPS, FIGURES, INSTANCES, PRICES, Chip, find_chip, slice_shapes
from meshwright.present import Column, Row, aligned


@dataclasses.dataclass(frozen=True)
class MachinesSettings:
    chip: str | None = dataclasses.field(default=None, metadata=POSITIONAL)
    """Show one chip: the source of each figure, and the machines that are built of it."""


def machines(settings: MachinesSettings) -> None:
    """List the chips and machines of the catalogue.

      meshwright machines v5p

    A MACHINE is a chip and a shape: v5p:4x4x8 is a TPU slice, h100:16x8 are 16 hosts of 8 GPUs.
    """
    chip = settings.chip
    console = Console()
    if chip is not None:
        known = find_chip(chip)
        if known is None:
            raise MeshwrightError(f"chip {chip!r} is not known{did_you_mean(chip, CHIPS)}")
        _print_figures(console, known)
        return
    names = ("bf16", "fp8", "memory", "bandwidth", "links", "chips/host", "$/hour", "machines")
    lines = [
        Row(
            (
                each.name,
                _tera(each.bf16_flops),
                _tera(each.fp8_flops),
                f"{each.memory_bytes / 1e9:.0f} GB",
                f"{each.memory_bandwidth / 1e12:.2f} TB/s",
                f"{each.links} × {each.link_bandwidth / 1e9:.0f} GB/s",
                str(each.chips_per_host),
                f"{PRICES[each.name][0].dollars:.2f}" if each.name in PRICES else "",
                _sizes(each),
            )
        )
        for each in CHIPS.values()
    ]
    least = {"fp8": 1, "links": 2, "chips/host": 3}  # which narrow terminals leave out
    columns = [Column("chip", right=False)]
    columns += [Column(name, importance=least.get(name, 0)) for name in names[:-1]]
    columns += [Column("machines", right=False, importance=4)]
    console.print(*aligned(columns, lines, console.width), sep="\n")
    console.print(
        "Figures are per chip, links per direction, prices the lowest list price on demand. "
        "Sources, and every machine of a chip: meshwright machines CHIP"
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
    named = [name for name, (of, _) in INSTANCES.items() if find_chip(of) == chip]
    shapes = [f"{chip.name}:{'x'.join(map(str, shape))}" for shape in slice_shapes(chip.kind)]
    if len(shapes) > 24:
        shapes = [*shapes[:20], f"… {len(shapes) - 21} more …", shapes[-1]]
    sizes = shapes or [f"{chip.name}:8", f"{chip.name}:16x8 (16 hosts)", *named]
    console.print(f"machines: {', '.join(sizes)}", highlight=False)


def _sizes(chip: Chip) -> str:
    """The machines of a chip, from the smallest to the largest."""
    shapes = slice_shapes(chip.kind)
    if not shapes:
        return f"{chip.name}:{chip.chips_per_host}, {chip.name}:16x{chip.chips_per_host} …"
    first, last = ("x".join(map(str, shape)) for shape in (shapes[0], shapes[-1]))
    return f"{chip.name}:{first} to {last} ({math.prod(shapes[-1]):,} chips)"


def _tera(flops: float | None) -> str:
    return "none" if flops is None else f"{flops / 1e12:,.5g} TFLOP/s"
