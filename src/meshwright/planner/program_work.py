"""What a partitioned program computes, reads and holds: folds over the text of any jax program.

XLA's partitioner decides what every device computes and sends; a machine's compiler then fuses and
schedules that. Here its fusions are assumed: what is elementwise is computed where it is read,
unless a matmul, a collective or a loop reads it, or several do and it reads more than one array.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping

from meshwright.audits import OPERATIONS as COLLECTIVES
from meshwright.audits import Instruction, Program, array_bytes, trip_count

Key = tuple[str, int]  # an instruction, and which array of its result

# the same bytes under another name, or in another order, which what reads them takes care of
_ALIASES = {"bitcast", "reshape", "copy", "transpose", "opt-barrier", "tuple"}
_FREE = {"constant", "broadcast", "iota", "partition-id", "replica-id", "after-all"}
_LOOPS = {"while", "call", "conditional"}
_MATMULS = {"dot", "convolution"}
# what reads an array of these as they are needs it in memory
_NEEDS_ARRAYS = {
    *COLLECTIVES, *_MATMULS, *_LOOPS, "custom-call", "sort", "gather", "tuple", "fft",
    "concatenate", "triangular-solve", "cholesky", "ragged-dot",
}  # fmt: skip
_OWN_ARRAY = (_NEEDS_ARRAYS - {"tuple"} - _LOOPS) | {
    "reduce", "scatter", "reduce-window", "rng-bit-generator", "select-and-scatter", "pad",
    "fusion", "dynamic-reshape",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Matmul:
    """A matmul of a device; `side` is the smallest of its three."""

    flops: float
    bytes: int
    side: int
    dtype: str
    times: int = 1


@dataclasses.dataclass(frozen=True)
class ProgramWork:
    """Of one device."""

    matmuls: tuple[Matmul, ...]
    elementwise_bytes: float  # read and written beside matmuls and collectives
    temporaries: int  # bytes at the fullest moment, beside arguments and outputs
    prefetched: frozenset[str]  # collectives that no matmul waits for, by name
    unsure: bool  # a loop does not say its trips, and is counted once
    unknown: frozenset[str]  # kernels whose work is not counted

    @property
    def flops(self) -> float:
        return sum(one.flops * one.times for one in self.matmuls)


def with_scatters(program: Program) -> Program:
    """All-reduces of which every reader takes this device's part as reduce-scatters.

    The compilers for TPUs and GPUs make them so.
    """
    changed = {}
    for name, body in program.computations.items():
        readers = _readers(body)
        parts: dict[str, Instruction] = {}
        for one in body:
            slices = readers[one.name]
            if one.operation == "all-reduce" and len(one.arrays) == 1 and slices:
                part = slices[0]
                alike = all(
                    each.operation == "dynamic-slice"
                    and each.operands[0] == one.name
                    and each.arrays == part.arrays
                    for each in slices
                )
                if alike and part.bytes < one.bytes:
                    parts[one.name] = part
        changed[name] = tuple(
            dataclasses.replace(one, operation="reduce-scatter", arrays=parts[one.name].arrays)
            if one.name in parts
            else dataclasses.replace(one, operation="bitcast", operands=one.operands[:1])
            if one.operation == "dynamic-slice" and one.operands[0] in parts
            else one
            for one in body
        )
    return dataclasses.replace(program, computations=changed)


def program_work(program: Program) -> ProgramWork:
    """The work and the memory of a partitioned program."""
    return _Fold(program).work(program.entry)


def _readers(body: Iterable[Instruction]) -> dict[str, list[Instruction]]:
    """By name, the instructions that read it."""
    found: dict[str, list[Instruction]] = {one.name: [] for one in body}
    for one in body:
        for name in dict.fromkeys(one.operands) if one.operation != "constant" else ():
            if name in found:
                found[name].append(one)
    return found


class _Fold:
    """Computations of a program, each folded once."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.done: dict[str, ProgramWork] = {}

    def work(self, name: str | None, loop: bool = False) -> ProgramWork:
        if name is None or name not in self.program.computations:
            return ProgramWork((), 0.0, 0, frozenset(), False, frozenset())
        if name not in self.done:
            body = _Body(self.program, name)
            inner = {
                one.name: self.inside(name, one) for one in body.all if one.operation in _LOOPS
            }
            matmuls = [body.matmul(one) for one in body.all if one.operation in _MATMULS]
            unknown = {target for one in body.all if (target := _kernel(one))}
            for work in inner.values():
                matmuls += work.matmuls
                unknown |= work.unknown
            self.done[name] = ProgramWork(
                tuple(matmuls),
                body.elementwise_bytes() + sum(one.elementwise_bytes for one in inner.values()),
                body.peak({key: work.temporaries for key, work in inner.items()}, loop),
                frozenset(body.prefetched()).union(*(one.prefetched for one in inner.values())),
                any(one.unsure for one in inner.values()),
                frozenset(unknown),
            )
        return self.done[name]

    def inside(self, name: str, one: Instruction) -> ProgramWork:
        """Of a loop all its trips, of a conditional the branch that computes most."""
        if one.operation == "call":
            return self.work(one.called("to_apply"))
        if one.operation == "conditional":
            ways = [self.work(branch) for branch in one.branches] or [self.work(None)]
            return max(ways, key=lambda way: (way.flops, way.elementwise_bytes))
        trips = trip_count(self.program, name, one)
        body = self.work(one.called("body"), loop=True)
        times = 1 if trips is None else trips
        return dataclasses.replace(
            body,
            matmuls=tuple(
                dataclasses.replace(each, times=each.times * times) for each in body.matmuls
            ),
            elementwise_bytes=body.elementwise_bytes * times,
            unsure=body.unsure or trips is None,
        )


def _kernel(one: Instruction) -> str:
    """The name of a kernel whose work its text does not say."""
    target = re.search(r'custom_call_target="([^"]+)"', one.rest)
    if one.operation != "custom-call" or target is None:
        return ""
    known = ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "annotate_device")
    return "" if target[1].startswith(known) else target[1]


class _Body:
    """One computation: which arrays it has in memory, and from when to when."""

    def __init__(self, program: Program, name: str) -> None:
        self.program = program
        self.all = program.computations[name]
        self.by_name = {one.name: one for one in self.all}
        self.position = {one.name: i for i, one in enumerate(self.all)}
        self.readers = _readers(self.all)
        self.root = next((one for one in self.all if one.root), self.all[-1])
        self.found: dict[str, frozenset[Key]] = {}
        for one in self.all:  # in order: what one stands for is known before it is asked
            self.found[one.name] = self._arrays(one)

    def arrays(self, name: str) -> frozenset[Key]:
        """The arrays in memory that must be there to read a value."""
        return self.found.get(name, frozenset())

    def _below(self, one: Instruction) -> frozenset[Key]:
        return frozenset().union(*map(self.arrays, one.operands))

    def _arrays(self, one: Instruction) -> frozenset[Key]:
        own = frozenset([(one.name, 0)])
        if one.operation == "parameter":
            return frozenset((one.name, i) for i in range(len(one.arrays)))
        if one.operation in _LOOPS:
            return frozenset((one.name, i) for i in range(len(one.arrays)))
        if one.operation in _FREE:
            return frozenset()
        if one.operation == "get-tuple-element":
            return self._part(one)
        if one.operation in _ALIASES or (one.operation == "custom-call" and not _kernel(one)):
            return self._below(one)
        if one.operation == "dynamic-update-slice":  # in place
            return self.arrays(one.operands[0]) or own
        if one.operation in _OWN_ARRAY:
            return own
        below, readers = self._below(one), self.readers[one.name]
        fused = bool(readers) and not any(self._needs(reader, one) for reader in readers)
        return below if fused and (len(readers) == 1 or len(below) <= 1) else own

    def _needs(self, reader: Instruction, one: Instruction) -> bool:
        """Whether a reader reads an array that lies in memory."""
        if reader.operation in _ALIASES - {"tuple"}:
            return any(self._needs(each, reader) for each in self.readers[reader.name])
        written = reader.operation == "dynamic-update-slice" and reader.operands[0] == one.name
        return reader.operation in _NEEDS_ARRAYS or reader.root or written

    def _taken(self, one: Instruction) -> tuple[Instruction, int]:
        """What a get-tuple-element takes its part from, past barriers, and which part."""
        source = self.by_name[one.operands[0]]
        while source.operation == "opt-barrier":
            source = self.by_name[source.operands[0]]
        return source, int(re.findall(r"\bindex=(\d+)", one.rest)[0])

    def _part(self, one: Instruction) -> frozenset[Key]:
        source, index = self._taken(one)
        if source.operation == "tuple":
            return self.arrays(source.operands[index])
        if source.operation in ("parameter", *_LOOPS):
            return frozenset([(source.name, index)])
        return self.arrays(source.name)

    def bytes(self, key: Key) -> int:
        one = self.by_name[key[0]]
        if one.operation in ("parameter", *_LOOPS):
            return array_bytes(one.arrays[key[1]])
        return one.bytes

    # ---- work

    def matmul(self, one: Instruction) -> Matmul:
        left, right = (self.by_name[name].arrays[0] for name in one.operands[:2])
        out = math.prod(one.arrays[0][1])
        if one.operation == "convolution":
            labels = re.findall(r"dim_labels=\w+_(\w+)->", one.rest)
            outputs = right[1][labels[0].index("o")] if labels else 1
            inner = math.prod(right[1]) // max(outputs, 1)
            sides = (out // max(outputs, 1), outputs, inner)
        else:
            inner = math.prod(left[1][dim] for dim in _dims(one, "lhs_contracting_dims"))
            batch = math.prod(left[1][dim] for dim in _dims(one, "lhs_batch_dims"))
            height = math.prod(left[1]) // max(inner * batch, 1)
            sides = (height, out // max(height * batch, 1), inner)
        size = one.bytes + sum(array_bytes(array) for array in (left, right))
        smaller = min((left[0], right[0]), key=lambda dtype: array_bytes((dtype, (8,))))
        return Matmul(2.0 * out * inner, size, min(sides), smaller)

    def elementwise_bytes(self) -> float:
        """Of every array beside matmuls' and collectives': written once, and what it reads."""
        total = 0.0
        for one in self.all:
            updated = one.operation == "dynamic-update-slice"
            if updated and len(one.operands) > 1:
                total += 2 * self.by_name[one.operands[1]].bytes
            skipped = {*COLLECTIVES, *_MATMULS, *_LOOPS, "parameter"}
            if updated or one.operation in skipped or (one.name, 0) not in self.arrays(one.name):
                continue
            whole = sum(map(self.bytes, self._below(one)))
            # a slice reads what it keeps
            sliced = one.operation in ("dynamic-slice", "slice", "gather")
            total += one.bytes + (min(one.bytes, whole) if sliced else whole)
        return total

    def prefetched(self) -> list[str]:
        """Collectives that no matmul waits for.

        What is all-gathered is there before the first matmul: weights. Or what is summed is read by
        none after it, in this trip of a loop or the next: gradients.
        """
        given, early = self._unchanged(), dict[str, bool]()
        for one in self.all:
            if one.operation == "parameter":
                early[one.name] = len(one.arrays) == 1
            elif one.operation == "get-tuple-element":
                source, index = self._taken(one)
                if source.operation == "parameter":
                    early[one.name] = index in given or not one.arrays[0][1]  # or a counter
                else:
                    made = source.operands[index] if source.operation == "tuple" else source.name
                    early[one.name] = early[made]
            else:
                waits = one.operation in (*_MATMULS, *_LOOPS)
                operands = () if one.operation == "constant" else one.operands
                early[one.name] = not waits and all(early.get(name, True) for name in operands)
        late = self._unread(set())
        again = {  # parts of a loop's state that the next trip's matmuls read
            index
            for one in self.all
            if one.operation == "get-tuple-element" and not late[one.name]
            for source, index in [self._taken(one)]
            if source.operation == "parameter"
        }
        late = self._unread(again)
        return [
            one.name
            for one in self.all
            if one.operation in COLLECTIVES and (early[one.name] or late[one.name])
        ]

    def _unread(self, again: set[int]) -> dict[str, bool]:
        """By name, whether no matmul or loop reads it, or what is made of it."""
        found: dict[str, bool] = {}
        for one in reversed(self.all):
            found[one.name] = all(
                reader.operation not in (*_MATMULS, *_LOOPS)
                and (
                    not any(reader.operands[i] == one.name for i in again)
                    if reader is self.root
                    else found[reader.name]
                )
                for reader in self.readers[one.name]
            )
        return found

    def _unchanged(self) -> set[int]:
        """Of a loop's state, what the body hands on as it got it."""
        found = set()
        for i, name in enumerate(self.root.operands if self.root.operation == "tuple" else ()):
            one = self.by_name[name]
            while one.operation == "copy":
                one = self.by_name[one.operands[0]]
            if one.operation == "get-tuple-element":
                source, index = self._taken(one)
                if source.operation == "parameter" and index == i:
                    found.add(i)
        return found

    # ---- memory

    def peak(self, inner: Mapping[str, int], loop: bool) -> int:
        """Bytes of temporaries at the fullest moment, with those inside loops."""
        last = self._last_reads()
        carried, handed = self._carried(last)
        # results have their own place; a loop's next state, if it is elementwise, that of the last
        waits = (*_MATMULS, *_LOOPS, *COLLECTIVES, "custom-call")
        for key in self.arrays(self.root.name):
            if not loop or self.by_name[key[0]].operation not in waits:
                carried.add(key)
        size = {
            key: 0 if key in carried else self.bytes(key)
            for key in last
            if self.by_name[key[0]].operation != "parameter"
        }
        begins: dict[int, list[Key]] = {}
        ends: dict[int, list[Key]] = {}
        for key in size:
            begins.setdefault(self.position[key[0]], []).append(key)
            ends.setdefault(last[key], []).append(key)
        live = highest = 0
        for i, one in enumerate(self.all):
            new = begins.get(i, [])
            live += sum(size[key] for key in new)
            ending = [key for key in ends.get(i, []) if key not in new]
            shared = 0
            if one.operation == "while":  # a loop continues with the arrays that it was given
                shared = sum(size[key] for key in ending if key in handed)
            elif one.operation not in (*_MATMULS, "all-gather") and new and ending:
                shared = min(sum(size[key] for key in new), max(size[key] for key in ending))
            highest = max(highest, live - shared + inner.get(one.name, 0))
            live -= sum(size[key] for key in ends.get(i, []))
        return highest

    def _last_reads(self) -> dict[Key, int]:
        """The position at which each array is read for the last time."""
        last: dict[Key, int] = {}
        for i, one in enumerate(self.all):
            for key in self.arrays(one.name) | (
                self._below(one) if one is not self.root else set()
            ):
                last[key] = i
        for key in self.arrays(self.root.name):  # outputs, or a loop's next state
            last[key] = len(self.all)
        return last

    def _carried(self, last: dict[Key, int]) -> tuple[set[Key], set[Key]]:
        """Parts of loops' states that need no array of their own, and arrays that loops take over.

        A part that the body does not change is the array outside.
        """
        carried: set[Key] = set()
        handed: set[Key] = set()
        for one in self.all:
            if one.operation != "while" or not one.operands:
                continue
            state = self.by_name[one.operands[0]]
            unchanged = _Body(self.program, one.called("body") or "")._unchanged()
            for i in range(len(one.arrays)):
                given = self.arrays(state.operands[i]) if state.operation == "tuple" else set()
                if i in unchanged:
                    carried.add((one.name, i))
                    for key in given:
                        last[key] = max(last[key], last.get((one.name, i), 0))
                elif len(given) == 1:
                    handed |= given
        return carried, handed


def _dims(one: Instruction, which: str) -> list[int]:
    found = re.findall(rf"\b{which}=\{{([\d,]*)\}}", one.rest)
    return [int(dim) for dim in found[0].split(",") if dim] if found else []
