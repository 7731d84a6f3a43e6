"""The axis sizes of the mesh a program was compiled for, and whether its groups fit them.

    axis_sizes("fsdp=4,tp=2")    # {"fsdp": 4, "tp": 2}; or a jax Mesh, a MeshSpec, a mapping

A program does not name its axes. Given the wrong mesh, or the right one in another order, its
device groups cross the axes instead of following them.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshwright.audits.collective import OPERATIONS, SentCollective
from meshwright.audits.groups import part_of_axes, replica_groups
from meshwright.audits.program import Program
from meshwright.errors import MeshwrightError
from meshwright.meshes import MeshSpec
from meshwright.present import mesh_text


def axis_sizes(mesh: Any) -> dict[str, int]:
    """Of a mesh, of its text, or of a mapping from axes to sizes."""
    if isinstance(mesh, str):
        mesh = MeshSpec.parse(mesh)
    if isinstance(mesh, MeshSpec):
        if not mesh.is_resolved:
            raise MeshwrightError(f"mesh '{mesh}': give every size; -1 is not possible here")
        return dict(mesh.axes)
    said = mesh if isinstance(mesh, Mapping) else getattr(mesh, "shape", None)
    if not isinstance(said, Mapping):
        raise MeshwrightError(
            f"{type(mesh).__name__} is not a mesh; give a jax Mesh, its text 'fsdp=4,tp=2' or its "
            "axis sizes {'fsdp': 4, 'tp': 2}"
        )
    wrong = [size for size in said.values() if not isinstance(size, (int, np.integer)) or size < 1]
    if wrong or not said or not all(isinstance(name, str) for name in said):
        raise MeshwrightError(
            f"mesh {dict(said)!r}: axes are names with sizes from 1, as in {{'fsdp': 4, 'tp': 2}}"
        )
    return {name: int(size) for name, size in said.items()}


def check_mesh(program: Program, rows: Sequence[SentCollective], sizes: Mapping[str, int]) -> None:
    """Raise if most collectives go over parts of axes, which means another mesh."""
    devices = math.prod(sizes.values())
    across = any("_xla_megascale_transfer_type" in one.rest for one in _instructions(program))
    if rows and program.devices and not across and devices != program.devices:
        raise MeshwrightError(
            f"mesh '{mesh_text(sizes)}' is not the mesh it was compiled for: that has "
            f"{program.devices} devices, this {devices}"
        )
    grouped = [row for row in rows if row.operation != "collective-permute"]
    parts = [row for row in grouped if row.part_of_axes]
    if 2 * len(parts) <= len(grouped):
        return
    said = (
        f"mesh '{mesh_text(sizes)}' is not the mesh it was compiled for: {len(parts)} of "
        f"{len(grouped)} collectives go between {parts[0].devices} devices where "
        f"{'+'.join(parts[0].axes)} has {math.prod(sizes[axis] for axis in parts[0].axes)}"
    )
    other = _other_order(program, sizes)
    if other is not None:
        raise MeshwrightError(f"{said}; in the order '{mesh_text(other)}' all fit")
    raise MeshwrightError(f"{said}; give that one, with axes that match these groups")


def _other_order(program: Program, sizes: Mapping[str, int]) -> dict[str, int] | None:
    """The same axes in an order in which every group covers complete axes."""
    devices = math.prod(sizes.values())
    spelled = [
        replica_groups(one.rest, devices) for one in _instructions(program)
        if one.operation.removesuffix("-start") in OPERATIONS[:-1]
    ]  # fmt: skip
    different = {str(groups): groups for groups in spelled}
    if len(sizes) > 6:  # orders grow without end
        return None
    for order in itertools.permutations(sizes.items()):
        if not any(part_of_axes(groups, dict(order)) for groups in different.values()):
            return dict(order)
    return None


def _instructions(program: Program) -> list[Any]:
    return [one for body in program.computations.values() for one in body]
