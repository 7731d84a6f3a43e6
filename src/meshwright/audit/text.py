"""An audit in words: plain text, and Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from meshwright.audit.collective import Collective
from meshwright.errors import count, mesh_text
from meshwright.layout.explanation import bytes_text

if TYPE_CHECKING:
    from meshwright.audit.audit import Audit

Table = tuple[Sequence[str], list[Sequence[str]]]  # names of columns, and lines


def headline(audit: Audit) -> str:
    """One line: how much is sent in all, and how many surprises there are."""
    sent = sum(row.wire_bytes * row.times for row in audit.rows)
    times = sum(row.times for row in audit.rows)
    said = f"mesh {mesh_text(audit.mesh)}: {count(times, 'collective')} in a run, "
    said += f"{bytes_text(round(sent))} sent by each device"
    if audit.expected is None:
        return said
    found = len(audit.surprises)
    return f"{said}; {count(found, 'surprise') if found else 'no surprises'}"


def sums_table(audit: Audit) -> Table:
    lines: list[Sequence[str]] = [
        (
            "+".join(one.axes), one.operation, f"{one.times:,}", bytes_text(one.bytes),
            bytes_text(round(one.wire_bytes)), _share(one.hidden_bytes, one.wire_bytes),
        )
        for one in audit.by_axis()
    ]  # fmt: skip
    return ("axes", "operation", "times", "bytes", "sent by a device", "beside compute"), lines


def rows_table(rows: Iterable[Collective]) -> Table:
    """Rows alike but for where they stand are one line."""
    columns = ("sent", "times", "operation", "axes", "array", "phase", "how", "scope", "source")
    lines: list[Sequence[str]] = []
    for row, alike in merged(rows):
        lines.append(
            (
                bytes_text(round(row.wire_bytes * row.times * alike)),
                f"{row.times * alike:,}{'?' if row.unsure else ''}",
                row.operation, "+".join(row.axes), array_text(row.dtype, row.shape), row.phase,
                how(row), short_scope(row.scope), short_source(row.source),
            )
        )  # fmt: skip
    return columns, lines


def merged(rows: Iterable[Collective]) -> list[tuple[Collective, int]]:
    """Rows with how many are alike, most bytes on the wire first."""
    groups: dict[tuple[object, ...], tuple[Collective, int]] = {}
    for row in rows:
        key = (
            row.operation, row.axes, row.dtype, row.shape, row.loops, row.scope, row.source,
            row.asynchronous, row.hidden_under > 0, row.planned, row.why,
        )  # fmt: skip
        groups[key] = (row, groups.get(key, (row, 0))[1] + 1)
    return sorted(groups.values(), key=lambda one: -one[0].wire_bytes * one[0].times * one[1])


def plain_text(audit: Audit) -> str:
    """Sums, rows, surprises, the largest buffers and arrays with copies."""
    parts = [headline(audit), table_text(sums_table(audit)), "", table_text(rows_table(audit.rows))]
    if audit.surprises:
        parts += ["", "surprises:", *map(surprise_line, audit.surprises)]
    if audit.missing:
        parts += ["", *(f"expected, but not there: {one}" for one in audit.missing)]
    if audit.buffers:
        parts += ["", "largest buffers on a device:", table_text(buffers_table(audit))]
    if audit.replicated:
        parts += ["", "arrays with copies:", table_text(replicated_table(audit))]
    return "\n".join(parts)


def markdown(audit: Audit) -> str:
    tables = [sums_table(audit), rows_table(audit.rows)]
    parts = [headline(audit)]
    for columns, lines in tables:
        shown = [f"| {' | '.join(line)} |" for line in (columns, *lines)]
        parts.append("\n".join([shown[0], "|" + "---|" * len(columns), *shown[1:]]))
    parts += [f"- {surprise_line(row)}" for row in audit.surprises]
    return "\n\n".join(parts[:3]) + ("\n\n" + "\n".join(parts[3:]) if parts[3:] else "")


def buffers_table(audit: Audit) -> Table:
    lines: list[Sequence[str]] = [
        (
            bytes_text(one.bytes), f"{one.count}", array_text(one.dtype, one.shape), one.operation,
            short_scope(one.scope), short_source(one.source),
        )
        for one in audit.buffers[:10]
    ]  # fmt: skip
    return ("bytes", "count", "array", "made by", "scope", "source"), lines


def replicated_table(audit: Audit) -> Table:
    lines: list[Sequence[str]] = [
        (
            bytes_text(one.bytes), f"{one.copies}", "+".join(one.axes),
            array_text(one.dtype, one.shape), one.name,
        )
        for one in audit.replicated[:20]
    ]  # fmt: skip
    return ("bytes a device", "copies", "whole over", "array", "which"), lines


def surprise_line(row: Collective) -> str:
    """`all-reduce over fsdp of f32[64,64], 3 times, at model.py:12 (scope): why`."""
    at = f" at {row.source}" if row.source else ""
    return (
        f"{row.operation} over {'+'.join(row.axes)} of {array_text(row.dtype, row.shape)}, "
        f"{count(row.times, 'time')}, {row.phase},{at} ({row.scope or 'no scope'}): {row.why}"
    )


def how(row: Collective) -> str:
    """Whether compute goes on beside it."""
    if not row.asynchronous:
        return "waits"
    return f"beside {row.hidden_under} ops" if row.hidden_under else "async, beside nothing"


def array_text(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def short_scope(scope: str, most: int = 60) -> str:
    """Without what every scope has."""
    parts = [
        part for part in scope.split("/")
        if part not in ("while", "body", "closed_call", "eval_jaxpr", "shard_map", "checkpoint")
        and not part.startswith("jit(")
    ]  # fmt: skip
    text = "/".join(parts)
    return text if len(text) <= most else "…" + text[-most + 1 :]


def short_source(source: str) -> str:
    """The file's last folder and name."""
    return "/".join(source.split("/")[-2:])


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else ""


def table_text(table: Table) -> str:
    """In columns, one line a row."""
    columns, lines = table
    widths = [max(len(line[i]) for line in (columns, *lines)) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (columns, *lines)
    )
