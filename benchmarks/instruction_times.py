"""How long each instruction of a TPU's compiled program computes.

The compiler writes `estimated_cycles` beside most of what it fuses. They are taken for matmuls: the
best do 0.93 to 0.99 of the peak by them, the median 0.87 to 0.94 on v4, v5e and v5p and 0.74 on
v6e, the worst less than half. For what only moves bytes they are known to be 2.5 to 5 times too
many, and the bytes over the memory's bandwidth are taken where they say less; what of that is in
the cycles of matmuls cannot be told. Kernels have no cycles: attention is counted from its shapes.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping

from meshwright.audits import Instruction, Program, array_bytes, arrays_of
from meshwright.planner import StepModel, efficiency

# of a device, in bfloat16: matrix units x 128x128 (v6e, 7x 256x256) x 2, of both cores of a
# megacore. By compiled matmuls of v4, v5e, v5p and v6e, the best of which do 0.93 to 0.99 of it, it
# is no other power of two; nor on 7x, where [8192,4096] x [4096,14336] does 0.85 of it (v6e: 0.92).
# v2 and v3 are from their units. The clock follows: v5p 1.75 GHz, 7x 2.2
FLOPS_PER_CYCLE = {
    "v2": 2**15, "v3": 2**16, "v4": 2**18, "v5e": 2**17, "v5p": 2**18, "v6e": 2**19, "7x": 2**19,
}  # fmt: skip
MATMUL = 0.90  # of the peak, where no cycles are written
MEMORY = 0.90  # of the bandwidth

# of splash kernels, FLOPs for each number of a query and each key it sees. Forward 2 matmuls,
# backward 5 in one kernel, which plan.efficiency counts as the 4 that are needed; in two kernels
# 4 and 3, and each as long as in the one
_FORWARD = 4.0
_BACKWARD = {"one": 8.0, "dkv": 8.0 * 4 / 5, "dq": 8.0 * 3 / 5}

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_PALLAS = re.compile(r'custom_call_target="tpu_custom_call"')
_LINE = re.compile(r"^\s+(?:ROOT )?%?([^\s=]+) = (\(.*?\)|\S+) [a-z][\w-]*\(", re.MULTILINE)
_PLACED = re.compile(r"\b(?:pred|bf16|[fsuc]\d+\w*)\[[\d,<=]*\](?:\{([^}]*)\})?")
_NEAR = re.compile(r"S\([13]\)")  # a core's own memory
_FETCHED = ("copy-done", "slice-done")
_NOTHING = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier",
    "while", "conditional", "call", "partition-id", "replica-id", "add-dependency", "domain",
    "copy-start", "slice-start", "send", "recv", "send-done", "recv-done", *_FETCHED,
}  # fmt: skip
_MATMULS = ("convolution", "dot")
_SLICES = ("dynamic-slice", "slice", "gather")
_VIEWS = ("bitcast", "reshape", "get-tuple-element")


@dataclasses.dataclass(frozen=True)
class Priced:
    """What an instruction computes: which part of a step it is, and for how long."""

    part: str  # matmuls, attention, elementwise
    seconds: float
    flops: float = 0.0
    unknown: bool = False  # a kernel that is not known: only its bytes are counted


class Prices:
    """A program on a machine; `of(instruction, computation)` prices one instruction."""

    def __init__(self, program: Program, text: str, step: StepModel) -> None:
        chip = step.machine.chip
        self.program = program
        self.peak = chip.bf16_flops / chip.cores_per_chip
        self.memory = MEMORY * chip.memory_bandwidth / chip.cores_per_chip
        rate = FLOPS_PER_CYCLE.get(chip.name)
        self.clock = None if rate is None else self.peak / rate  # cycles a second
        self.step, self.chip = step, chip
        self.near = {
            name: tuple(bool(_NEAR.search(layout or "")) for layout in _PLACED.findall(result))
            for name, result in _LINE.findall(text)
            if "S(1)" in result or "S(3)" in result
        }

    def of(self, one: Instruction, computation: str) -> Priced:
        """Seconds of one execution, without what it calls as a loop or waits for on links."""
        if one.operation in _NOTHING or one.operation.endswith(("-start", "-done", "-update")):
            return Priced("elementwise", 0.0)
        if one.operation == "custom-call":
            return self._kernel(one, computation)
        found = _CYCLES.search(one.rest)
        cycles = int(found[1]) / self.clock if found and self.clock else math.inf
        moving = self.traffic(one, computation) / self.memory
        flops = self.flops(one, computation)
        if not flops:
            return Priced("elementwise", min(cycles, moving))
        if moving > flops / self.peak:  # the cycles of what waits for memory are too many
            return Priced("matmuls", min(cycles, moving), flops)
        return Priced(
            "matmuls", flops / self.peak / MATMUL if cycles == math.inf else cycles, flops
        )

    def _kernel(self, one: Instruction, computation: str) -> Priced:
        if not _PALLAS.search(one.rest):  # allocations, and notes to the compiler
            return Priced("elementwise", 0.0)
        kind = re.search(r"splash_m[qh]a_(fwd|dkv|dq)", one.name + one.scope)
        listed = re.search(r"operand_layout_constraints=\{(.*?)\}\}", one.rest, re.DOTALL)
        floats = [array for array in arrays_of(listed[1] if listed else "") if array[0][0] in "bf"]
        if kind is None or len(floats) < 2:
            moving = self.traffic(one, computation) / self.memory
            return Priced("elementwise", moving, unknown=True)
        (_, queries), (_, keys) = floats[:2]  # [..., length, head_dim]
        each = _FORWARD
        if kind[1] != "fwd":
            # the one kernel gives the queries' gradients for each block of keys, one dim more
            both = any(len(shape) > len(queries) for _, shape in one.arrays)
            each = _BACKWARD["one" if both else kind[1]]
        # a mask comes as blocks, in the first two operands; turns of a ring but the first have none
        row, masked = keys[-2], listed and listed[1].startswith("s")
        seen = self.step.workload.model.keys_seen(row) / row if masked else 1.0
        flops = each * math.prod(queries) * row * seen
        rate = efficiency.attention(self.chip, queries[-1], self.step.workload.seq)
        if self.step.device.strategy in ("ring", "allgather"):
            rate *= efficiency.ring_steps(self.step.last.length)
        return Priced("attention", flops / (self.peak * rate), flops)

    def flops(self, one: Instruction, computation: str) -> float:
        """Of the matmuls of an instruction, or inside a fusion."""
        if one.operation == "fusion":
            name = one.called("calls") or ""
            inside = self.program.computations.get(name, ())
            return sum(self.flops(inner, name) for inner in inside)
        if one.operation not in _MATMULS:
            return 0.0
        by_name = self.by_name(computation)
        sides = [by_name[name].arrays[0][1] for name in one.operands[:2] if name in by_name]
        if len(sides) < 2:
            return 0.0
        # [M,K] x [K,N] -> [M,N]: the product of the sizes is (MKN)^2. It holds however the
        # compiler spells the matmul as a convolution, whose windows mostly meet padding
        product = math.prod(map(math.prod, (*sides, one.arrays[0][1])))
        return 2 * math.sqrt(product / _batch(one, sides[0]))

    def traffic(self, one: Instruction, computation: str) -> float:
        """Bytes an instruction reads from and writes to the device's memory.

        Of an array that it slices or updates in place, the slice. What lies in a core's own memory
        is free, unless it was fetched there for this.
        """
        by_name = self.by_name(computation)
        inner = one.called("calls") if one.operation == "fusion" else None
        total = float(self._written(one, inner))
        for number, name in enumerate(one.operands):
            source = by_name.get(name)
            if source is None:
                continue
            if self._is_near(source) and source.operation not in _FETCHED:
                continue
            whole = array_bytes(source.arrays[0]) if source.arrays else 0
            if inner is not None:
                total += min(whole, self._read(inner, number))
            elif one.operation in _SLICES:
                total += min(whole, one.bytes)
            elif one.operation != "dynamic-update-slice" or number:
                total += whole
        return total

    def _is_near(self, one: Instruction) -> bool:
        return self.near.get(one.name, (False,))[0]

    def _written(self, one: Instruction, inner: str | None) -> int:
        near = self.near.get(one.name, (False,) * len(one.arrays))
        parts: list[Instruction | None] = [one if inner is None else None] * len(one.arrays)
        by_name = self.by_name(inner) if inner is not None else self.by_name("")
        root = next((each for each in by_name.values() if each.root), None)
        if root is not None:
            outputs = root.operands if root.operation == "tuple" else (root.name,)
            if len(outputs) == len(one.arrays):
                parts = [_past_views(by_name, name) for name in outputs]
        total = 0
        for array, part, free in zip(one.arrays, parts, near, strict=False):
            if free:
                continue
            size = array_bytes(array)
            if part is not None and part.operation == "dynamic-update-slice" and inner is not None:
                update = by_name.get(part.operands[1])
                size = min(size, update.bytes) if update is not None else size
            total += size
        return total

    @functools.cache  # noqa: B019  (lives as long as one reading of one program)
    def _read(self, computation: str, number: int) -> float:
        """Bytes of its parameter of this number that a fused computation reads."""
        body = self.program.computations.get(computation, ())
        names = {
            one.name for one in body
            if one.operation == "parameter" and one.operands[:1] == (str(number),)
        }  # fmt: skip
        total = 0.0
        for one in body:
            used = [i for i, name in enumerate(one.operands) if name in names]
            if not used or one.operation in ("parameter", "constant"):
                continue
            if one.operation in _VIEWS:
                names.add(one.name)
            elif one.operation in _SLICES and used == [0]:
                total += one.bytes
            elif one.operation == "dynamic-update-slice" and used == [0]:
                continue  # in place
            elif one.operation == "fusion":
                called = one.called("calls") or ""
                total += sum(self._read(called, i) for i in used)
            else:
                return math.inf  # all of it
        return total

    @functools.cache  # noqa: B019
    def by_name(self, computation: str) -> Mapping[str, Instruction]:
        return {one.name: one for one in self.program.computations.get(computation, ())}


def _past_views(by_name: Mapping[str, Instruction], name: str) -> Instruction | None:
    one = by_name.get(name)
    while one is not None and one.operation in _VIEWS and one.operands:
        one = by_name.get(one.operands[0])
    return one


def _batch(one: Instruction, left: tuple[int, ...]) -> int:
    """Of a matmul, how many are done side by side."""
    groups = re.findall(r"\b(?:feature|batch)_group_count=(\d+)", one.rest)
    dims = re.search(r"\blhs_batch_dims=\{([\d,]+)\}", one.rest)
    batch = math.prod(left[int(dim)] for dim in dims[1].split(",")) if dims else 1
    return batch * math.prod(map(int, groups))
