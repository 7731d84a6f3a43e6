"""Rows in aligned columns that leave out what a narrow terminal has no room for.

A row may carry a note: a sentence below it, indented, which wraps; and a heading above it.
"""

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

GAP = 2


@dataclasses.dataclass(frozen=True)
class Column:
    name: str
    right: bool = True
    importance: int = 0  # the lowest are left out first; 0 never is
    style: str = ""


@dataclasses.dataclass(frozen=True)
class Row:
    cells: Sequence[str]
    note: str = ""
    style: str = ""
    heading: str = ""


def aligned(
    columns: Sequence[Column], rows: Sequence[Row], width: int, indent: int = 0
) -> "list[RenderableType]":
    """Lines for rich, at most `width` wide."""
    from rich.text import Text

    widths = [
        max(len(column.name), *(len(row.cells[i]) for row in rows)) if rows else len(column.name)
        for i, column in enumerate(columns)
    ]
    shown, gap = _fitting(columns, widths, width - indent)
    last = shown[-1]

    def line(cells: Sequence[str], style: str, heading: bool = False) -> Text:
        text = Text(" " * indent, no_wrap=True, overflow="ellipsis", end="\n")
        for i in shown:
            cell = cells[i].rjust(widths[i]) if columns[i].right else cells[i].ljust(widths[i])
            text.append(cell.rstrip() if i == last else cell, style=style or columns[i].style)
            text.append("" if i == last else " " * gap)
        if heading:
            text.stylize("bold")
        return text

    lines: list[RenderableType] = [line([column.name for column in columns], "", heading=True)]
    for row in rows:
        if row.heading:
            lines.append(paragraph(row.heading, width, indent, hanging=2, style="italic"))
        lines.append(line(row.cells, row.style))
        if row.note:
            lines.append(paragraph(row.note, width, indent + 4, style="dim"))
    return lines


def paragraph(
    text: str, width: int, indent: int = 2, *, hanging: int = 0, style: str = ""
) -> "RenderableType":
    """A text wrapped at `width`, all of it indented, lines after the first by `hanging` more."""
    from rich.text import Text

    lines = textwrap.wrap(
        text,
        max(width, indent + hanging + 20),
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + hanging),
        break_on_hyphens=False,
    )
    return Text("\n".join(lines), style=style)


def _fitting(columns: Sequence[Column], widths: Sequence[int], width: int) -> tuple[list[int], int]:
    """Which columns are shown, and how far apart."""
    shown = list(range(len(columns)))
    droppable = sorted((c.importance, i) for i, c in enumerate(columns) if c.importance)
    while True:
        for gap in (GAP, 1):
            if sum(widths[i] for i in shown) + gap * (len(shown) - 1) <= width:
                return shown, gap
        if not droppable:
            return shown, 1
        shown.remove(droppable.pop(0)[1])
