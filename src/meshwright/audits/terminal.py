"""Tables of an audit on a terminal of any width: the name of a row is never cut.

A small terminal omits complete columns, the least important first, and lists them.
"""

from rich.console import Console
from rich.text import Text

from meshwright.audits.text import Table
from meshwright.present import aligned, omitted_columns


def print_table(console: Console, table: Table, title: str = "") -> None:
    """Print as many columns as fit, and the names of those that do not."""
    columns, rows = table
    lines = aligned(columns, rows, console.width)
    console.print(*[Text(f"\n{title}".rstrip()), *lines], sep="\n")
    omitted = omitted_columns(columns, rows, console.width)
    if omitted:
        console.print(
            f"omitted, since the terminal has only {console.width} columns: {', '.join(omitted)}",
            style="dim", highlight=False,
        )  # fmt: skip
