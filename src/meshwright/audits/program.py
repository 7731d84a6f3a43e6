"""Parse the text of a compiled program into computations and instructions.

    program = read_program(compiled.as_text())
    program.computations[program.entry]

It is the text that XLA prints for CPUs, GPUs and TPUs. Metadata may span lines (that of Pallas
kernels does), types may nest, and names may have a `%` or not.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from meshwright.errors import MeshwrightError

Array = tuple[str, tuple[int, ...]]  # dtype and shape

BITS = {"pred": 8, "token": 0, "opaque": 0}  # others say theirs: bf16, s4, f8e4m3fn
_ARRAY = re.compile(r"\b(pred|bf16|[fsuc]\d+(?:e\d+m\d+\w*)?)\[([\d,<=]*)\]")
_INSTRUCTION = re.compile(
    r"^\s+(ROOT )?%?([^\s=]+) = (\(.*?\)|\S+) ([a-z][\w-]*)\((.*)$", re.DOTALL
)
_HEADER = re.compile(r"^(ENTRY )?%?([^\s=({]+) ?(?:\(.*)?\{$")
_END = re.compile(r"^\}( *$|, execution_thread=| //)")
_START = re.compile(r"^\s+(ROOT )?%?[^\s=]+ = ")
_SCOPE = re.compile(r'op_name="([^"]*)"')
# functions of ours around the collectives of jax; the line that called them is the source
WRAPPER_FILES = (
    "meshwright/ops/collectives.py",
    "meshwright/ops/fp8.py",
    "meshwright/ops/attention/permute.py",
)
# installed packages, but for this one, and Python's own library
_LIBRARIES = re.compile(
    r"/(site|dist)-packages/(?!meshwright/)|/lib/python3\.\d+/(?!site-packages/|dist-packages/)"
)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line: `name = result operation(operands), attributes`."""

    name: str
    operation: str
    arrays: tuple[Array, ...]  # of its result: one, or the parts of a tuple
    operands: tuple[str, ...]
    rest: str  # everything after the operands
    scope: str  # op_name: where in the program it comes from
    root: bool = False
    loops: tuple[int, ...] = ()  # trip counts of the loops around it, the outermost first

    @property
    def bytes(self) -> int:
        return sum(map(array_bytes, self.arrays))

    def called(self, which: str) -> str | None:
        """The computation named by an attribute: `body`, `to_apply`, `calls`."""
        found = re.search(rf"\b{which}=%?([^\s,(){{}}]+)", self.rest)
        return found[1] if found else None

    @property
    def branches(self) -> list[str]:
        """The computations of a conditional."""
        listed = re.search(r"branch_computations=\{([^}]*)\}", self.rest)
        names = listed[1].split(",") if listed else []
        names += re.findall(r"(?:true|false)_computation=([^\s,]+)", self.rest)
        return [name.strip().lstrip("%") for name in names]


@dataclasses.dataclass(frozen=True)
class Program:
    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str
    stacks: Mapping[int, tuple[str, ...]]  # frames by number, each "file.py:line", innermost first
    devices: int | None = None  # it is written for, where it says so; of one slice if of several

    def stack(self, instruction: Instruction) -> tuple[str, ...]:
        """Where in the source an instruction comes from, innermost first; () if it is not said."""
        frame = re.search(r"\bstack_frame_id=(\d+)", instruction.rest)
        if frame and int(frame[1]) in self.stacks:
            return self.stacks[int(frame[1])]
        file = re.search(r'\bsource_file="([^"]*)"', instruction.rest)
        line = re.search(r"\bsource_line=(\d+)", instruction.rest)
        return (f"{file[1]}:{line[1] if line else '?'}",) if file else ()


def source_line(stack: Sequence[str]) -> str:
    """The innermost line of a stack outside libraries and wrappers; the innermost if all are."""
    files = ((line, line.rpartition(":")[0]) for line in stack)
    lines = [
        line
        for line, file in files
        if not file.endswith(WRAPPER_FILES) and not _LIBRARIES.search(file)
    ]
    return next(iter(lines or stack), "")


def dtype_bits(dtype: str) -> int:
    """Of one element: 16 for bf16, 4 for s4, 8 for f8e4m3fn."""
    if dtype in BITS:
        return BITS[dtype]
    width = re.match(r"[a-z]+(\d+)", dtype)
    return int(width[1]) if width else 0


def array_bytes(array: Array) -> int:
    dtype, shape = array
    return math.prod(shape) * dtype_bits(dtype) // 8


@functools.lru_cache(maxsize=4)
def read_program(text: str) -> Program:
    """The computations of a program's text; a MeshwrightError if it is none."""
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry = ""
    for name, is_entry, body in _bodies(text):
        computations[name] = tuple(filter(None, map(_instruction, body)))
        entry = name if is_entry else entry
    if not entry:
        raise MeshwrightError(
            "this is not the text of a compiled program: it has no ENTRY computation; give what "
            "compiled.as_text() returns, of jax.jit(f).lower(…).compile(), or a file of "
            "--xla_dump_to whose name ends in after_optimizations.txt"
        )
    parts, copies = (
        re.search(rf"^HloModule .*\b{name}=(\d+)", text)
        for name in ("num_partitions", "replica_count")
    )
    devices = int(parts[1] if parts else 1) * int(copies[1] if copies else 1)
    return Program(computations, entry, _stacks(text), devices if parts or copies else None)


def _bodies(text: str) -> Iterator[tuple[str, bool, list[str]]]:
    """Each computation's name, whether it is the entry, and its instructions, one string each."""
    header = None
    body: list[str] = []
    for line in text.splitlines():
        if header is None:
            header = _HEADER.match(line)
            body = []
        elif _END.match(line):
            yield header[2], bool(header[1]), body
            header = None
        elif _START.match(line) or not body:
            body.append(line)
        else:  # metadata with a line break in it
            body[-1] += "\n" + line


def _instruction(line: str) -> Instruction | None:
    found = _INSTRUCTION.match(line)
    if found is None:
        return None
    root, name, result, operation, rest = found.groups()
    inside, rest = _to_closing(rest)
    scope = _SCOPE.search(rest)
    as_written = operation in ("constant", "parameter")  # a value, a number
    return Instruction(
        name, operation, arrays_of(result), (inside,) if as_written else _names(inside), rest,
        scope[1].replace("\\'", "'") if scope else "", bool(root),
    )  # fmt: skip


def arrays_of(result: str) -> tuple[Array, ...]:
    """The arrays of a type: `(f32[2]{0}, bf16[])` has two."""
    return tuple((dtype, numbers(shape)) for dtype, shape in _ARRAY.findall(result))


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text))


def _to_closing(text: str) -> tuple[str, str]:
    """The text before and after the closing parenthesis."""
    depth = 1
    for found in re.finditer(r"[()]", text):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return text[: found.start()], text[found.end() :]
    return text, ""


def _names(operands: str) -> tuple[str, ...]:
    """`%a, f32[2]{0} %b` or `a, b`: the names."""
    marked = re.findall(r"%([^\s,()]+)", operands)
    if marked or not operands.strip():
        return tuple(marked)
    plain = re.sub(r"/\*.*?\*/", "", operands)
    return tuple(part.split()[-1] for part in plain.split(", ") if part.split())


def _stacks(text: str) -> dict[int, tuple[str, ...]]:
    """The tables at the head of a text: files, locations, and frames that name their callers."""
    tables = {
        name: dict(re.findall(r"^(\d+) (.*)$", body, re.MULTILINE))
        for name, body in re.findall(
            r"^(FileNames|FileLocations|StackFrames)\n((?:\d+ .*\n)+)", text, re.MULTILINE
        )
    }
    if len(tables) < 3:
        return {}

    def field(row: str, name: str) -> str:
        found = re.search(rf"\b{name}=(\d+)", row)
        return found[1] if found else ""

    frames = tables["StackFrames"]
    # no caller is number 0, and some versions print every caller's number plus one
    shift = 1 if field(frames.get("1", ""), "parent_frame_id") == "1" else 0
    stacks: dict[int, tuple[str, ...]] = {}
    for number, row in frames.items():
        location = tables["FileLocations"].get(field(row, "file_location_id"), "")
        file = tables["FileNames"].get(field(location, "file_name_id"), "?").strip('"')
        parent = int(field(row, "parent_frame_id") or 0) - shift
        callers = stacks.get(parent, ()) if parent < int(number) else ()
        stacks[int(number)] = (f"{file}:{field(location, 'line') or '?'}", *callers)
    return stacks
