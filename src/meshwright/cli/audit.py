"""`meshwright audit`: list the collectives of a train step or of any compiled program."""

import gzip
import json
import sys
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console

from meshwright.audits import (
    Audit,
    Collective,
    buffers_table,
    expected_of,
    headline,
    marks,
    merged,
    replicated_table,
    row_line,
    rows_table,
    sums_table,
)
from meshwright.cli.flags import simulate, take, take_all, take_integer, take_switch
from meshwright.errors import MeshwrightError
from meshwright.files import status_of
from meshwright.meshes import STANDARD_AXES, MeshSpec
from meshwright.present import Column, Row, aligned, mesh_text

HELP = """usage: meshwright audit MODEL --mesh … [the settings of train] [--json] [--fail-on WHAT]
       meshwright audit --text FILE --mesh fsdp=4,tp=2 [--json] [--fail-on WHAT]

List every collective of a training step or a compiled program: planned, or a surprise. The step is
the one that `meshwright train` with these settings would run, compiled for the devices of this
machine or for --cpu-devices N. The list has the operation, mesh axes, bytes, executions and source;
a collective that the layout does not need is a surprise. No data is needed.

  --text FILE          read the text of a compiled program instead: compiled.as_text(), an XLA dump,
                       or the program.hlo.gz of prove
  --expect AXES:OPS    expected collectives: fsdp:all-gather,reduce-scatter; repeatable.
                       reduce-scatter/all-reduce: the compiler may rewrite the first as the second
  --rows N             number of table rows to show, most bytes first (default 30; 0: all)
  --json               print JSON
  --fail-on WHAT       exit with status 1 on: surprise (an unexpected collective), or rewrite (a
                       surprise, or a collective that the compiler rewrote)

meshwright train --help lists the other settings."""


def audit_command(arguments: Sequence[str]) -> None:
    """List every collective of a training step or a compiled program: planned, or a surprise.

    meshwright audit tiny --cpu-devices 8 --mesh fsdp=4,tp=2 --batch 8 --seq 64
    """
    words = list(arguments)  # audit's own flags are removed, the rest are train's
    if "--help" in words or "-h" in words or not words:
        print(HELP)
        return
    text, expect = take(words, "--text"), take_all(words, "--expect")
    fail_on, most = take(words, "--fail-on"), take_integer(words, "--rows")
    as_json = take_switch(words, "--json")
    if fail_on not in (None, "surprise", "rewrite"):
        raise MeshwrightError(f"--fail-on {fail_on!r} is not known; it can be: surprise, rewrite")
    if text is not None:
        if fail_on and not expect:
            raise _unknown(fail_on, "a program")
        audit = _of_text(text, words, expect)
    else:
        audit = _of_step(words, expect, fail_on)
    wrong = (fail_on and audit.surprises) or (fail_on == "rewrite" and audit.rewritten)
    with status_of(failed=bool(wrong)):
        if as_json:
            print(json.dumps(audit.data()))
        else:
            show(audit, Console(), 30 if most is None else most)


def show(audit: Audit, console: Console, most: int = 30) -> None:
    """Print the sums, then the rows, most bytes first, then the largest arrays."""
    console.print(headline(audit), highlight=False, soft_wrap=True)
    _print_table(console, sums_table(audit))
    ordered = sorted(audit.rows, key=lambda row: -row.wire_bytes * row.times)
    columns, lines = rows_table(ordered)
    shown = lines if most == 0 else lines[:most]
    _print_table(console, (columns, shown))
    if marks(audit):
        console.print(marks(audit), style="dim")
    if len(lines) > len(shown):
        console.print(f"and {len(lines) - len(shown)} smaller; --rows 0 shows all", style="dim")
    for row in audit.surprises:
        console.print(f"surprise: {row_line(row)}", style="bold red", highlight=False,
                      soft_wrap=True, markup=False)  # fmt: skip
    for row, alike in merged(audit.rewritten):
        also = f" (and {alike - 1} alike)" if alike > 1 else ""
        console.print(f"rewritten: {row_line(row)}{also}", style="yellow", highlight=False,
                      soft_wrap=True, markup=False)  # fmt: skip
    for collective in audit.missing:
        console.print(f"expected, but missing: {collective}", style="yellow", highlight=False)
    for title, table in (
        ("largest buffers on a device", buffers_table(audit)),
        ("arrays with copies", replicated_table(audit)),
    ):
        if table[1]:
            _print_table(console, table, title)
    for note in audit.notes:
        console.print(f"note: {note}", style="dim", highlight=False, soft_wrap=True)
    if any(row.unsure for row in audit.rows):
        console.print("? in a loop with an unknown trip count: counted once")


def _print_table(console: Console, table: tuple[list[Column], list[Row]], title: str = "") -> None:
    console.print(f"\n{title}".rstrip(), *aligned(*table, console.width), sep="\n")


def _unknown(fail_on: str, program: str) -> MeshwrightError:
    return MeshwrightError(
        f"--fail-on {fail_on} needs the expected collectives of {program}; give: "
        "--expect fsdp:all-gather,reduce-scatter"
    )


def _of_text(file: str, words: list[str], expect: list[str]) -> Audit:
    """The audit of a dumped program; only the mesh of train's settings is used."""
    from meshwright.audits import audit as read_audit  # which imports jax

    mesh = take(words, "--mesh")
    if mesh is None:
        raise MeshwrightError("--text needs --mesh, the mesh that the program was compiled for")
    if words:
        raise MeshwrightError(f"--text takes --mesh only, not {' '.join(words)}")
    spec = MeshSpec.parse(mesh)
    if not spec.is_resolved:
        raise MeshwrightError(f"--mesh {mesh!r}: with --text, give every size; -1 is not possible")
    expected = _expectations(expect, spec.names)
    return read_audit(_text_in(file), spec, expected=expected)


def _text_in(file: str) -> str:
    """The text of a file, gzipped or not."""
    try:
        content = Path(file).read_bytes()
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
        return content.decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as reason:
        why = getattr(reason, "strerror", None) or reason
        raise MeshwrightError(
            f"--text {file!r} cannot be read: {why}; give a file with the text of a program"
        ) from None


def _of_step(words: list[str], expect: list[str], fail_on: str | None) -> Audit:
    """The audit of the train step with these settings."""
    from meshwright.audits import audit as read_audit
    from meshwright.audits import expected_of_step
    from meshwright.cli.train import settings
    from meshwright.training import AbstractStep, abstract_step

    config = settings(words, prog="meshwright audit")
    simulate(config.cpu_devices)
    step: AbstractStep = abstract_step(config)
    expected = _expectations(expect, step.mesh.axis_names)
    if expected is None and set(step.mesh.axis_names) <= {*STANDARD_AXES, "ep"}:
        expected = expected_of_step(step)
    if expected is None and fail_on:
        raise _unknown(fail_on, f"a step on mesh '{mesh_text(step.mesh.shape)}' with custom axes")
    print(f"compiling the step of {config.model} …", file=sys.stderr)
    return read_audit(step.lower().compile(), step.mesh, expected=expected)


def _expectations(words: list[str], axes: Iterable[str]) -> tuple[Collective, ...] | None:
    """`fsdp:all-gather,reduce-scatter`, over axes of the mesh."""
    expected: list[Collective] = []
    for text in words:
        over, colon, operations = text.partition(":")
        if not colon or not operations:
            raise MeshwrightError(
                f"--expect {text!r} is not AXES:OPERATIONS; write fsdp:all-gather,reduce-scatter "
                "or fsdp+sp:all-gather"
            )
        names = [operation.strip() for operation in operations.split(",")]
        expected += expected_of({over: names}, axes)
    return tuple(expected) if words else None


if __name__ == "__main__":
    audit_command(sys.argv[1:])
