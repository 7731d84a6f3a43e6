"""The largest buffers of a program, and its replicated arrays."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from meshwright.audits.loops import instructions
from meshwright.audits.program import Program, array_bytes, source_line
from meshwright.layouts import axes_of

MIB = 2**20
# these alias other arrays, or have no content
_NO_BUFFER = {
    "tuple", "get-tuple-element", "bitcast", "while", "call", "conditional", "opt-barrier",
    "after-all", "partition-id", "replica-id",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array on a device; its bytes do not include the padding of tiled layouts."""

    bytes: int
    dtype: str
    shape: tuple[int, ...]
    operation: str  # that creates it; parameter: an argument
    scope: str
    source: str
    count: int  # how many of this shape come from this scope

    def data(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Replicated:
    """An argument or output that is replicated over axes of the mesh."""

    name: str  # "argument [0].params['embedding']"
    dtype: str
    shape: tuple[int, ...]  # of the full array
    bytes: int  # on a device
    axes: tuple[str, ...]  # over which it is replicated
    copies: int

    def data(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def largest_buffers(program: Program, most: int = 20) -> tuple[Buffer, ...]:
    """The largest results of instructions that have a buffer, one for each shape and scope.

    They need not all be alive at once.
    """
    found: dict[tuple[str, tuple[int, ...], str], Buffer] = {}
    entry = {one.name for one in program.computations[program.entry]}
    for one in instructions(program):
        skipped = one.operation in _NO_BUFFER or one.operation.endswith("-start")
        if skipped or (one.operation == "parameter" and one.name not in entry):
            continue
        for array in one.arrays:
            key = (*array, one.scope)
            if key in found:
                found[key] = dataclasses.replace(found[key], count=found[key].count + 1)
            elif array_bytes(array):
                found[key] = Buffer(
                    array_bytes(array), *array, one.operation, one.scope,
                    source_line(program.stack(one)), 1,
                )  # fmt: skip
    return tuple(sorted(found.values(), key=lambda buffer: -buffer.bytes)[:most])


def replicated(
    compiled: Any, shape: Mapping[str, int], at_least: int = MIB
) -> tuple[Replicated, ...]:
    """Replicated arguments and outputs of at least so many bytes per device."""
    import jax
    from jax.sharding import NamedSharding

    found: list[Replicated] = []
    for kind, arrays, shardings in _arguments_and_outputs(compiled):
        named = jax.tree_util.tree_leaves_with_path(arrays)
        # None is a leaf of neither, and the two trees are alike
        for (path, array), sharding in zip(named, jax.tree.leaves(shardings), strict=False):
            if not isinstance(sharding, NamedSharding):
                continue
            part = math.prod(sharding.shard_shape(tuple(array.shape)))
            size = part * array.dtype.itemsize
            split = {axis for entry in sharding.spec for axis in axes_of(entry, sharding.spec)}
            axes = tuple(axis for axis, n in shape.items() if n > 1 and axis not in split)
            if size >= at_least and axes:
                found.append(
                    Replicated(
                        f"{kind} {jax.tree_util.keystr(path)}",
                        str(array.dtype),
                        tuple(array.shape),
                        size,
                        axes,
                        math.prod(shape[a] for a in axes),
                    )
                )
    return tuple(sorted(found, key=lambda one: -one.bytes))


def _arguments_and_outputs(compiled: Any) -> list[tuple[str, Any, Any]]:
    """Arguments and outputs, where the compiled program tells them."""
    parts = []
    try:
        parts.append(("argument", compiled.args_info, compiled.input_shardings))
        parts.append(("output", compiled.out_info, compiled.output_shardings))
    except (AttributeError, NotImplementedError):
        pass
    return [part for part in parts if part[1] is not None]
