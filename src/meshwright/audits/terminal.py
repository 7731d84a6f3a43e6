"""Tables of an audit on a terminal of any width: the name of a row is never cut.

A small terminal omits complete columns, the least important first, and lists them.
"""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from meshwright.audits.text import Table

FULL_WIDTH = 120  # columns of a terminal from which on there is room for scopes
_GAP = 3  # columns between two cells
_LEAST = {"scope": 24, "source": 16, "which": 16}  # these break over lines, to no less than this
_LEFT_OUT_FIRST = ("scope", "how", "phase", "beside compute", "made by", "count", "source")
_RIGHT = ("sent", "times", "bytes", "count", "copies", "bytes a device")


def print_table(console: Console, table: Table, title: str | None = None) -> None:
    """Print as many columns as fit, and the names of those that do not."""
    names = fitting(table, console.width)
    columns, lines = table
    shown = RichTable(box=box.SIMPLE, title=title, title_justify="left", pad_edge=False)
    for name in names:
        breaks = name in _LEAST
        shown.add_column(
            name, justify="right" if name in _RIGHT else "left", no_wrap=not breaks,
            overflow="fold",
        )  # fmt: skip
    places = [columns.index(name) for name in names]
    for line in lines:
        shown.add_row(*(line[place].replace("[", "\\[") for place in places))
    console.print(shown)
    left_out = [name for name in columns if name not in names]
    if left_out:
        said = (
            f"omitted, since the terminal has only {console.width} columns: {', '.join(left_out)}"
        )
        console.print(said, style="dim", highlight=False)


def fitting(table: Table, width: int) -> list[str]:
    """The names of the columns that fit into a width."""
    columns, lines = table
    names = [name for name in columns if not (name == "scope" and width < FULL_WIDTH)]
    need = {
        name: max(len(line[place]) for line in (columns, *lines))
        for place, name in enumerate(columns)
    }
    need |= {name: min(need[name], _LEAST[name]) for name in names if name in _LEAST}

    def room(kept: Sequence[str]) -> int:
        return sum(need[name] + _GAP for name in kept)

    for name in _LEFT_OUT_FIRST:
        if room(names) > width and name in names:
            names.remove(name)
    return names
