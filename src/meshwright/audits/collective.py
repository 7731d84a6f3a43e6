"""One row of an audit: what a program sends between devices, where and how often."""

import dataclasses
import math
import re
from typing import Any, Literal

from meshwright.audits.program import array_bytes

Phase = Literal["forward", "backward", "optimizer"]
_EXCHANGES = re.compile(r"meshwright/ops/(collectives|attention/permute)\.py:\d+$")
OPERATIONS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Collective:
    """An array that goes between devices.

    `bytes` are those of the whole array a device takes part in with, once: of an all-gather its
    output, of a reduce-scatter its input, of an all-reduce the array, of an all-to-all the array,
    of a permute what a device sends. A combined operation gives a row for each of its arrays.
    """

    operation: str
    axes: tuple[str, ...]  # of the mesh, in its order; see part_of_axes
    devices: int  # in a group
    dtype: str
    shape: tuple[int, ...]  # of the result, on a device
    loops: tuple[int, ...] = ()  # trip counts of the loops around it, the outermost first
    scope: str = ""  # op_name: where in the program it comes from
    stack: tuple[str, ...] = ()  # "file.py:line", innermost first
    asynchronous: bool = False
    hidden_under: int = 0  # compute instructions between start and done
    hidden_bytes: int = 0  # what those make
    unsure: bool = False  # in a loop whose trips the text does not say: counted once
    branch: str = ""  # of a conditional: "2 of 3"; of nested ones the outer first, "1 of 2, 2 of 2"
    counted: bool = True  # False: another branch sends more, and sums are of that one
    collective_matmul: bool = False  # a permute that stands for a gather or scatter beside a matmul
    part_of_axes: bool = False  # its groups are not all the devices along its axes
    between_slices: bool = False  # over the network between TPU slices; else inside of each
    planned: bool = True
    rewritten: str = ""  # what the compiler made it of: "reduce-scatter over fsdp"
    why: str = ""  # of `planned`: what it was matched with, or what is wrong

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
        """What a device sends in one execution, by the formulas of a ring."""
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
    def backward(self) -> bool:
        return self.phase == "backward"

    @property
    def in_layers(self) -> bool:
        """Whether it belongs to a layer of a built-in model, in a loop or unrolled."""
        return bool(re.search(r"[/(](attention|mlp)[/)]", self.scope))

    @property
    def source(self) -> str:
        """The line that sends, as "file.py:12"; "" if the text does not say.

        Of the built-in models it is the line that calls for an exchange, not the exchange itself.
        """
        lines = [line for line in self.stack if not _EXCHANGES.search(line)]
        return next(iter(lines or self.stack), "")

    def data(self) -> dict[str, Any]:
        """As plain JSON data."""
        derived = ("times", "bytes", "wire_bytes", "phase", "source")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in derived}
