"""Collectives: those that a program is planned or expected to have, and those that it sends."""

import dataclasses
import math
import re
from typing import Any, Literal

from meshwright.audits.program import array_bytes, source_line
from meshwright.errors import MeshwrightError, did_you_mean

Phase = Literal["forward", "backward", "optimizer"]
OPERATIONS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


Payload = Literal[
    "layer weights", "layer gradients", "table", "embedding gradient", "LM head gradient",
    "vector gradients", "q/k norm gradients", "activations", "key gradients", "other",
]  # fmt: skip
"""What is sent: what compilers do with it, and what hides it, depends on this.

A table is the embedding or the LM head, vectors are norms and biases; other are ids, scalars and
the optimizer's."""


# not frozen, which takes seven times as long: a search makes thousands, and nothing changes one
@dataclasses.dataclass(unsafe_hash=True)
class Collective:
    """One kind of collective that belongs to a program.

    `bytes`: as SentCollective.bytes; in a plan's formulas a number that prints itself. Of what is
    expected, the most that it may be, and None for any.
    """

    operation: str
    axes: tuple[str, ...]  # of the mesh; in its order, but of what is expected in any
    bytes: Any = None
    times: int = 1  # executions in a step
    phase: Phase | None = None  # None: any
    what: str = ""  # in words: "weights of a layer", "sums of a block's outputs"
    payload: Payload = "other"
    pieces: int = 1  # operations that send these bytes each time: a layer's matrices go one by one
    layers: int = 0  # of the stack it belongs to; 0: to none
    stack: str = ""  # its name, where a model has several
    piece_bytes: tuple[Any, ...] = ()  # of each piece, where a compiler may tell them apart
    rewrite_of: str = ""  # the collective that a compiler rewrites: "reduce-scatter over fsdp"
    link: str = ""  # what it goes over, in words: "ICI x+y, closed", "NVLink", "host network"
    seconds: float = 0.0  # all times together, if nothing hid it
    hidden: float = 0.0  # of those, the seconds that lie under compute

    def __post_init__(self) -> None:
        if self.operation not in OPERATIONS:
            raise MeshwrightError(
                f"expected operation {self.operation!r} is not a collective"
                f"{did_you_mean(self.operation, OPERATIONS)}"
            )

    @property
    def exposed(self) -> float:
        """Seconds that nothing hides."""
        return self.seconds - self.hidden

    def changed(self, **fields: Any) -> "Collective":
        other = object.__new__(Collective)  # a search makes tens of thousands
        other.__dict__.update(self.__dict__)
        other.__dict__.update(fields)
        return other

    def matches(self, row: "SentCollective") -> bool:
        """Whether what is sent is of this kind, and no larger."""
        operations = {row.operation}
        if row.collective_matmul:  # a ring of permutes, each overlapped with a part of the matmul
            operations |= {"all-gather", "reduce-scatter"}
        fits = self.bytes is None or row.bytes <= self.bytes
        same_axes = set(self.axes) == set(row.axes) and not row.part_of_axes
        return (
            self.operation in operations and same_axes and self.phase in (None, row.phase) and fits
        )

    def __str__(self) -> str:
        phase = f", {self.phase}" if self.phase else ""
        return f"{self.operation} over {'+'.join(self.axes)}{phase}"


def wire_bytes(operation: str, size: float, devices: int) -> float:
    """Bytes a device sends in one execution of a ring algorithm."""
    if operation == "collective-permute":
        return float(size)
    return size * (devices - 1) / devices * (2 if operation == "all-reduce" else 1)


@dataclasses.dataclass(frozen=True)
class SentCollective:
    """An array that a collective sends between devices.

    `bytes`: size of the full logical array in one execution (all-gather: output; reduce-scatter:
    input; all-reduce, all-to-all: the array; permute: what a device sends), not bytes on the wire.
    A combined operation has a row for each of its arrays.
    """

    operation: str
    axes: tuple[str, ...]  # of the mesh, in its order; see part_of_axes
    devices: int  # per group
    dtype: str
    shape: tuple[int, ...]  # of the result, on a device
    loops: tuple[int, ...] = ()  # trip counts of the loops around it, the outermost first
    scope: str = ""  # op_name: where in the program it comes from
    stack: tuple[str, ...] = ()  # "file.py:line", innermost first
    asynchronous: bool = False
    hidden_under: int = 0  # compute instructions between start and done
    hidden_bytes: int = 0  # their results
    unsure: bool = False  # in a loop with unknown trip count: counted once
    branch: str = ""  # of a conditional: "2 of 3"; of nested ones the outer first, "1 of 2, 2 of 2"
    counted: bool = True  # False: another branch sends more, and only that one counts
    collective_matmul: bool = (
        False  # a permute of a collective matmul, instead of an all-gather or reduce-scatter
    )
    name: str = ""  # of the instruction, in the program's text
    part_of_axes: bool = False  # its groups are not all the devices along its axes
    between_slices: bool = False  # over the network between TPU slices
    planned: bool = True
    rewritten: str = ""  # the collective that the compiler rewrote: "reduce-scatter over fsdp"
    why: str = ""  # the reason for `planned`

    @property
    def over(self) -> str:
        """Its axes in words: "fsdp+tp", "part of fsdp"."""
        return ("part of " if self.part_of_axes else "") + "+".join(self.axes)

    @property
    def times(self) -> int:
        """Executions in a run of the program."""
        return math.prod(self.loops)

    @property
    def bytes(self) -> int:
        size = array_bytes((self.dtype, self.shape))
        return size * self.devices if self.operation == "reduce-scatter" else size

    @property
    def wire_bytes(self) -> float:
        """Bytes a device sends in one execution of a ring algorithm."""
        return wire_bytes(self.operation, self.bytes, max(self.devices, 1))

    @property
    def phase(self) -> Phase:
        if re.search(r"(^|[/(])optimizer([/)]|$)", self.scope):
            return "optimizer"
        back = "transpose(" in self.scope or "rematted_computation" in self.scope
        return "backward" if back else "forward"

    @property
    def source(self) -> str:
        """The line of the user's program, as "file.py:12"; "" if the text has none."""
        return source_line(self.stack)

    def data(self) -> dict[str, Any]:
        """As plain JSON data."""
        derived = ("times", "bytes", "wire_bytes", "phase", "source")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in derived}
