"""From what a user wrote to a placement: a layout on a concrete mesh.

Named layouts stay on the mesh given. Expressions in numbers use the mesh's own axes where its sizes
line up with the numbers, else a mesh of their own over the same devices in the same order: so
arrays placed by different expressions always meet in one jit.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from meshwright.errors import MeshwrightError
from meshwright.layout.expression import Expression, Factor
from meshwright.layout.layout import Layout, name_dims
from meshwright.mesh import AnyMesh, MachineMesh, MeshSpec, mesh

LayoutLike = str | Layout | PartitionSpec | tuple[Any, ...] | Expression
"""What may stand for a layout: an expression, a Layout, a PartitionSpec or a tuple like one."""


def find_mesh(given: AnyMesh | str | MeshSpec | None, devices: Sequence[Any] | None) -> AnyMesh:
    """The mesh to place on: the one given, the one in force (jax.set_mesh), or all devices."""
    if given is not None and devices is not None and not isinstance(given, str | MeshSpec):
        raise MeshwrightError("give mesh= or devices=, not both: a mesh has its devices")
    if isinstance(given, str | MeshSpec):
        return mesh(given, devices=devices)
    if isinstance(given, Mesh | AbstractMesh | MachineMesh):
        return given
    if given is not None:
        raise MeshwrightError(
            f"mesh={given!r} is not a mesh; give text ('fsdp=-1,tp=4'), mw.mesh(…) or a jax Mesh"
        )
    if devices is None:
        in_force = jax.sharding.get_abstract_mesh()
        if not in_force.empty:
            return _with_devices(in_force)
    return device_line(tuple(jax.devices() if devices is None else devices))


def _with_devices(in_force: AbstractMesh) -> Mesh | AbstractMesh:
    try:
        return jax.sharding.get_mesh()
    except ValueError:  # inside jit jax gives out the axes only
        return in_force


# an axis name no text can say: the mesh of "all devices, no axes named"
_ALL_DEVICES = "(all devices)"


@functools.lru_cache(maxsize=256)
def device_line(devices: tuple[Any, ...]) -> Mesh:
    """The devices in the order given: where expressions in numbers start without a mesh."""
    if not devices:
        raise MeshwrightError("devices= is empty; give at least one device")
    return Mesh(np.asarray(devices, dtype=object), (_ALL_DEVICES,))


def is_device_line(mesh: AnyMesh) -> bool:
    return mesh.axis_names == (_ALL_DEVICES,)


def resolve(layout: LayoutLike, ndim: int | None, mesh: AnyMesh) -> tuple[Layout, AnyMesh]:
    """The layout and the mesh it speaks of: `mesh`, or one of its own over the same devices."""
    if isinstance(layout, str):
        layout = Expression.parse(layout)
    if isinstance(layout, Layout):
        return layout, mesh
    if isinstance(layout, PartitionSpec | tuple):
        return Layout.of_spec(layout, ndim=ndim), mesh
    if not isinstance(layout, Expression):
        raise MeshwrightError(
            f"{layout!r} is not a layout; give an expression ('x y -> x y*'), a PartitionSpec, a "
            "tuple of axes, or a Layout"
        )
    if layout.names_axes or not (layout.counts_devices or is_device_line(mesh)):
        return _named(layout, ndim, mesh), mesh
    return _counted(layout, ndim, mesh)


def _named(expression: Expression, ndim: int | None, mesh: AnyMesh) -> Layout:
    if is_device_line(mesh):
        axis = next(axis for entry in expression.right for axis in entry.axes)
        raise MeshwrightError(
            f"layout '{expression}' names mesh axis {axis!r} but no mesh is given; pass mesh=, or "
            "set one: with jax.set_mesh(mw.mesh('…'))"
        )
    return Layout.parse(str(expression), ndim)


@functools.lru_cache(maxsize=4096)
def _counted(expression: Expression, ndim: int | None, mesh: AnyMesh) -> tuple[Layout, AnyMesh]:
    dims = expression.dims(ndim)
    factors = [factor for factor in expression.factors(mesh.size) if factor.size > 1]
    aligned = None if is_device_line(mesh) else _align(factors, mesh.shape)
    if aligned is None:
        mesh = _own_mesh(factors, mesh, expression)
        aligned = [(name,) for name in mesh.axis_names]
    axes = {
        factor.dim: names
        for factor, names in zip(factors, aligned, strict=False)
        if factor.dim is not None
    }
    return Layout(
        tuple(axes.get(dim, ()) if dim is not None else () for dim in dims), name_dims(dims)
    ), mesh


def _align(
    factors: Sequence[Factor], mesh_shape: Mapping[str, int]
) -> list[tuple[str, ...]] | None:
    """The run of mesh axes that makes up each factor, None if they do not line up."""
    axes = [(axis, size) for axis, size in mesh_shape.items() if size > 1]
    runs = []
    for factor in factors:
        run: list[str] = []
        size = 1
        while size < factor.size and axes:
            axis, axis_size = axes.pop(0)
            run.append(axis)
            size *= axis_size
        if size != factor.size:
            return None
        runs.append(tuple(run))
    return runs


def _own_mesh(factors: Sequence[Factor], base: AnyMesh, expression: Expression) -> Mesh:
    """A mesh over the devices of `base`, same order, one axis a factor, named after its dim."""
    if not isinstance(base, Mesh):
        raise MeshwrightError(
            f"layout '{expression}' does not line up with the mesh axes "
            f"({', '.join(f'{a}={s}' for a, s in base.shape.items())}), and this mesh has no "
            "devices to arrange anew; name the axes instead (x@fsdp)"
        )
    if AxisType.Explicit in base.axis_types:
        raise MeshwrightError(
            f"layout '{expression}' does not line up with the explicit mesh axes "
            f"({', '.join(f'{a}={s}' for a, s in base.shape.items())}); name the axes (x@fsdp), or "
            "use numbers that are products of neighbouring axes"
        )
    names: list[str] = []
    for factor in factors:
        name = factor.dim or "copies"
        names.append(name if name not in names else f"{name}{len(names)}")
    shape = [factor.size for factor in factors]
    return Mesh(base.devices.reshape(shape), tuple(names))


def named_sharding(layout: Layout, mesh: AnyMesh) -> NamedSharding:
    """A layout on its mesh, for jax; a described mesh becomes an abstract one."""
    return NamedSharding(mesh.abstract_mesh if isinstance(mesh, MachineMesh) else mesh, layout.spec)
