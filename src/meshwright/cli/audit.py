"""`meshwright audit`: what a train step, or any compiled program, sends between devices."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from meshwright.audit import Audit, Expected
from meshwright.audit import audit as read_audit
from meshwright.audit.text import (
    buffers_table,
    headline,
    replicated_table,
    rows_table,
    sums_table,
    surprise_line,
)
from meshwright.cli.flags import take, take_all, take_switch
from meshwright.errors import MeshwrightError
from meshwright.mesh import STANDARD_AXES, MeshSpec

HELP = """meshwright audit MODEL --mesh … [the settings of train] [--json] [--fail-on surprise]
meshwright audit --text FILE --mesh fsdp=4,tp=2 [--json] [--fail-on surprise]

Compile the step that `meshwright train` with these settings would run, on the devices here or on
--cpu-devices N, and list every collective in it: operation, mesh axes, bytes, times, source. What
the layout does not call for is a surprise. No data is needed.

  --text FILE          read a compiled program's text (compiled.as_text(), or XLA's dump) instead
  --expect AXES:OPS    what it may send: fsdp:all-gather,reduce-scatter; repeatable
  --rows N             rows to show, most bytes first (default 30; 0: all)
  --json               plain data
  --fail-on surprise   exit status 1 if there is one

meshwright train --help lists the other settings."""


def audit_command(arguments: Sequence[str]) -> None:
    """Read the flags of this command, and give the rest to train's."""
    words = list(arguments)
    if "--help" in words or "-h" in words or not words:
        print(HELP)
        return
    text, expect = take(words, "--text"), take_all(words, "--expect")
    fail_on, most = take(words, "--fail-on"), take(words, "--rows")
    as_json = take_switch(words, "--json")
    if fail_on not in (None, "surprise"):
        raise MeshwrightError(f"--fail-on {fail_on!r} is not known; it can be: surprise")
    if most is not None and not most.isdigit():
        raise MeshwrightError(f"--rows {most!r} is not a whole number from 0")
    if fail_on and text is not None and not expect:
        raise MeshwrightError(
            "--fail-on surprise needs to know what a program may send; say it: "
            "--expect fsdp:all-gather,reduce-scatter"
        )
    said = _expectations(expect)
    found = _of_text(text, words, said) if text is not None else _of_step(words, said)
    if as_json:
        print(json.dumps(found.data()))
    else:
        show(found, Console(), 30 if most is None else int(most))
    if fail_on and found.surprises:
        raise SystemExit(1)


def show(found: Audit, console: Console, most: int = 30) -> None:
    """Sums first, then rows by what they send, then what is large."""
    console.print(headline(found), highlight=False, soft_wrap=True)
    console.print(_table(sums_table(found)))
    ordered = sorted(found.rows, key=lambda row: -row.wire_bytes * row.times)
    columns, lines = rows_table(ordered)
    shown = lines if most == 0 else lines[:most]
    console.print(_table((columns, shown)))
    if len(lines) > len(shown):
        console.print(f"and {len(lines) - len(shown)} smaller; --rows 0 shows all", style="dim")
    for row in found.surprises:
        console.print(f"surprise: {surprise_line(row)}", style="bold red", highlight=False,
                      soft_wrap=True, markup=False)  # fmt: skip
    for one in found.missing:
        console.print(f"expected, but not there: {one}", style="yellow", highlight=False)
    for title, table in (
        ("largest buffers on a device", buffers_table(found)),
        ("arrays with copies", replicated_table(found)),
    ):
        if table[1]:
            console.print(_table(table, title))
    if any(row.unsure for row in found.rows):
        console.print("? a loop around it does not say how often it turns: counted once")


def _table(content: tuple[Sequence[str], list[Sequence[str]]], title: str | None = None) -> Table:
    columns, lines = content
    table = Table(box=box.SIMPLE, title=title, title_justify="left", pad_edge=False)
    for name in columns:
        right = name in ("sent", "times", "bytes", "sent by a device", "count", "copies")
        table.add_column(
            name, justify="right" if right else "left",
            overflow="fold" if name in ("scope", "which", "source") else "ellipsis",
        )  # fmt: skip
    for line in lines:
        table.add_row(*(cell.replace("[", "\\[") for cell in line))
    return table


def _of_text(file: str, words: list[str], expected: tuple[Expected, ...] | None) -> Audit:
    """Of a dumped program; of train's settings only the mesh is used."""
    mesh = take(words, "--mesh")
    if mesh is None:
        raise MeshwrightError("--text needs --mesh, the one the program was compiled for")
    if words:
        raise MeshwrightError(f"--text takes --mesh only, not {' '.join(words)}")
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as reason:
        raise MeshwrightError(f"--text {file!r} cannot be read: {reason}") from None
    spec = MeshSpec.parse(mesh)
    if -1 in spec.sizes:
        raise MeshwrightError(f"--mesh {mesh!r}: with --text every size must be said, none be -1")
    return read_audit(text, dict(zip(spec.names, spec.sizes, strict=True)), expected=expected)


def _of_step(words: list[str], expected: tuple[Expected, ...] | None) -> Audit:
    """Of the step these settings of train give."""
    from meshwright.cli.train import settings
    from meshwright.train.cpu import make_room_for_cpu_collectives, simulate_devices
    from meshwright.train.described import Described, step_of

    config = settings(words)
    make_room_for_cpu_collectives()
    if config.cpu_devices is not None:
        simulate_devices(config.cpu_devices)
    step: Described = step_of(config)
    print(f"compiling the step of {config.model} …", file=sys.stderr)
    compiled = step.lower().compile()
    if expected is None:
        expected = _expected_of_step(step)
    return read_audit(compiled, step.mesh, expected=expected)


def _expected_of_step(step: Any) -> tuple[Expected, ...] | None:
    from meshwright.audit.step import expected_of_step

    return expected_of_step(step) if set(step.mesh.axis_names) <= set(STANDARD_AXES) else None


def _expectations(said: list[str]) -> tuple[Expected, ...] | None:
    """`fsdp:all-gather,reduce-scatter`."""
    found: list[Expected] = []
    for text in said:
        axes, colon, operations = text.partition(":")
        if not colon or not operations:
            raise MeshwrightError(
                f"--expect {text!r} is not AXES:OPERATIONS; write fsdp:all-gather,reduce-scatter "
                "or fsdp+sp:all-gather"
            )
        names = tuple(axis.strip() for axis in axes.split("+"))
        found += [Expected(operation.strip(), names) for operation in operations.split(",")]
    return tuple(found) if said else None


if __name__ == "__main__":
    audit_command(sys.argv[1:])
