"""From text to a mesh: `mesh("fsdp=-1,tp=4")`."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from meshwright.errors import MeshwrightError
from meshwright.machines import Machine
from meshwright.meshes.arrange import arrange, device_list
from meshwright.meshes.machine_mesh import MachineMesh
from meshwright.meshes.spec import Accepts, MeshSpec

if TYPE_CHECKING:
    from meshwright.meshes.jax_mesh import Mesh

AxisTypes = Literal["auto", "explicit"]


@overload
def mesh(
    text: str | MeshSpec,
    machine: None = None,
    devices: Sequence[Any] | None = None,
    axes: Sequence[str] | None = None,
    axis_types: AxisTypes = "auto",
    accepts: Accepts | None = None,
) -> "Mesh": ...
@overload
def mesh(
    text: str | MeshSpec,
    machine: Machine | str,
    devices: None = None,
    axes: Sequence[str] | None = None,
    axis_types: AxisTypes = "auto",
    accepts: Accepts | None = None,
) -> MachineMesh: ...
@overload
def mesh(
    text: str | MeshSpec,
    machine: Machine | str,
    devices: Sequence[Any],
    axes: Sequence[str] | None = None,
    axis_types: AxisTypes = "auto",
    accepts: Accepts | None = None,
) -> "Mesh": ...
@overload
def mesh(
    text: str | MeshSpec,
    machine: Machine | str | None = None,
    devices: Sequence[Any] | None = None,
    axes: Sequence[str] | None = None,
    axis_types: AxisTypes = "auto",
    accepts: Accepts | None = None,
) -> "Mesh | MachineMesh": ...
def mesh(
    text: str | MeshSpec,
    machine: Machine | str | None = None,
    devices: Sequence[Any] | None = None,
    axes: Sequence[str] | None = None,
    axis_types: AxisTypes = "auto",
    accepts: Accepts | None = None,
) -> "Mesh | MachineMesh":
    """A mesh over the devices of this process, or of an absent machine.

    >>> mesh("dp=1,fsdp=-1,tp=4,sp=1").axis_names               # over all local devices
    ('dp', 'fsdp', 'tp', 'sp')
    >>> mesh("fsdp=-1,tp=8", machine="v5p:4x4x8")               # devices need not exist
    MachineMesh('fsdp=16,tp=8' on 'v5p:4x4x8')

    With `devices` (default: all) it is a jax Mesh. With `machine` alone, it is a MachineMesh, whose
    devices need not exist. With both, the devices have the order of that machine. `axis_types`
    chooses jax's automatic or explicit sharding. `accepts` says which meshes an error may propose.
    """
    if not isinstance(axis_types, str) or axis_types not in ("auto", "explicit"):
        raise MeshwrightError(f"axis_types={axis_types!r} is not one of 'auto', 'explicit'")
    spec = MeshSpec.parse(text, axes)
    devices = None if devices is None else device_list(devices)
    if machine is None:
        from meshwright.meshes.jax_mesh import all_devices, jax_mesh

        devices = all_devices() if devices is None else devices
        spec = _resolved(spec, devices, accepts)
        torus = None if spec.plain else _torus_of(devices)
        if torus is None:
            return jax_mesh(arrange(spec.sizes, devices, spec.plain), spec.names, axis_types)
        machine = torus
    machine = Machine.parse(machine)
    spec = spec.resolve(machine.num_devices, where=f"in '{machine}'", accepts=accepts)
    placed = arrange(spec.sizes, machine.devices, spec.plain)
    planned = MachineMesh(machine, spec.names, placed, axis_types)
    return planned if devices is None else planned.to_jax(devices)


def _resolved(spec: MeshSpec, devices: Sequence[Any], accepts: Accepts | None) -> MeshSpec:
    """The mesh with all sizes; where CPUs are too few, the error says how to have more."""
    try:
        return spec.resolve(len(devices), accepts=accepts)
    except MeshwrightError as mistake:
        needed = math.prod(spec.sizes) if spec.is_resolved else 0
        if needed <= len(devices) or getattr(devices[0], "platform", "") != "cpu":
            raise
        raise MeshwrightError(f"{mistake}; --cpu-devices {needed} simulates as many") from None


def _torus_of(devices: Sequence[Any]) -> Machine | None:
    """The TPU machine of these devices, None if it cannot be recognized.

    The mesh then uses its abstract devices, so that a mesh planned for an absent machine is the
    mesh the real one builds, whatever name its runtime gives the chip.
    """
    if not devices or devices[0].platform != "tpu":
        return None
    try:
        return Machine.of_devices(devices)
    except MeshwrightError:  # a chip not in the catalogue, or devices that leave a hole
        return None
