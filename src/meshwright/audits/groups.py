"""The mesh axes of a collective, from the device groups in its text.

A program numbers its devices in the order of its mesh (`mesh.devices.flat`), so the axes are those
along which the numbers of a group differ. Groups are spelled in several ways:

    {{0,1},{2,3}}    [2,2]<=[4]    [2,2]<=[2,2]T(1,0)    mesh['x'=2,'y'=2] {'y'}
    source_target_pairs={{0,1},{1,0}}
"""

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from meshwright.audits.program import numbers
from meshwright.errors import MeshwrightError
from meshwright.present import mesh_text

_IOTA = r"\[[\d,]+\](?:T\([\d,]+\))?"


def replica_groups(text: str, devices: int) -> list[list[int]]:
    """The groups of device numbers (of a permute: pairs), from any of the spellings."""
    lists = re.search(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}", text)
    if lists:
        groups = re.findall(r"\{([\d,]+)\}", lists[1])
        return [list(numbers(group)) for group in groups] or [list(range(devices))]
    iota = re.search(rf"replica_groups=(\[[\d,]+\])<=({_IOTA})", text)
    if iota:
        return _iota(iota[2]).reshape(numbers(iota[1])).tolist()
    named = re.search(
        rf"replica_groups=@?mesh\[([^\]]*)\](?:, ?device_ids=\(({_IOTA}|[\d, ]+)\))? ?"
        r"\{([^}]*)\}",
        text,
    )
    if named:
        return _named(named[1], named[2], named[3])
    if re.search(r"(?:replica_groups|source_target_pairs)=", text):
        raise MeshwrightError(f"unknown notation of device groups: {text[:200]}")
    return [list(range(devices))]


def axes_between(groups: Sequence[Sequence[int]], shape: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the devices of a group differ, in the mesh's order."""
    sizes = tuple(shape.values())
    if not any(groups):
        return ()
    if max(map(max, groups)) >= math.prod(sizes):
        raise MeshwrightError(
            f"the program uses device {max(map(max, groups))}, mesh '{mesh_text(shape)}' has "
            f"{math.prod(sizes)}; give the mesh it was compiled for"
        )
    differ: set[int] = set()
    for group in groups:
        places = np.array(np.unravel_index(np.array(group), sizes))  # [axis, device]
        differ |= set(np.flatnonzero((places != places[:, :1]).any(axis=1)).tolist())
    return tuple(name for i, name in enumerate(shape) if i in differ)


def part_of_axes(groups: Sequence[Sequence[int]], shape: Mapping[str, int]) -> bool:
    """Whether a group is not all the devices along its axes: half of an axis, or across several."""
    whole = math.prod(shape[axis] for axis in axes_between(groups, shape))
    return any(len(group) != whole for group in groups)


def _named(mesh: str, order: str | None, over: str) -> list[list[int]]:
    """`'x'=2,'y'=4`, the devices in another order if one is given, and `'y'` or a part of it."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    ids = np.arange(math.prod(sizes.values())) if order is None else _iota(order)
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


def _iota(text: str) -> np.ndarray:
    """`[4,2]T(1,0)`: numbers in order in that shape, transposed, flat; or a plain list of them."""
    if not text.startswith("["):
        return np.array(numbers(text))
    shape, _, order = text.partition("T")
    ids = np.arange(math.prod(numbers(shape))).reshape(numbers(shape))
    return (ids.transpose(numbers(order)) if order else ids).reshape(-1)
