"""Every collective of a program, from its text.

    for c in collectives(compiled.as_text(), mesh):
        print(c.operation, c.axes, c.bytes, c.times, c.scope)

Compilers rewrite collectives; this reads what runs. Loops multiply by their trip counts. A start
and its done are one row, and so is a collective that a TPU program prints in several fusions. A
fusion of an all-reduce and the slice that a device keeps is a reduce-scatter. Every branch of a
conditional is listed, and the one that sends most counts.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.audits.collective import OPERATIONS, SentCollective
from meshwright.audits.groups import axes_between, part_of_axes, replica_groups
from meshwright.audits.loops import trip_count
from meshwright.audits.program import Array, Instruction, Program, array_bytes, read_program
from meshwright.audits.sizes import axis_sizes

_KIND = re.compile(rf"({'|'.join(OPERATIONS)}|ragged-all-to-all)(-start)?")
_COMPUTE = {"fusion", "dot", "convolution", "custom-call", "while", "conditional", "call"}
_NO_COMPUTE = re.compile(r'custom_call_target="(AllocateBuffer|Assume\w+|\w*Bitpacked|Sharding)"')
_CALLS = ("calls", "to_apply", "called_computation", "async_execution_thread_computation")


def collectives(text: str | Program, mesh: Any) -> list[SentCollective]:
    """Every array a program sends between devices, in the order of the program.

    `mesh` is the one the program was compiled for, its text, or its axis sizes.
    """
    program = read_program(text) if isinstance(text, str) else text
    reader = _Reader(program, axis_sizes(mesh))
    return _with_first_hops(list(reader.walk(program.entry, _Place())))


def sends_anything(program: Program) -> bool:
    """Whether there is a collective in it, over whatever axes."""
    return _Reader(program, {}).sends(program.entry)


def _with_first_hops(rows: list[SentCollective]) -> list[SentCollective]:
    """Permutes before and after the loop of a collective matmul belong to it too."""

    def kind(row: SentCollective, loops: tuple[int, ...]) -> tuple[Any, ...]:
        return row.operation, row.axes, row.dtype, math.prod(row.shape), row.scope, loops

    inside = {kind(row, row.loops[:-1]) for row in rows if row.collective_matmul}
    return [
        dataclasses.replace(row, collective_matmul=True) if kind(row, row.loops) in inside else row
        for row in rows
    ]


@dataclasses.dataclass(frozen=True)
class _Place:
    loops: tuple[int, ...] = ()
    unsure: bool = False
    branch: str = ""
    computation: str = ""
    scope: str = ""  # of the loop around
    stack: tuple[str, ...] = ()


class _Reader:
    """A program on a mesh, and which of its computations send anything."""

    def __init__(self, program: Program, shape: Mapping[str, int]) -> None:
        self.program = program
        # a program of several TPU slices is that of one, and numbers the devices of one
        everywhere = math.prod(shape.values())
        slices = everywhere // program.devices if program.devices else 1
        self.shape, self.slices = _split_slices(shape, max(slices, 1))
        self.size = math.prod(self.shape.values())
        self.sending: dict[str, bool] = {}

    def sends(self, name: str | None) -> bool:
        """Whether a computation, or one it calls, holds a collective."""
        if name is None or name not in self.program.computations:
            return False
        if name not in self.sending:
            self.sending[name] = False  # a computation cannot call itself
            self.sending[name] = any(
                _KIND.fullmatch(one.operation)
                or _across_slices(one)
                or any(map(self.sends, (*map(one.called, (*_CALLS, "body")), *one.branches)))
                for one in self.program.computations[name]
            )
        return self.sending[name]

    def walk(self, name: str, place: _Place) -> Iterator[SentCollective]:
        """The collectives of a computation and of those it runs."""
        place = dataclasses.replace(place, computation=name)
        body = self.program.computations.get(name, ())
        chains: set[str] = set()
        for position, one in enumerate(body):
            if _KIND.fullmatch(one.operation):
                yield from self.rows(one, place, body, position)
            elif _across_slices(one):
                yield from self.across_slices(one, place, body, position)
            elif one.operation == "while" and self.sends(one.called("body")):
                trips = trip_count(self.program, name, one)
                inside = dataclasses.replace(
                    place,
                    loops=(*place.loops, trips or 1),
                    unsure=place.unsure or trips is None,
                    scope=one.scope or place.scope,
                    stack=self.program.stack(one) or place.stack,
                )
                if trips != 0:
                    yield from self.walk(one.called("body") or "", inside)
            elif one.operation == "conditional":
                yield from self.branches(one, place)
            elif one.operation == "fusion":
                yield from self.fused(one, place, body, position, chains)
            else:
                for called in map(one.called, _CALLS):
                    if called is not None and self.sends(called):
                        for row in self.walk(called, place):
                            row = self.named(row, one, body)
                            started = one.operation in ("async-start", "call-start")
                            yield self.started(row, body, position) if started else row

    def branches(self, one: Instruction, place: _Place) -> Iterator[SentCollective]:
        """The collectives of every branch of a conditional; those of one that sends most count."""
        number = len(one.branches)
        ways = []
        for i, branch in enumerate(one.branches, 1):
            which = ", ".join(filter(None, (place.branch, f"{i} of {number}")))
            ways.append(list(self.walk(branch, dataclasses.replace(place, branch=which))))
        sent = [sum(row.wire_bytes * row.times for row in rows if row.counted) for rows in ways]
        most = max(range(number), key=lambda i: sent[i], default=0)
        for i, rows in enumerate(ways):
            for row in rows:
                yield row if i == most else dataclasses.replace(row, counted=False)

    def fused(
        self, one: Instruction, place: _Place, body: tuple[Instruction, ...], position: int,
        chains: set[str],
    ) -> Iterator[SentCollective]:  # fmt: skip
        """The collective of a fusion: a reduce-scatter, or a part of a spread collective."""
        name = one.called("calls")
        if not self.sends(name):
            return
        inside = self.program.computations[name or ""]
        for i, inner in enumerate(inside):
            kind = _KIND.fullmatch(inner.operation)
            if kind is None:
                if inner.operation == "fusion":
                    yield from self.fused(inner, place, inside, i, chains)
                continue
            chain = re.search(r'\bchain_id="?(\w+)', inner.rest)
            if chain:
                if chain[1] in chains:
                    continue
                chains.add(chain[1])
            for part, row in enumerate(self.rows(inner, place, inside, i)):
                if kind[1] == "all-reduce":
                    kept = _slice_of(inner, part, inside)
                    if kept is not None:
                        shape = kept.arrays[0][1]
                        row = dataclasses.replace(row, operation="reduce-scatter", shape=shape)
                row = self.named(row, one, body)
                if chain:
                    done = self.end_of_chain(body, position, chain[1])
                    row = _hidden(row, body[position + 1 : done])
                yield row

    def end_of_chain(self, body: tuple[Instruction, ...], position: int, chain: str) -> int:
        """The index of the last fusion of a spread collective."""
        last = position
        for i in range(position + 1, len(body)):
            called = body[i].called("calls") if body[i].operation == "fusion" else None
            if called is not None and any(
                re.search(rf'\bchain_id="?{chain}\b', inner.rest)
                for inner in self.program.computations.get(called, ())
            ):
                last = i
        return last

    def started(
        self, row: SentCollective, body: tuple[Instruction, ...], position: int
    ) -> SentCollective:
        """A row whose operation begins here and ends at its done."""
        start = body[position]
        if re.search(r'"is_sync":\s*true', start.rest):
            return row
        names = {start.name}
        for i in range(position + 1, len(body)):
            if names & set(body[i].operands[:1]):
                if body[i].operation.endswith("-done"):
                    return _hidden(row, body[position + 1 : i])
                if body[i].operation.endswith("-update"):
                    names.add(body[i].name)
        return dataclasses.replace(row, asynchronous=True)

    def rows(
        self, one: Instruction, place: _Place, body: tuple[Instruction, ...], position: int
    ) -> Iterator[SentCollective]:
        """One for each array of a collective; none if every device keeps its own."""
        kind = _KIND.fullmatch(one.operation)
        assert kind is not None
        groups = replica_groups(one.rest, self.size)
        axes = axes_between(groups, self.shape)
        if not axes:
            return
        operation = "all-to-all" if kind[1] == "ragged-all-to-all" else kind[1]
        devices = max(map(len, groups))
        part = operation != "collective-permute" and part_of_axes(groups, self.shape)
        if operation == "collective-permute":
            devices = 2
        arrays = _received(one, operation, started=kind[2] is not None)
        if kind[1] == "ragged-all-to-all":
            arrays = _sent_rows(one, body)
        if operation == "all-to-all" and len(arrays) == devices and len(set(arrays)) == 1:
            arrays = ((arrays[0][0], (devices, *arrays[0][1])),)  # one array, given in parts
        scopes = _scopes(one.scope, len(arrays))
        for i, ((dtype, shape), scope) in enumerate(zip(arrays, scopes, strict=True)):
            stack = self.program.stack(one)
            if not scope or not stack:
                found = self.origin(one, i, body)
                scope, stack = scope or found[0] or place.scope, stack or found[1] or place.stack
            row = SentCollective(
                operation, axes, devices, dtype, shape, place.loops, scope, stack,
                unsure=place.unsure, branch=place.branch,
                collective_matmul=operation == "collective-permute"
                and "windowed_dot_general" in place.computation + scope + one.name,
                name=one.name, part_of_axes=part,
            )  # fmt: skip
            yield self.started(row, body, position) if kind[2] else row

    def named(
        self, row: SentCollective, around: Instruction, body: tuple[Instruction, ...]
    ) -> SentCollective:
        """The row with the scope and stack of what is around it, where it has none."""
        if row.scope and row.stack:
            return row
        scope, stack = around.scope, self.program.stack(around)
        if not scope:
            scope, stack = self.origin(around, 0, body)
        return dataclasses.replace(row, scope=row.scope or scope, stack=row.stack or stack)

    def origin(
        self, one: Instruction, part: int, body: tuple[Instruction, ...]
    ) -> tuple[str, tuple[str, ...]]:
        """Scope and stack of what made an operand: some collectives have none of their own.

        Where that has no line of source (an argument has none), those of what uses the result.
        """
        by_name = {other.name: other for other in body}
        number = part if part < len(one.operands) else 0
        maker = by_name.get(one.operands[number]) if one.operands else None
        scope = ""
        for _ in range(8):
            if maker is None:
                break
            if self.program.stack(maker):
                return scope or maker.scope, self.program.stack(maker)
            scope = scope or maker.scope
            maker = by_name.get(maker.operands[0]) if maker.operands else None
        names = {one.name}
        for other in body[body.index(one) + 1 :] if one in body else ():
            if names & set(other.operands):
                if self.program.stack(other):
                    return other.scope or scope, self.program.stack(other)
                names.add(other.name)
        return scope, ()

    def across_slices(
        self, one: Instruction, place: _Place, body: tuple[Instruction, ...], position: int
    ) -> Iterator[SentCollective]:
        """Collectives between TPU slices: host transfers, which name no devices."""
        said = re.search(r'_xla_megascale_transfer_type="?([\w-]+)', one.rest)
        name = (said[1] if said else "").lower().replace("_", "-")
        operation = next((known for known in OPERATIONS if known in name), "collective-permute")
        scope, stack = one.scope, self.program.stack(one)
        if not scope:
            scope, stack = self.origin(one, 0, body)
            scope, stack = scope or place.scope, stack or place.stack
        # of the result: an all-gather's is larger than what is sent, a reduce-scatter's smaller
        receivers = _receivers(body, position)
        for dtype, shape in (receivers[0] if receivers else one).arrays[:1]:
            row = SentCollective(
                operation, tuple(self.slices), math.prod(self.slices.values()), dtype, shape,
                place.loops, scope, stack,
                asynchronous=True, unsure=place.unsure, branch=place.branch,
                between_slices=True,
            )  # fmt: skip
            yield _hidden(row, body[position + 1 : _received_at(body, position)])


def _across_slices(one: Instruction) -> bool:
    return one.operation == "send" and "_xla_megascale_transfer_type" in one.rest


def _received_at(body: tuple[Instruction, ...], position: int) -> int:
    """Where what a send asks for has come: the recv-done of the same rendezvous."""
    names = {one.name for one in _receivers(body, position)}
    for i, one in enumerate(body):
        if one.operation == "recv-done" and names & set(one.operands):
            return i
    return position + 1


def _receivers(body: tuple[Instruction, ...], position: int) -> list[Instruction]:
    """What receives what a send asks for: the recv of the same rendezvous."""
    meeting = re.search(r'_rendezvous="?([^",}]+)', body[position].rest)
    if meeting is None:
        return []
    same = f'_rendezvous="{meeting[1]}"'
    return [one for one in body if one.operation == "recv" and same in one.rest]


def _split_slices(shape: Mapping[str, int], slices: int) -> tuple[dict[str, int], dict[str, int]]:
    """The axis sizes in one slice, and those across slices, which are outermost in a mesh."""
    inside, across = {}, {}
    for axis, size in shape.items():
        apart = math.gcd(size, slices)
        slices //= apart
        inside[axis] = size // apart
        if apart > 1:
            across[axis] = apart
    return inside, across


def _hidden(row: SentCollective, between: tuple[Instruction, ...]) -> SentCollective:
    """The row with the compute that overlaps it."""
    work = [
        one for one in between if one.operation in _COMPUTE and not _NO_COMPUTE.search(one.rest)
    ]
    return dataclasses.replace(
        row, asynchronous=True, hidden_under=len(work), hidden_bytes=sum(one.bytes for one in work)
    )


def _sent_rows(one: Instruction, body: tuple[Instruction, ...]) -> tuple[Array, ...]:
    """The array of a ragged all-to-all: what goes in or what comes out, which has room for more."""
    started = len(one.arrays) > 1  # its result has the operands first
    sources = [other.arrays for other in body if other.name in one.operands[:1]]
    sent = one.arrays[:1] if started else next(iter(sources), one.arrays)
    return min(sent, one.arrays[-1:], key=lambda arrays: sum(map(array_bytes, arrays)))


def _received(one: Instruction, operation: str, started: bool) -> tuple[Array, ...]:
    """The arrays that come out. A start gives what goes in, what comes out, then counters."""
    count = max(len(one.operands), 1)
    if started and operation != "all-reduce" and len(one.arrays) >= 2 * count:
        return one.arrays[count : 2 * count]
    return one.arrays[:count]


def _slice_of(one: Instruction, part: int, inside: tuple[Instruction, ...]) -> Instruction | None:
    """The dynamic-slice that a device keeps of a part of an all-reduce."""
    names = {one.name} if len(one.arrays) == 1 else set()
    for other in inside:
        if not set(other.operands[:1]) & {one.name, *names}:
            continue
        if other.operation == "get-tuple-element":
            if re.search(rf"\bindex={part}\b", other.rest):
                names.add(other.name)
        elif other.operation in ("bitcast", "copy", "reshape"):
            names.add(other.name)
        elif other.operation == "dynamic-slice" and other.operands[0] in names:
            return other
    return None


def _scopes(scope: str, parts: int) -> list[str]:
    """`a/(b:c)` of a combined operation: `a/b` and `a/c`."""
    start = scope.find("/(") + 1
    if not (start and scope.endswith(")") and ":" in scope[start:]):
        return [scope] * parts
    names = scope[start + 1 : -1].split(":")
    return [scope[:start] + name for name in names] if len(names) == parts else [scope] * parts
