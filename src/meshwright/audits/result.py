"""The result of an audit: the collectives of a program, sums of them, and its largest arrays."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from meshwright.audits.collective import Collective, SentCollective
from meshwright.audits.expected import missing
from meshwright.audits.memory import Buffer, Replicated


@dataclasses.dataclass(frozen=True)
class Sum:
    """All rows of one operation over the same axes."""

    axes: tuple[str, ...]
    operation: str
    rows: int
    times: int  # executions, of all rows
    bytes: int  # of all executions
    wire_bytes: float  # a device sends, in all executions
    hidden_bytes: float  # of those, overlapped with compute
    part_of_axes: bool = False
    rewritten: int = 0  # of the rows, by the compiler

    def data(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, repr=False)
class Audit:
    """What a program sends, and its largest arrays."""

    mesh: Mapping[str, int]  # axis sizes; none where nothing is sent and no mesh is known
    rows: tuple[SentCollective, ...]
    buffers: tuple[Buffer, ...]
    replicated: tuple[Replicated, ...]
    expected: tuple[Collective, ...] | None = None  # None: no expectations, so no surprises
    notes: tuple[str, ...] = ()  # remarks about the numbers

    @property
    def surprises(self) -> tuple[SentCollective, ...]:
        """The rows that nothing expected, most bytes on the wire first."""
        rows = [row for row in self.rows if not row.planned]
        return tuple(sorted(rows, key=lambda row: -row.wire_bytes * row.times))

    @property
    def rewritten(self) -> tuple[SentCollective, ...]:
        """The rows that the compiler rewrote from an expected collective, most bytes first."""
        rows = [row for row in self.rows if row.rewritten]
        return tuple(sorted(rows, key=lambda row: -row.wire_bytes * row.times))

    @property
    def judged(self) -> bool:
        """Whether there are expectations; without them no row is a surprise."""
        return self.expected is not None

    @property
    def missing(self) -> tuple[Collective, ...]:
        """Expected collectives that the program does not have."""
        return missing(self.rows, self.expected or ())

    def by_axis(self) -> tuple[Sum, ...]:
        """Sums for each axes and operation, most bytes on the wire first."""
        groups: dict[tuple[tuple[str, ...], str, bool], list[SentCollective]] = {}
        for row in self.rows:
            if not row.counted:
                continue
            groups.setdefault((row.axes, row.operation, row.part_of_axes), []).append(row)
        sums = []
        for (axes, operation, part), rows in groups.items():
            sums.append(
                Sum(
                    axes,
                    operation,
                    len(rows),
                    times=sum(row.times for row in rows),
                    bytes=sum(row.bytes * row.times for row in rows),
                    wire_bytes=sum(row.wire_bytes * row.times for row in rows),
                    hidden_bytes=sum(
                        row.wire_bytes * row.times for row in rows if row.hidden_under
                    ),
                    part_of_axes=part,
                    rewritten=sum(bool(row.rewritten) for row in rows),
                )
            )
        return tuple(sorted(sums, key=lambda one: -one.wire_bytes))

    def data(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {
            "mesh": dict(self.mesh),
            "by_axis": [one.data() for one in self.by_axis()],
            "notes": list(self.notes),
            "rows": [row.data() for row in self.rows],
            "judged": self.judged,
            "surprises": len(self.surprises),
            "rewritten": len(self.rewritten),
            "expected": None if self.expected is None else [str(one) for one in self.expected],
            "missing": [str(one) for one in self.missing],
            "buffers": [one.data() for one in self.buffers],
            "replicated": [one.data() for one in self.replicated],
        }

    def __str__(self) -> str:
        from meshwright.audits.text import plain_text

        return plain_text(self)

    def __repr__(self) -> str:
        """Its headline; print it for the tables."""
        from meshwright.audits.text import headline

        return f"Audit({headline(self)})"

    def _repr_html_(self) -> str:
        from meshwright.audits.text import notebook

        return notebook(self)

    def markdown(self) -> str:
        """The sums and the rows as Markdown tables."""
        from meshwright.audits.text import markdown

        return markdown(self)
