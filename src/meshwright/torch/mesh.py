"""From text to a DeviceMesh: `mesh("dp=-1,tp=3")`, with the device order of every Meshwright mesh.

mesh("dp=-1,tp=3")  # on six ranks: dp is the slow axis, tp has the nearest neighbours
# DeviceMesh((dp=2, tp=3), 'cuda', ...)
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.errors import MeshwrightError
from meshwright.meshes import MeshSpec

_ROLES = "_meshwright_roles"  # on a DeviceMesh, which has names and sizes only


def mesh(text: str | MeshSpec, device: str | None = None) -> DeviceMesh:
    """A DeviceMesh over all ranks; joins them first if torch.distributed has not.

    `device` is "cuda" where there is one, else "cpu". The last axis has the nearest
    neighbours, ranks one apart, as on every mesh here.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    spec = MeshSpec.parse(text)
    if not dist.is_initialized():
        _join(spec, device)
    spec = spec.resolve(dist.get_world_size(), where="in torch.distributed")
    ranks = torch.arange(spec.size).reshape(spec.sizes)
    made = DeviceMesh(device, ranks, mesh_dim_names=spec.names)
    setattr(made, _ROLES, spec.roles)
    return made


def _join(spec: MeshSpec, device: str) -> None:
    """Join the processes that torchrun started; a process started alone is a world of one."""
    backend = {"cuda": "nccl", "cpu": "gloo"}.get(device)
    if "RANK" in os.environ:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(backend)
        return
    if spec.size not in (1, -1):
        raise MeshwrightError(
            f"mesh {spec.quoted} needs {spec.size if spec.is_resolved else 'several'} processes, "
            "and this one was started alone; start the script with torchrun, with as many processes"
        )
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def data_shard(mesh: DeviceMesh) -> tuple[int, int]:
    """(index, count): which part of every batch this rank trains on.

    Ranks of one tensor-parallel group have the same index, and so see the same sequences.

        index, count = data_shard(mesh)
        batch = batch.chunk(count)[index]
    """
    axes = axes_of(mesh)
    index, count = 0, 1
    for axis in axes.data:
        index = index * axes.shape[axis] + mesh.get_local_rank(axis)
        count *= axes.shape[axis]
    return index, count


@dataclasses.dataclass(frozen=True)
class Axes:
    """The axes of a mesh by what they do in PyTorch."""

    shape: Mapping[str, int]
    tensor: str | None  # tensor parallelism; None: the mesh has no such axis
    shard: str  # fully_shard splits weights over it
    replicate: str | None  # weights are the same along it (HSDP)

    @property
    def tp(self) -> int:
        return 1 if self.tensor is None else self.shape[self.tensor]

    @property
    def data(self) -> tuple[str, ...]:
        """The axes that split the batch."""
        return (self.shard,) if self.replicate is None else (self.replicate, self.shard)


def spec_of(given: Any) -> MeshSpec:
    """A MeshSpec with all sizes, of a DeviceMesh, a MeshSpec or text."""
    if isinstance(given, DeviceMesh):
        names = given.mesh_dim_names
        if names is None:
            raise MeshwrightError(
                f"{given} has no axis names; make it with mw.torch.mesh('dp=-1,tp=…')"
            )
        sizes = tuple(given.mesh.shape)
        return MeshSpec(tuple(zip(names, sizes, strict=True)), roles=getattr(given, _ROLES, ()))
    if not isinstance(given, str | MeshSpec):
        raise MeshwrightError(
            f"mesh={given!r} is not a mesh; give mw.torch.mesh('dp=-1,tp=4'), or text"
        )
    spec = MeshSpec.parse(given)
    if not spec.is_resolved:
        raise MeshwrightError(
            f"mesh {spec.quoted} leaves a size open (-1); give it, or pass mw.torch.mesh('{spec}')"
        )
    return spec


def axes_of(given: Any) -> Axes:
    """Which axis does what; an axis that PyTorch has no use for must have size 1."""
    spec = spec_of(given)
    by_role: dict[str, str] = {}
    for name, size in spec.axes:
        role = spec.role(name)
        if role in ("sp", "ep", "pp") and size > 1:
            raise MeshwrightError(
                f"mesh {spec.quoted}: {name}={size} is a {role} axis, which the PyTorch backend "
                f"does not have; its axes are dp, fsdp and tp: set {name}=1"
            )
        if role in by_role:
            raise MeshwrightError(
                f"mesh {spec.quoted}: {by_role[role]} and {name} both have the role {role!r}; "
                f"make them one axis"
            )
        by_role[role] = name
    dp, fsdp = by_role.get("dp"), by_role.get("fsdp")
    shard = fsdp or dp
    if shard is None:
        raise MeshwrightError(
            f"mesh {spec.quoted} has no data axis, which fully_shard needs; write "
            f"'dp=1,{spec}' to use one data-parallel group"
        )
    replicate = dp if fsdp is not None and dp is not None and spec.shape[dp] > 1 else None
    return Axes(spec.shape, by_role.get("tp"), shard, replicate)
