"""An audit in words: plain text, and Markdown."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.audits.collective import SentCollective
from meshwright.present import (
    Column,
    Row,
    bytes_text,
    count,
    mesh_text,
    table_html,
    table_markdown,
    table_text,
    text_html,
)

if TYPE_CHECKING:
    from meshwright.audits.result import Audit

Table = tuple[list[Column], list[Row]]
_RIGHT = ("sent", "times", "bytes", "count", "copies", "bytes a device")
_LEAST = {"scope": 28, "source": 16, "which": 16}  # these break over lines, to no less than this
# a small terminal omits these, the first of them first
_OMITTED = ("scope", "how", "phase", "beside compute", "made by", "count", "source")


def headline(audit: Audit) -> str:
    """One line: how much is sent in all, and how many surprises there are."""
    counted = [row for row in audit.rows if row.counted]
    sent = sum(row.wire_bytes * row.times for row in counted)
    times = sum(row.times for row in counted)
    on = f"mesh {mesh_text(audit.mesh)}" if audit.mesh else "no mesh"
    said = f"{on}: {count(times, 'collective')} in a run, "
    said += f"{bytes_text(round(sent))} sent by each device"
    if not audit.judged:
        return f"{said}; not judged: no expectations were given"
    found = len(audit.surprises)
    said += f"; {count(found, 'surprise') if found else 'no surprises'}"
    if audit.rewritten:
        kinds = "; ".join(dict.fromkeys(row.why for row in audit.rewritten))
        said += f"; {len(audit.rewritten)} rewritten by the compiler: {kinds}"
    return said


def sums_table(audit: Audit) -> Table:
    lines: list[Sequence[str]] = [
        (
            ("part of " if one.part_of_axes else "") + "+".join(one.axes),
            one.operation + (f" ({one.rewritten} rewritten)" if one.rewritten else ""),
            f"{one.times:,}", bytes_text(one.bytes),
            bytes_text(round(one.wire_bytes)),
            f"{one.hidden_bytes / one.wire_bytes:.0%}" if one.wire_bytes else "",
        )
        for one in audit.by_axis()
    ]  # fmt: skip
    return _table(("axes", "operation", "times", "bytes", "sent", "beside compute"), lines)


def rows_table(rows: Iterable[SentCollective]) -> Table:
    """Rows that differ only in their position are one line. See `marks` for ~ and !."""
    columns = ("sent", "times", "operation", "axes", "array", "phase", "how", "scope", "source")
    lines: list[Sequence[str]] = []
    for row, alike in merged(rows):
        lines.append(
            (
                bytes_text(round(row.wire_bytes * row.times * alike)),
                f"{row.times * alike:,}{'?' if row.unsure else ''}",
                f"{row.operation} {mark(row)}".rstrip() + branch(row), row.over,
                array_text(row.dtype, row.shape), row.phase, how(row), short_scope(row.scope),
                short_source(row.source),
            )
        )  # fmt: skip
    return _table(columns, lines)


def mark(row: SentCollective) -> str:
    return "!" if not row.planned else "~" if row.rewritten else ""


def branch(row: SentCollective) -> str:
    """` (branch 1 of 2)` of what only one branch of a conditional sends."""
    return f" (branch {row.branch})" if row.branch else ""


def marks(audit: Audit) -> str:
    """What the signs in the rows' table mean, of those that are there."""
    said = ["! a surprise"] if audit.surprises else []
    said += ["~ rewritten by the compiler"] if audit.rewritten else []
    return ", ".join(said)


def merged(rows: Iterable[SentCollective]) -> list[tuple[SentCollective, int]]:
    """Rows with how many are alike, most bytes on the wire first."""
    groups: dict[tuple[object, ...], tuple[SentCollective, int]] = {}
    for row in rows:
        key = (
            row.operation, row.axes, row.dtype, row.shape, row.loops, row.scope, row.source,
            row.part_of_axes, row.asynchronous, row.hidden_under > 0, row.planned, row.why,
            row.branch,
        )  # fmt: skip
        groups[key] = (row, groups.get(key, (row, 0))[1] + 1)
    return sorted(groups.values(), key=lambda one: -one[0].wire_bytes * one[0].times * one[1])


def plain_text(audit: Audit) -> str:
    """Sums, rows, surprises, the largest buffers and arrays with copies."""
    parts = [
        headline(audit),
        table_text(*sums_table(audit)),
        "",
        table_text(*rows_table(audit.rows)),
    ]
    parts += [marks(audit)] if marks(audit) else []
    parts += [f"note: {note}" for note in audit.notes]
    if audit.surprises:
        parts += ["", "surprises:", *map(row_line, audit.surprises)]
    if audit.rewritten:
        parts += ["", "rewritten by the compiler:", *map(row_line, audit.rewritten)]
    if audit.missing:
        parts += ["", *(f"expected, but missing: {one}" for one in audit.missing)]
    if audit.buffers:
        parts += ["", "largest buffers on a device:", table_text(*buffers_table(audit))]
    if audit.replicated:
        parts += ["", "arrays with copies:", table_text(*replicated_table(audit))]
    return "\n".join(parts)


def notebook(audit: Audit) -> str:
    """The sums, the rows with most bytes and what was not planned, as HTML."""
    ordered = sorted(audit.rows, key=lambda row: -row.wire_bytes * row.times)[:30]
    wrong = [f"surprise: {row_line(row)}" for row in audit.surprises]
    wrong += [f"rewritten: {row_line(row)}" for row in audit.rewritten]
    tables = (sums_table(audit), rows_table(ordered))
    parts = [text_html(headline(audit)), *(table_html(*table) for table in tables)]
    return "".join([*parts, text_html(*wrong, *(f"note: {note}" for note in audit.notes))])


def markdown(audit: Audit) -> str:
    parts = [headline(audit)]
    parts += [table_markdown(*table) for table in (sums_table(audit), rows_table(audit.rows))]
    parts += [f"- surprise: {row_line(row)}" for row in audit.surprises]
    parts += [f"- rewritten: {row_line(row)}" for row in audit.rewritten]
    parts += [f"- note: {note}" for note in audit.notes]
    return "\n\n".join(parts[:3]) + ("\n\n" + "\n".join(parts[3:]) if parts[3:] else "")


def objections(audit: Audit, allow_missing: bool = False) -> str:
    """What `assert_collectives` fails with: surprises and missing collectives; "" if none."""
    if not audit.surprises and (allow_missing or not audit.missing):
        return ""
    lines = [headline(audit)]
    if audit.surprises:
        lines += [f"{count(len(audit.surprises), 'surprise')}:"]
        lines += [table_text(*rows_table(audit.surprises))]
        lines += [f"  {row_line(row)}" for row in audit.surprises]
    if not allow_missing:
        lines += [f"expected, but missing: {one}" for one in audit.missing]
    return "\n".join(lines)


def buffers_table(audit: Audit) -> Table:
    lines: list[Sequence[str]] = [
        (
            bytes_text(one.bytes), f"{one.count}", array_text(one.dtype, one.shape), one.operation,
            short_scope(one.scope), short_source(one.source),
        )
        for one in audit.buffers[:10]
    ]  # fmt: skip
    return _table(("bytes", "count", "array", "made by", "scope", "source"), lines)


def replicated_table(audit: Audit) -> Table:
    lines: list[Sequence[str]] = [
        (
            bytes_text(one.bytes), f"{one.copies}", "+".join(one.axes),
            array_text(one.dtype, one.shape), one.name,
        )
        for one in audit.replicated[:20]
    ]  # fmt: skip
    return _table(("bytes a device", "copies", "replicated over", "array", "which"), lines)


def row_line(row: SentCollective) -> str:
    """`all-reduce over fsdp of f32[64,64], 3 times, at model.py:12 (scope): why`."""
    at = f" at {relative_source(row.source)}" if row.source else ""
    return (
        f"{row.operation}{branch(row)} over {row.over} of {array_text(row.dtype, row.shape)}, "
        f"{count(row.times, 'time')}, {row.phase},{at} ({row.scope or 'no scope'}): {row.why}"
    )


def how(row: SentCollective) -> str:
    """Whether it overlaps with compute."""
    if not row.asynchronous:
        return "waits"
    return (
        f"beside {count(row.hidden_under, 'op')}" if row.hidden_under else "async, beside nothing"
    )


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
    return "/".join(relative_source(source).split("/")[-2:])


def relative_source(source: str) -> str:
    """Relative to the folder of packages or the working directory, if it is inside one of them."""
    packages = Path(__file__).resolve().parents[2]
    for folder in (packages, Path.cwd()):
        if Path(source).is_relative_to(folder) and folder != Path(os.sep):
            return Path(source).relative_to(folder).as_posix()
    return source


def _table(names: Sequence[str], lines: Iterable[Sequence[str]]) -> Table:
    columns = [
        Column(
            name,
            right=name in _RIGHT,
            importance=1 + _OMITTED.index(name) if name in _OMITTED else 0,
            least=_LEAST.get(name, 0),
        )
        for name in names
    ]
    return columns, [Row(cells) for cells in lines]
