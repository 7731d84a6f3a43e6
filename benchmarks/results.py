"""Puts a section into RESULTS.md, with what it was measured on."""

import datetime
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("RESULTS.md")
NOT_RECORDED = "not recorded"  # of an entry that does not say it
BY_HAND = "<!-- by hand -->"  # before what was written under a table


def here() -> str:
    """The machine, the day and the versions, for the line under a section's title."""
    from importlib.metadata import version

    return (
        f"{datetime.date.today()}, {os.cpu_count()} CPU cores ({platform.machine()}), "
        f"Python {platform.python_version()}, jax {version('jax')}"
    )


def origins(entries: Iterable[Mapping[str, Any]]) -> str:
    """On which machines, by which compilers and when recorded programs were compiled.

    "jax 0.10.2, libtpu 0.0.42.1 on x86_64, 2026-11-15 to 2026-11-16 (83 programs)"
    """
    dates: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        machine = entry.get("machine", NOT_RECORDED)
        compiler = entry.get("compiler", f"compiler {NOT_RECORDED}")
        dates.setdefault((compiler, machine), []).append(entry.get("date", NOT_RECORDED))
    parts = []
    for (compiler, machine), days in sorted(dates.items()):
        where = f"machine {machine}" if machine == NOT_RECORDED else f"on {machine}"
        when = " to ".join(dict.fromkeys((min(days), max(days))))
        number = f"{len(days)} program{'' if len(days) == 1 else 's'}"
        parts.append(f"{compiler}, {where}, {when} ({number})")
    return "; ".join(parts)


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
