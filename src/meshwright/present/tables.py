"""Tables in aligned columns; what does not fit is broken over lines, or left out and named.

    >>> print(table_text([Column("mesh", right=False), Column("GiB")], [Row(("fsdp=8", "61.2"))]))
    mesh     GiB
    fsdp=8  61.2

A row may have a note, a sentence below it, and a heading above it; both wrap.
"""

import dataclasses
import html
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

GAP = 2
Line = list[tuple[str, str]]  # texts with their styles


@dataclasses.dataclass(frozen=True)
class Column:
    name: str
    right: bool = True
    importance: int = 0  # the lowest are left out first; 0 never is
    style: str = ""
    least: int = 0  # long cells break over lines, to no less than this width; 0: they do not


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

    return [
        Text.assemble(*line, no_wrap=True, overflow="ellipsis")
        for line in _lines(columns, rows, width, indent)
    ]


def table_text(columns: Sequence[Column], rows: Sequence[Row], width: int = 10**6) -> str:
    """The table as plain text."""
    lines = _lines(columns, rows, width, 0)
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)


def table_markdown(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    """The table in Markdown, with all columns; without notes and headings."""
    cells = [[column.name for column in columns], *(row.cells for row in rows)]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in cells]
    return "\n".join([lines[0], f"|{'---|' * len(columns)}", *lines[1:]])


def table_html(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    """The table as HTML for a notebook, with all columns, notes and headings."""

    def line(tag: str, cells: Sequence[str], style: str = "") -> str:
        sides = ("right" if column.right else "left" for column in columns)
        texts = (
            f'<{tag} style="text-align:{side}">{html.escape(cell)}</{tag}>'
            for cell, side in zip(cells, sides, strict=True)
        )
        return f'<tr style="{style}">{"".join(texts)}</tr>'

    def beside(text: str, style: str) -> str:
        cell = f'<td colspan="{len(columns)}" style="text-align:left;{style}">'
        return f"<tr>{cell}{html.escape(text)}</td></tr>"

    lines = [line("th", [column.name for column in columns])]
    for row in rows:
        lines += [beside(row.heading, "font-style:italic")] if row.heading else []
        lines.append(line("td", row.cells, "font-weight:bold" if row.style else ""))
        lines += [beside(row.note, "opacity:0.7")] if row.note else []
    return f"<table>{''.join(lines)}</table>"


def text_html(*lines: str) -> str:
    """Lines of text as HTML."""
    return f"<div>{'<br>'.join(map(html.escape, lines))}</div>" if lines else ""


def paragraph(
    text: str, width: int, indent: int = 2, *, hanging: int = 0, style: str = ""
) -> "RenderableType":
    """A text wrapped at `width`, all of it indented, lines after the first by `hanging` more."""
    from rich.text import Text

    return Text(wrapped(text, width, indent, hanging), style=style)


def wrapped(text: str, width: int, indent: int = 0, hanging: int = 0) -> str:
    """A text wrapped at `width`, all of it indented, lines after the first by `hanging` more."""
    return "\n".join(
        textwrap.wrap(
            text,
            max(width, indent + hanging + 20),
            initial_indent=" " * indent,
            subsequent_indent=" " * (indent + hanging),
            break_on_hyphens=False,
        )
    )


def _lines(columns: Sequence[Column], rows: Sequence[Row], width: int, indent: int) -> list[Line]:
    shown, widths, gap = _fitting(columns, rows, width - indent)

    def cell_lines(cells: Sequence[str], style: str) -> list[Line]:
        broken = {i: _broken(cells[i], widths[i], columns[i].least) for i in shown}
        lines = []
        for number in range(max(map(len, broken.values()))):
            line: Line = [(" " * indent, "")]
            for i in shown:
                text = broken[i][number] if number < len(broken[i]) else ""
                text = text.rjust(widths[i]) if columns[i].right else text.ljust(widths[i])
                if i == shown[-1]:
                    line.append((text.rstrip(), style or columns[i].style))
                else:
                    line += [(text, style or columns[i].style), (" " * gap, "")]
            lines.append(line)
        return lines

    lines = cell_lines([column.name for column in columns], "bold")
    for row in rows:
        if row.heading:
            lines.append([(wrapped(row.heading, width, indent, 2), "italic")])
        lines += cell_lines(row.cells, row.style)
        if row.note:
            lines.append([(wrapped(row.note, width, indent + 4), "dim")])
    # one without a name is a drawing beside a number
    if names := [c.name for i, c in enumerate(columns) if i not in shown and c.name]:
        needed = indent + sum(_least_widths(columns, rows)) + len(columns) - 1
        text = f"left out: {', '.join(names)}; a width of {needed} shows all (COLUMNS={needed})"
        lines.append([(wrapped(text, width, indent, 2), "dim")])
    return lines


def _broken(cell: str, width: int, least: int) -> list[str]:
    if not least or len(cell) <= width:
        return [cell]
    return textwrap.wrap(cell, width, break_on_hyphens=False) or [""]


def _fitting(
    columns: Sequence[Column], rows: Sequence[Row], width: int
) -> tuple[list[int], list[int], int]:
    """Which columns are shown, how wide each is, and how far apart they are."""
    widths = _full_widths(columns, rows)
    least = _least_widths(columns, rows)
    shown = list(range(len(columns)))
    droppable = sorted((c.importance, i) for i, c in enumerate(columns) if c.importance)
    while True:
        for gap in (GAP, 1):
            room = width - sum(least[i] for i in shown) - gap * (len(shown) - 1)
            if room >= 0 or (gap == 1 and not droppable):
                for i in shown:  # what is left goes to the columns that break over lines
                    more = max(0, min(widths[i] - least[i], room))
                    widths[i] = least[i] + more
                    room -= more
                return shown, widths, gap
        shown.remove(droppable.pop(0)[1])


def _full_widths(columns: Sequence[Column], rows: Sequence[Row]) -> list[int]:
    return [
        max([len(column.name), *(len(row.cells[i]) for row in rows)])
        for i, column in enumerate(columns)
    ]


def _least_widths(columns: Sequence[Column], rows: Sequence[Row]) -> list[int]:
    """The widths below which columns are left out: those of their cells, broken over lines."""
    return [
        min(width, max(column.least, len(column.name))) if column.least else width
        for column, width in zip(columns, _full_widths(columns, rows), strict=True)
    ]
