"""Puts a section into RESULTS.md, with what it was measured on."""

import datetime
import os
import platform
from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).with_name("RESULTS.md")
BY_HAND = "<!-- by hand -->"  # before what was written under a table


def here() -> str:
    """The machine, the day and the versions, for the line under a section's title."""
    from importlib.metadata import version

    return (
        f"{datetime.date.today()}, {os.cpu_count()} CPU cores ({platform.machine()}), "
        f"Python {platform.python_version()}, jax {version('jax')}"
    )


def write_section(title: str, conditions: str, lines: Sequence[str]) -> None:
    """Write the section `title`, in place of the one of that name; what BY_HAND begins stays."""
    section = f"## {title}"
    text = "\n".join([section, "", conditions, "", *lines, ""])
    before, found, after = RESULTS.read_text().partition(f"{section}\n")
    old, mark, rest = after.partition("\n## ")
    if BY_HAND in old:
        text += f"\n{old[old.index(BY_HAND) :].rstrip()}\n"
    if not found:
        before = before.rstrip() + "\n\n"
    RESULTS.write_text(before + text + ("\n## " + rest if mark else ""))
