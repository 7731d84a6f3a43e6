"""From what a user wrote to a placement: a layout on a concrete mesh.

Named layouts stay on the mesh given; expressions in numbers use the mesh axes they line up with.
Without a mesh they are placed on the devices in jax's order, cut into prime factors: one mesh for
every expression, so that arrays placed by different ones meet in one jit. (With a mesh made to
measure for each expression jax often cannot name the sharding of a result, and on numbers of
devices that mix primes the compiler can abort the process.)
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshwright.arithmetic import prime_factors
from meshwright.errors import MeshwrightError
from meshwright.layouts.expression import Expression, Factor
from meshwright.layouts.layout import Layout, name_dims
from meshwright.meshes import RESERVED_AXIS, AnyMesh, MachineMesh, MeshSpec, device_list, mesh
from meshwright.present import mesh_text

LayoutLike = str | Layout | PartitionSpec | NamedSharding | tuple[Any, ...] | Expression | None
"""What may stand for a layout: an expression, a Layout, a PartitionSpec or a tuple like one."""

MeshLike = AnyMesh | MeshSpec | str
"""What may stand for a mesh: one of jax's, a described one, or text."""

NOT_A_LAYOUT = (
    "is not a layout; give an expression ('x y -> x y*'), a PartitionSpec, a tuple of axes, or a "
    "mw.Layout"
)
NOT_A_MESH = "is not a mesh; give text ('fsdp=2,tp=4'), mw.mesh(…) or a jax Mesh"


def find_mesh(given: MeshLike | None, devices: Sequence[Any] | None = None) -> AnyMesh:
    """The mesh to place on: the one given, the one in force (jax.set_mesh), or all devices."""
    if given is not None and devices is not None and not isinstance(given, str | MeshSpec):
        raise MeshwrightError("give mesh= or devices=, not both: a mesh has its devices")
    if isinstance(given, str | MeshSpec):
        in_force = jax.sharding.get_abstract_mesh()
        if devices is None and _is_mesh_of(in_force, given):
            return _with_devices(in_force)
        return mesh(given, devices=devices)
    if isinstance(given, Mesh | AbstractMesh | MachineMesh):
        return given
    if given is not None:
        raise MeshwrightError(f"mesh={given!r} {NOT_A_MESH}")
    if devices is None:
        in_force = jax.sharding.get_abstract_mesh()
        if not in_force.empty:
            return _with_devices(in_force)
    return device_line(tuple(jax.devices() if devices is None else device_list(devices)))


def _is_mesh_of(in_force: AbstractMesh, text: str | MeshSpec) -> bool:
    """Whether the current mesh is what the text says: it may have explicit axes."""
    if in_force.empty:
        return False
    try:
        spec = MeshSpec.parse(text)
    except MeshwrightError:  # told where the mesh is made
        return False
    sizes = zip(spec.sizes, in_force.axis_sizes, strict=False)
    return spec.names == in_force.axis_names and all(s in (-1, size) for s, size in sizes)


def _with_devices(in_force: AbstractMesh) -> Mesh | AbstractMesh:
    try:
        concrete = jax.sharding.get_mesh()
    except ValueError:  # inside jit jax gives out the axes only
        return in_force
    return concrete if concrete.abstract_mesh == in_force else in_force


@functools.lru_cache(maxsize=256)
def device_line(devices: tuple[Any, ...]) -> Mesh:
    """The devices in the order given, one axis for each prime factor of their number.

    Large primes first: an odd factor is most often the number of hosts.
    """
    primes = prime_factors(len(devices))[::-1] or [1]
    return Mesh(np.asarray(devices, dtype=object).reshape(primes), _line_axes(len(primes)))


def is_device_line(mesh: AnyMesh) -> bool:
    return mesh.axis_names == _line_axes(len(mesh.axis_names))


def _line_axes(number: int) -> tuple[str, ...]:
    return tuple(f"{RESERVED_AXIS}{i}" for i in range(number))


def resolve(layout: LayoutLike, ndim: int | None, mesh: AnyMesh) -> tuple[Layout, AnyMesh]:
    """The layout, and the mesh it speaks of: `mesh`, unless a sharding brings its own."""
    if isinstance(layout, str):
        layout = Expression.parse(layout)
    if isinstance(layout, Expression) and (
        layout.counts_devices or (is_device_line(mesh) and not layout.names_axes)
    ):
        return _counted(layout, ndim, mesh), mesh
    return as_layout(layout, ndim), layout.mesh if isinstance(layout, NamedSharding) else mesh


def as_layout(layout: LayoutLike, ndim: int | None) -> Layout:
    """Whatever may stand for a layout, as one; numbers cannot, since they need a mesh."""
    if isinstance(layout, Layout):
        return layout
    if isinstance(layout, str):
        return Layout.parse(layout, ndim)
    if isinstance(layout, Expression):
        return Layout.of_expression(layout, ndim)
    if isinstance(layout, NamedSharding):
        return Layout.of_spec(layout.spec, ndim=ndim)
    if layout is None or isinstance(layout, PartitionSpec | tuple):
        return Layout.of_spec(() if layout is None else layout, ndim=ndim)
    raise MeshwrightError(f"{layout!r} {NOT_A_LAYOUT}")


@functools.lru_cache(maxsize=4096)
def _counted(expression: Expression, ndim: int | None, mesh: AnyMesh) -> Layout:
    """Numbers as the mesh axes they line up with."""
    dims = expression.dims(ndim)
    where = "here" if is_device_line(mesh) else "in the mesh"
    factors = [factor for factor in expression.factors(mesh.size, where) if factor.size > 1]
    aligned = _align(factors, mesh.shape)
    if aligned is None:
        raise MeshwrightError(_does_not_line_up(expression, factors, mesh))
    axes = {factor.dim: names for factor, names in zip(factors, aligned, strict=True)}
    axes[None] = ()  # copies, and dims under the ellipsis
    return Layout(tuple(axes.get(dim, ()) for dim in dims), name_dims(dims))


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


def _does_not_line_up(expression: Expression, factors: Sequence[Factor], mesh: AnyMesh) -> str:
    """Why the numbers cannot be placed on this mesh, and what can."""
    if is_device_line(mesh):
        primes = " x ".join(map(str, mesh.axis_sizes))
        axes = ",".join(
            f"{letter}={f.size}" for letter, f in zip("ijklmnop", factors, strict=False)
        )
        return (
            f"layout '{expression}' cuts {mesh.size} devices another way than their prime factors "
            f"go, largest first ({primes}), so arrays placed by other expressions could not meet "
            f"it in one jit; give all of them one mesh that is cut so: mesh=mw.mesh('{axes}')"
        )
    alone = isinstance(mesh, Mesh) and ", or place by numbers alone: devices=mesh.devices"
    return (
        f"layout '{expression}' does not line up with the mesh ({mesh_text(mesh.shape)}): each "
        "number must be the product of neighbouring axes, in mesh order; name the axes instead "
        f"(x@axis){alone or ''}"
    )


def named_sharding(layout: Layout, mesh: AnyMesh) -> NamedSharding:
    """A layout on its mesh, for jax; a described mesh becomes an abstract one."""
    return NamedSharding(mesh.abstract_mesh if isinstance(mesh, MachineMesh) else mesh, layout.spec)


def mesh_shape_of(mesh: MeshLike) -> Mapping[str, int]:
    """Axis sizes of a mesh, or of mesh text whose sizes are all given."""
    if isinstance(mesh, str | MeshSpec):
        spec = MeshSpec.parse(mesh)
        if not spec.is_resolved:
            raise MeshwrightError(
                f"mesh {spec.quoted} leaves a size open (-1); give it, or pass mw.mesh('{spec}')"
            )
        return dict(spec.axes)
    shape = getattr(mesh, "shape", None)
    if not isinstance(shape, Mapping):
        raise MeshwrightError(f"mesh={mesh!r} {NOT_A_MESH}")
    return shape
