"""What a compiled program sends, read from its HLO text.

    for c in collectives(compiled.as_text(), mesh):
        print(c.operation, c.axes, c.shape, c.times, c.scope)

Groups of devices are turned into mesh axes through the mesh itself, so the spelling does not
matter: lists, `[4,2]<=[8]`, a transposed one, or axes named by the compiler or by the user.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

import numpy as np
from jax.sharding import Mesh

OPERATIONS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}  # fmt: skip
_IOTA = r"\[[\d,]+\](?:T\([\d,]+\))?"
_ARRAY = re.compile(rf"\b({'|'.join(BYTES)})\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(\S+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    operation: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]  # dtype and shape of each part of its result
    loops: tuple[int, ...]  # trip counts of the loops around it, the outermost first
    scope: str  # op_name: where in the program it comes from
    rest: str


@dataclasses.dataclass(frozen=True)
class Collective:
    operation: str
    axes: tuple[str, ...]  # of the mesh, in its order
    dtype: str
    shape: tuple[int, ...]  # of the result, on each device
    loops: tuple[int, ...]
    scope: str

    @property
    def times(self) -> int:
        return math.prod(self.loops)

    @property
    def bytes(self) -> int:
        """Of the result on each device, all rounds of the loops together."""
        return self.times * BYTES[self.dtype] * math.prod(self.shape)

    @property
    def backward(self) -> bool:
        return "transpose(" in self.scope

    @property
    def in_layers(self) -> bool:
        """Whether it belongs to a layer, in a loop or unrolled."""
        return bool(re.search(r"[/(](attention|mlp)[/)]", self.scope))


def instructions(text: str) -> list[Instruction]:
    """Every instruction that has a buffer: of the entry and of loops, not inside fusions."""
    computations, entry = _computations(text)

    def walk(name: str, loops: tuple[int, ...]) -> Iterator[Instruction]:
        for line in computations[name]:
            found = _INSTRUCTION.match(line)
            if found is None:
                continue
            label, result, operation, rest = found.groups()
            scope = re.search(r'op_name="([^"]*)"', rest)
            yield Instruction(
                label, operation, _arrays(result), loops, scope[1] if scope else "", rest
            )
            if operation == "while":
                trips = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', rest)
                assert trips, f"a loop without a trip count: {line}"
                yield from walk(_called(rest, "body"), (*loops, int(trips[1])))
            elif operation == "call":
                yield from walk(_called(rest, "to_apply"), loops)
            elif operation == "conditional":
                branches = re.search(r"branch_computations=\{([^}]*)\}", rest)
                names = branches[1].split(", ") if branches else []
                names += re.findall(r"(?:true|false)_computation=(\S+?)[,\s]", rest)
                for branch in names:
                    yield from walk(branch.lstrip("%"), loops)

    return list(walk(entry, ()))


def collectives(text: str, mesh: Mesh) -> list[Collective]:
    """Every array a program sends between devices; a combined operation gives one for each part."""
    found = []
    for one in instructions(text):
        kind = re.fullmatch(rf"({OPERATIONS})(-start)?", one.operation)
        if kind is None:
            continue
        arrays = one.arrays
        if kind[2] and kind[1] != "all-reduce":  # (what goes in, what comes out, ...)
            arrays = arrays[len(arrays) // 2 :][: max(len(arrays) // 2, 1)]
        groups = replica_groups(one.rest, mesh.size)
        axes = axes_between(groups, mesh)
        scopes = _scopes(one.scope, len(arrays))
        found += [
            Collective(kind[1], axes, dtype, shape, one.loops, scope)
            for (dtype, shape), scope in zip(arrays, scopes, strict=True)
        ]
    return found


def replica_groups(line: str, devices: int) -> list[list[int]]:
    """The groups of device numbers, from any of the spellings."""
    lists = re.search(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}", line)
    if lists:
        groups = re.findall(r"\{([\d,]+)\}", lists[1])
        return [list(_numbers(group)) for group in groups] or [list(range(devices))]
    iota = re.search(rf"replica_groups=(\[[\d,]+\])<=({_IOTA})", line)
    if iota:
        return _iota(iota[2]).reshape(_numbers(iota[1])).tolist()
    named = re.search(
        rf"replica_groups=mesh\[([^\]]*)\](?:, ?device_ids=\(({_IOTA}|[\d, ]+)\))? ?\{{([^}}]*)\}}",
        line,
    )
    assert named, f"replica groups in an unknown spelling: {line}"
    return _named(named[1], named[2], named[3], devices)


def _named(mesh: str, order: str | None, over: str, devices: int) -> list[list[int]]:
    """`'x'=2,'y'=4`, the devices in another order if one is given, and `'y'` or a part of it."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    ids = np.arange(devices) if order is None else _iota(order)
    # 'x':(2)4 is the 4 after the first 2 of x
    used = {
        name: (int(before or 1), int(size or sizes[name]))
        for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", over)
    }
    shape: list[int] = []
    moved: list[int] = []
    for name, size in sizes.items():
        before, middle = used.get(name, (size, 1))
        moved += [len(shape) + 1] if name in used else []
        shape += [before, middle, size // (before * middle)]
    kept = [dim for dim in range(len(shape)) if dim not in moved]
    width = math.prod(shape[dim] for dim in moved)
    return ids.reshape(shape).transpose(*kept, *moved).reshape(-1, width).tolist()


def axes_between(groups: list[list[int]], mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes along which the devices of a group differ."""
    # a program numbers its devices in the order of its mesh
    grid = np.arange(mesh.size).reshape(mesh.devices.shape)
    differ = set()
    for group in groups:
        places = np.array([np.argwhere(grid == number)[0] for number in group])
        differ |= {i for i in range(grid.ndim) if len(set(places[:, i])) > 1}
    return tuple(name for i, name in enumerate(mesh.axis_names) if i in differ)


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    found: dict[str, list[str]] = {}
    entry = ""
    lines: list[str] = []
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            lines = found.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        else:
            lines.append(line)
    return found, entry


def _called(rest: str, which: str) -> str:
    found = re.search(rf"{which}=%?([\w.-]+)", rest)
    assert found, rest
    return found[1]


def _arrays(result: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((dtype, _numbers(shape)) for dtype, shape in _ARRAY.findall(result))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text))


def _iota(text: str) -> np.ndarray:
    """`[4,2]T(1,0)`: numbers in order in that shape, transposed, flat; or a plain list of them."""
    if not text.startswith("["):
        return np.array(_numbers(text))
    shape, _, order = text.partition("T")
    ids = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return (ids.transpose(_numbers(order)) if order else ids).reshape(-1)


def _scopes(scope: str, parts: int) -> list[str]:
    """`a/(b:c)` of a combined operation: `a/b` and `a/c`."""
    start = scope.find("/(") + 1
    if not (start and scope.endswith(")") and ":" in scope[start:]):
        return [scope] * parts
    names = scope[start + 1 : -1].split(":")
    return [scope[:start] + name for name in names] if len(names) == parts else [scope] * parts
