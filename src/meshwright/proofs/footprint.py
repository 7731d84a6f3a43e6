"""What the compiler says of memory, and what its refusals mean."""

import dataclasses
import re
from collections.abc import Mapping

from meshwright.machines import Machine

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A place in memory that holds one or several arrays, one after the other."""

    bytes: int
    arrays: str  # as the compiler writes them, with their source where it tells


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes of one device, as compiled."""

    total: int  # at the fullest moment
    limit: int  # what a device gives out
    kinds: Mapping[str, int]  # arguments, outputs, aliased, temporaries, code
    buffers: tuple[Buffer, ...]  # the largest temporaries

    @property
    def fits(self) -> bool:
        return self.total <= self.limit


def footprint(machine: Machine, sizes: Mapping[str, int], report: str | None) -> Footprint:
    """From memory_analysis and, on TPU, the compiler's report of its buffer assignment.

    Elsewhere arguments, temporaries and outputs without those that reuse arguments: on one H200
    that is the peak to 0.1%.
    """
    kinds = {
        "arguments": sizes["argument"],
        "outputs": sizes["output"],
        "of outputs, in place of arguments": sizes["alias"],
        "temporaries": sizes["temp"],
        "program": sizes["generated_code"],
    }
    if sizes.get("host_temp"):
        kinds["beside it, in the host's memory"] = sizes["host_temp"]
    total = sizes["argument"] + sizes["temp"] + sizes["output"] - sizes["alias"]
    buffers: tuple[Buffer, ...] = ()
    if report is not None:
        # the report counts what lies in the device's own memory, at its fullest
        peak = re.search(r"color=0\)\nTotal bytes: (\d+)", report)
        if peak:
            total = int(peak[1]) + sizes["generated_code"]
        buffers = tuple(_buffers(report))
    return Footprint(total, machine.usable_memory, kinds, buffers)


def _buffers(report: str) -> list[Buffer]:
    first = report.split("Memory Space:")[1] if "Memory Space:" in report else report
    lines = re.findall(r"\);\s+([\d.]+)([KMGT]?)i?B;\s+\d+;\s+\d+; (.*)", first)
    return [Buffer(int(float(n) * _UNITS[unit]), arrays) for n, unit, arrays in lines[:20]]


@dataclasses.dataclass(frozen=True)
class OutOfMemory:
    """A compile that ended because a device's memory is too small."""

    needed: int  # bytes
    limit: int
    early: bool  # given up before anything was placed: no buffers are named
    buffers: tuple[Buffer, ...]


def out_of_memory(message: str) -> OutOfMemory | None:
    """What a RESOURCE_EXHAUSTED says, in either of its forms; None if it is another failure."""
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    early = re.search(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)", message)
    late = re.search(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm", message)
    sizes = late or early
    if sizes is None:
        return OutOfMemory(0, 0, True, ())
    needed, limit = (float(sizes[i]) * _UNITS[sizes[i + 1]] for i in (1, 3))
    largest = re.findall(
        r"Size: ([\d.]+)([KMGT]?)\n\s+(?:Operator: op_name=\"([^\"]*)\".*\n\s+)?Shape: (\S+)",
        message,
    )
    buffers = tuple(
        Buffer(int(float(n) * _UNITS[unit]), f"{shape} {scope}".strip())
        for n, unit, scope, shape in largest
    )
    return OutOfMemory(int(needed), int(limit), late is None, buffers)
