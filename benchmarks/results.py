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
    return "{date}, {machine}, {versions}".format(**origin())


def origin() -> dict[str, str]:
    """The same for an entry of a record, whose entries may come from several days and machines."""
    from importlib.metadata import version

    return {
        "versions": f"Python {platform.python_version()}, jax {version('jax')}",
        "machine": f"{os.cpu_count()} CPU cores ({platform.machine()})",
        "date": str(datetime.date.today()),
    }


def origins(
    entries: Iterable[Mapping[str, Any]], software: str = "compiler", item: str = "program"
) -> str:
    """On which machines, by which compilers and when recorded programs were compiled.

    "jax 0.10.2, libtpu 0.0.42.1, on x86_64, 2026-11-15 to 2026-11-16 (83 programs)"

    Arguments:
        software: the key under which entries name the compiler, or other versions
        item: what an entry is
    """
    dates: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        machine = entry.get("machine", NOT_RECORDED)
        made_by = entry.get(software, f"{software} {NOT_RECORDED}")
        date = entry.get("date", f"date {NOT_RECORDED}")
        dates.setdefault((made_by, machine), []).append(date)
    parts = []
    for (made_by, machine), days in sorted(dates.items()):
        where = f"machine {machine}" if machine == NOT_RECORDED else f"on {machine}"
        when = " to ".join(dict.fromkeys((min(days), max(days))))
        number = f"{len(days)} {item}{'' if len(days) == 1 else 's'}"
        parts.append(f"{made_by}, {where}, {when} ({number})")
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
