"""Expected collectives of a program, and the rows that match them.

    expected_of({"fsdp": ["all-gather", "reduce-scatter"], "tp": ["all-reduce"]})

A row is planned if a Collective has its operation and exactly its axes, and its phase if one is
given. Small rows are planned too, as bookkeeping (the count of tokens, the norm of a gradient, the
weights of a norm); but only over axes with an expected collective, and only while the total bytes
of one operation over the same axes are small. One with `rewrite_of` is what a compiler may make
of another collective: a row that only it matches is marked as rewritten. All other rows are
surprises.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from meshwright.audits.collective import OPERATIONS, Collective, SentCollective
from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.present import bytes_text

BOOKKEEPING = 64 * 1024  # bytes per run, over all executions


def expected_of(
    mapping: Mapping[Any, Sequence[str]], axes: Iterable[str] | None = None
) -> tuple[Collective, ...]:
    """From axes to operations: `{"fsdp": ["all-gather"], ("fsdp", "sp"): ["reduce-scatter"]}`.

    Several axes may also be one text, `"fsdp,sp"` or `"fsdp+sp"`. `"reduce-scatter/all-reduce"` is
    a reduce-scatter that a compiler may rewrite as an all-reduce.
    With `axes`, those of the mesh, a name that is not one of them is a mistake.
    """
    known = None if axes is None else list(axes)
    found = []
    for text, operations in mapping.items():
        names = _axes(text)
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
        if not isinstance(operations, Iterable) or not all(
            isinstance(said, str) for said in operations
        ):
            raise MeshwrightError(
                f"expected collectives over {text!r}: {operations!r} is not a list of operations; "
                'write ["all-gather", "reduce-scatter"]'
            )
        for said in operations:
            operation, _, instead = said.partition("/")
            found.append(Collective(operation, names))
            if "/" in said:
                found.append(Collective(instead, names, rewrite_of=str(found[-1])))
    return tuple(found)


def _axes(key: object) -> tuple[str, ...]:
    """The axes that a key names: `"fsdp,sp"`, `"fsdp+sp"` or `("fsdp", "sp")`."""
    if isinstance(key, str):
        return tuple(name.strip() for name in key.replace("+", ",").split(","))
    names = key if isinstance(key, tuple) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise MeshwrightError(
            f"expected collectives over {key!r}: keys are axes of the mesh, 'fsdp' or "
            "('fsdp', 'sp')"
        )
    operations = [name for name in names if name in OPERATIONS]
    if operations:
        axes = ",".join(name for name in names if name not in OPERATIONS) or "fsdp"
        raise MeshwrightError(
            f"expected collectives over {key!r}: keys are axes, values operations; write "
            f"{{{axes!r}: {operations}}}"
        )
    return names


def judged(
    rows: Iterable[SentCollective], expected: Sequence[Collective], bookkeeping: int = BOOKKEEPING
) -> tuple[SentCollective, ...]:
    """The rows, each planned or a surprise, and why."""
    rows = tuple(rows)
    small = _small(rows, expected, bookkeeping)
    return tuple(_judge(row, expected, i in small) for i, row in enumerate(rows))


def _small(
    rows: Sequence[SentCollective], expected: Sequence[Collective], bookkeeping: int
) -> set[int]:
    """The indices of rows that are bookkeeping.

    For each operation over the same axes: the smallest rows, as long as their bytes times
    executions are at most `bookkeeping` in total.
    """
    used = {axis for one in expected for axis in one.axes}
    left: dict[tuple[str, tuple[str, ...], bool], int] = {}
    found = set()
    for i in sorted(range(len(rows)), key=lambda i: rows[i].bytes * rows[i].times):
        row = rows[i]
        planned = any(one.matches(row) for one in expected if not one.rewrite_of)
        if planned or not set(row.axes) <= used:
            continue
        kind = row.operation, row.axes, row.part_of_axes
        left[kind] = left.get(kind, bookkeeping) - row.bytes * row.times
        if left[kind] >= 0:
            found.add(i)
    return found


def missing(
    rows: Sequence[SentCollective], expected: Sequence[Collective]
) -> tuple[Collective, ...]:
    """Expected collectives that the program does not have."""
    origins = [row.rewritten.partition(" over ") for row in rows if row.rewritten]
    rewritten = {(operation, frozenset(axes.split("+"))) for operation, _, axes in origins}
    return tuple(
        one for one in expected
        if not one.rewrite_of
        and (one.operation, frozenset(one.axes)) not in rewritten
        and not any(one.matches(row) for row in rows)
    )  # fmt: skip


def _judge(row: SentCollective, expected: Sequence[Collective], small: bool) -> SentCollective:
    matches = [one for one in expected if one.matches(row)]
    plain = next((one for one in matches if not one.rewrite_of), None)
    if plain is not None:
        return dataclasses.replace(row, planned=True, why=plain.what or "expected")
    if small:
        return dataclasses.replace(row, planned=True, why="bookkeeping")
    if matches:
        origin = min((one.rewrite_of for one in matches), key=lambda one: _unlike(row, one))
        return dataclasses.replace(row, planned=True, rewritten=origin, why=_instead(row, origin))
    return dataclasses.replace(row, planned=False, why=_wrong(row, expected))


def _unlike(row: SentCollective, origin: str) -> tuple[bool, bool]:
    """Sort key: how likely a row was rewritten from this, by its scope, else by its phase."""
    operation = origin.partition(" over ")[0]
    named = operation.replace("-", "_") in row.scope.rpartition("/")[2]
    return not named, (operation == "all-gather") != (row.phase == "forward")


def _instead(row: SentCollective, origin: str) -> str:
    """`all-reduce in place of reduce-scatter over fsdp, twice the bytes`."""
    over = "" if origin.endswith(f" over {row.over}") else f" over {row.over}"
    twice = row.operation == "all-reduce" and origin.startswith(("reduce-scatter", "all-gather"))
    return f"{row.operation}{over} in place of {origin}{', twice the bytes' if twice else ''}"


def _wrong(row: SentCollective, expected: Sequence[Collective]) -> str:
    """Why a row is a surprise, in words."""
    over = "+".join(row.axes)
    here = [one for one in expected if set(one.axes) == set(row.axes)]
    same = [one for one in here if one.operation == row.operation]
    kind = f"{'an' if row.operation.startswith('a') else 'a'} {row.operation} over {over}"
    if row.part_of_axes:
        return f"groups of {row.devices} devices are not all those along {over}"
    if row.operation == "all-reduce" and any(one.operation == "reduce-scatter" for one in here):
        return f"an all-reduce where a reduce-scatter over {over} does: twice the bytes"
    too_small = [one for one in same if one.phase in (None, row.phase) and one.bytes is not None]
    if too_small:
        most = max(too_small, key=lambda one: one.bytes or 0)
        return (
            f"{kind} is expected of {most.what or 'arrays'} of up to "
            f"{bytes_text(most.bytes or 0)}, this is {bytes_text(row.bytes)}"
        )
    if same:
        phases = " and ".join(dict.fromkeys(str(one.phase) for one in same if one.phase))
        return f"{kind} is expected {phases}, this is {row.phase}"
    if here:
        plain = [one for one in here if not one.rewrite_of] or here
        kinds = list(dict.fromkeys(one.operation for one in plain))
        return (
            f"over {over} only {' and '.join(kinds)} {'is' if len(kinds) == 1 else 'are'} expected"
        )
    return f"nothing is expected over {over}"
