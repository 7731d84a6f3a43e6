"""One row of an audit: a collective, with its mesh axes, bytes, executions and source."""

import dataclasses
import math
import re
from typing import Any, Literal

from meshwright.audits.program import array_bytes

Phase = Literal["forward", "backward", "optimizer"]
# functions of ours around the collectives of jax; the line that called them is the source
WRAPPER_FILES = (
    "meshwright/ops/collectives.py",
    "meshwright/ops/fp8.py",
    "meshwright/ops/attention/permute.py",
)
OPERATIONS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Collective:
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
        n = max(self.devices, 1)
        if self.operation == "collective-permute":
            return float(self.bytes)
        return self.bytes * (n - 1) / n * (2 if self.operation == "all-reduce" else 1)

    @property
    def phase(self) -> Phase:
        if re.search(r"(^|[/(])optimizer([/)]|$)", self.scope):
            return "optimizer"
        back = "transpose(" in self.scope or "rematted_computation" in self.scope
        return "backward" if back else "forward"

    @property
    def source(self) -> str:
        """The source line, as "file.py:12"; "" if the text has none; not that of a wrapper."""
        files = ((line, line.rpartition(":")[0]) for line in self.stack)
        lines = [line for line, file in files if not file.endswith(WRAPPER_FILES)]
        return next(iter(lines or self.stack), "")

    def data(self) -> dict[str, Any]:
        """As plain JSON data."""
        derived = ("times", "bytes", "wire_bytes", "phase", "source")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in derived}
