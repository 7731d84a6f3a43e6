"""What a program is expected to send, and which of its rows are that.

    expected_of({"fsdp": ["all-gather", "reduce-scatter"], "tp": ["all-reduce"]})

A row is planned if an Expected has its operation and exactly its axes, and its phase where one is
given. What is small is planned too, as bookkeeping: the count of tokens, the norm of a gradient, a
norm's weights; but only over axes that something is expected on. All else is a surprise.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from meshwright.audit.collective import OPERATIONS, Collective, Phase
from meshwright.errors import MeshwrightError, did_you_mean

BOOKKEEPING = 64 * 1024  # bytes of an array up to which it is small


@dataclasses.dataclass(frozen=True)
class Expected:
    """A kind of collective that belongs to a program."""

    operation: str
    axes: tuple[str, ...]  # any order
    phase: Phase | None = None  # None: any
    what: str = ""  # in words: "weights of a layer"
    at_most: int | None = None  # bytes of an array; what is larger is something else

    def __post_init__(self) -> None:
        if self.operation not in OPERATIONS:
            raise MeshwrightError(
                f"expected operation {self.operation!r} is not a collective"
                f"{did_you_mean(self.operation, OPERATIONS)}"
            )

    def is_of(self, row: Collective) -> bool:
        """Whether a row is of this kind."""
        operations = {row.operation}
        if row.collective_matmul:  # goes around in turns, each beside a part of the product
            operations |= {"all-gather", "reduce-scatter"}
        phases = (None, row.phase)
        fits = self.at_most is None or row.bytes <= self.at_most
        same_axes = set(self.axes) == set(row.axes)
        return self.operation in operations and same_axes and self.phase in phases and fits

    def __str__(self) -> str:
        phase = f", {self.phase}" if self.phase else ""
        return f"{self.operation} over {'+'.join(self.axes)}{phase}"


def expected_of(
    mapping: Mapping[str, Sequence[str]], axes: Iterable[str] | None = None
) -> tuple[Expected, ...]:
    """From axes to operations: `{"fsdp": ["all-gather"], "fsdp,sp": ["reduce-scatter"]}`.

    With `axes`, those of the mesh, a name that is not one of them is a mistake.
    """
    known = None if axes is None else list(axes)
    found = []
    for text, operations in mapping.items():
        names = tuple(name.strip() for name in text.replace("+", ",").split(","))
        for name in names:
            if known is not None and name not in known:
                raise MeshwrightError(
                    f"expected collectives over {text!r}: the mesh has no axis {name!r}"
                    f"{did_you_mean(name, known)}"
                )
        if isinstance(operations, str):
            raise MeshwrightError(
                f"expected collectives over {text!r}: write a list, [{operations!r}]"
            )
        found += [Expected(operation, names) for operation in operations]
    return tuple(found)


def judged(
    rows: Iterable[Collective], expected: Sequence[Expected], bookkeeping: int = BOOKKEEPING
) -> tuple[Collective, ...]:
    """The rows, each planned or a surprise, and why."""
    used = {axis for one in expected for axis in one.axes}
    return tuple(_judge(row, expected, used, bookkeeping) for row in rows)


def missing(rows: Sequence[Collective], expected: Sequence[Expected]) -> tuple[Expected, ...]:
    """What was expected and is not there."""
    return tuple(one for one in expected if not any(one.is_of(row) for row in rows))


def _judge(
    row: Collective, expected: Sequence[Expected], used: set[str], bookkeeping: int
) -> Collective:
    match = next((one for one in expected if one.is_of(row)), None)
    if match is not None:
        return dataclasses.replace(row, planned=True, why=match.what or "expected")
    if row.bytes <= bookkeeping and set(row.axes) <= used:
        return dataclasses.replace(row, planned=True, why="bookkeeping")
    return dataclasses.replace(row, planned=False, why=_wrong(row, expected))


def _wrong(row: Collective, expected: Sequence[Expected]) -> str:
    """In words, what is not as expected."""
    over = "+".join(row.axes)
    here = [one for one in expected if set(one.axes) == set(row.axes)]
    too_large = [one for one in here if one.operation == row.operation and one.at_most]
    if row.operation == "all-reduce" and any(one.operation == "reduce-scatter" for one in here):
        return f"an all-reduce where a reduce-scatter over {over} does: twice the bytes"
    if too_large:
        return f"a {row.operation} over {over} is expected of {too_large[0].what} only"
    if any(one.operation == row.operation for one in here):
        phases = " and ".join(dict.fromkeys(str(one.phase) for one in here if one.phase))
        return f"a {row.operation} over {over} is expected {phases}, this is {row.phase}"
    if here:
        kinds = ", ".join(dict.fromkeys(one.operation for one in here))
        return f"over {over} only {kinds} is expected"
    return f"nothing is expected over {over}"
