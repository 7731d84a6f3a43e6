"""A user's own chips and prices, from a TOML file, beside those of the catalogue.

[chips.a100-96]          # figures that are not given are those of the chip it is like
like = "a100-80"
memory_bytes = 103_079_215_104

[prices]                 # dollars an hour: of one chip, or of a cloud's instance
a100-96 = 1.9
"p5.48xlarge" = 31.46
"""

import dataclasses
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.machines.chips import CHIPS, FIGURES, Chip, find_chip
from meshwright.machines.cloud_names import INSTANCES
from meshwright.machines.prices import PRICES, Price


@dataclasses.dataclass(frozen=True)
class Catalogue:
    """Chips beside those of the catalogue, and the price of each chip that has one."""

    own: Mapping[str, Chip] = dataclasses.field(default_factory=dict)
    prices: Mapping[str, Price] = dataclasses.field(
        default_factory=lambda: {chip: prices[0] for chip, prices in PRICES.items()}
    )
    file: str = ""
    """Where chips and prices of one's own are from."""

    def chip(self, name: str) -> Chip | None:
        """By its name or alias; an instance's name is a machine's, not a chip's."""
        return None if name.lower() in INSTANCES else self.own.get(name) or find_chip(name)


def read_catalogue(file: Path | str) -> Catalogue:
    """The catalogue with the chips and prices of a TOML file."""
    where = f"catalogue {str(file)!r}"
    try:
        data = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as reason:
        raise MeshwrightError(f"{where} cannot be read: {reason}") from None
    except tomllib.TOMLDecodeError as reason:
        raise MeshwrightError(f"{where} is not TOML: {reason}") from None
    for table in data:
        if table not in ("chips", "prices") or not isinstance(data[table], dict):
            raise MeshwrightError(
                f"{where}: {table!r} is neither the table [prices] nor one of a chip, such as "
                "[chips.my-gpu]"
            )
    own = {
        name: _chip(name, figures, f"{where}, chip {name!r}")
        for name, figures in data.get("chips", {}).items()
    }
    known = Catalogue(own)
    prices = dict(known.prices)
    for name, dollars in data.get("prices", {}).items():
        chip, price = _price(known, name, dollars, where)
        prices[chip] = price
    return Catalogue(own, prices, str(file))


def _chip(name: str, figures: Any, where: str) -> Chip:
    if not isinstance(figures, dict) or not isinstance(figures.get("like"), str):
        raise MeshwrightError(f'{where} lacks like = "h100", the chip whose figures it takes over')
    base = find_chip(figures["like"])
    if base is None:
        raise MeshwrightError(
            f"{where}: like = {figures['like']!r} is not in the catalogue"
            f"{did_you_mean(figures['like'], CHIPS)}"
        )
    given = {figure: value for figure, value in figures.items() if figure != "like"}
    for figure, value in given.items():
        if figure not in FIGURES:
            raise MeshwrightError(
                f"{where}: {figure!r} is not a figure of a chip{did_you_mean(figure, FIGURES)}"
            )
        if not _is_positive(value):
            raise MeshwrightError(f"{where}: {figure} = {value!r} is not a number above 0")
        if isinstance(getattr(base, figure), int):
            given[figure] = int(value)
    sources = {**base.sources, **dict.fromkeys(given, "your own catalogue")}
    usable = base.usable_gib
    if usable is not None and "memory_bytes" in given:
        usable *= given["memory_bytes"] / base.memory_bytes
    return dataclasses.replace(
        base, name=name, like=base.kind, aliases=(), usable_gib=usable, sources=sources, **given
    )


def _is_positive(value: Any) -> bool:
    """Of TOML, which has nan, inf, booleans and integers of any length too."""
    is_number = isinstance(value, int | float) and value is not True
    return is_number and 0 < value <= sys.float_info.max


def _price(known: Catalogue, name: str, dollars: Any, where: str) -> tuple[str, Price]:
    if not _is_positive(dollars):
        raise MeshwrightError(f"{where}: price {name} = {dollars!r} is not a number of dollars")
    chips = 1
    chip = known.chip(name)
    if name.lower() in INSTANCES:
        of_instance, chips = INSTANCES[name.lower()]
        chip = CHIPS[of_instance]
    if chip is None:
        names = [*known.own, *CHIPS, *INSTANCES]
        raise MeshwrightError(
            f"{where}: price of {name!r}, which is neither a chip nor an instance"
            f"{did_you_mean(name, names)}"
        )
    return chip.name, Price(dollars / chips, name, "", "", "your own catalogue")
