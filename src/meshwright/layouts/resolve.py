"""Resolve what a user wrote to a layout on a concrete mesh.

Named layouts use the mesh given; expressions in numbers use the mesh axes they line up with.
Without a mesh they use the devices in jax's order, factored into primes: one mesh for every
expression, so that arrays placed by different expressions can be used in one jit. (With a separate
mesh for each expression, jax often cannot name the sharding of a result, and with mixed prime
factors the compiler can abort the process.)
"""

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from meshwright.errors import MeshwrightError
from meshwright.layouts.expression import Expression, Factor
from meshwright.layouts.layout import Layout, is_of_jax, name_dims
from meshwright.meshes import RESERVED_AXIS, MachineMesh, MeshShape, MeshSpec
from meshwright.present import mesh_text

if TYPE_CHECKING:
    from meshwright.layouts.jax_arrays import LayoutLike, MeshLike

NOT_A_LAYOUT = (
    "is not a layout; give an expression ('x y -> x y*'), a PartitionSpec, a tuple of axes, or a "
    "mw.Layout"
)
NOT_A_MESH = "is not a mesh; give text ('fsdp=2,tp=4'), mw.mesh(…) or a jax Mesh"


def mesh_for_layouts(given: "MeshLike | None", devices: Sequence[Any] | None) -> MeshShape:
    """What layouts need of a mesh, without jax if it is text with all sizes or a machine's mesh."""
    if devices is None and isinstance(given, str | MeshSpec):
        spec = MeshSpec.parse(given)
        if spec.is_resolved:
            return spec
    if devices is None and isinstance(given, MachineMesh):
        return given
    from meshwright.layouts.jax_arrays import find_mesh

    return find_mesh(given, devices)


def is_device_line(mesh: MeshShape) -> bool:
    return tuple(mesh.axis_names) == line_axes(len(mesh.axis_names))


def line_axes(number: int) -> tuple[str, ...]:
    return tuple(f"{RESERVED_AXIS}{i}" for i in range(number))


def resolve(layout: "LayoutLike", ndim: int | None, mesh: MeshShape) -> tuple[Layout, MeshShape]:
    """The layout and its mesh: `mesh`, unless a NamedSharding has its own."""
    if isinstance(layout, str):
        layout = Expression.parse(layout)
    if isinstance(layout, Expression) and (
        layout.counts_devices or (is_device_line(mesh) and not layout.names_axes)
    ):
        return _counted(layout, ndim, mesh), mesh
    own: Any = layout if is_of_jax(layout, "NamedSharding") else None
    return as_layout(layout, ndim), mesh if own is None else own.mesh


def as_layout(layout: Any, ndim: int | None) -> Layout:
    """Convert to a Layout; expressions in numbers cannot be, since they need a mesh."""
    if isinstance(layout, Layout):
        return layout
    if isinstance(layout, str):
        return Layout.parse(layout, ndim)
    if isinstance(layout, Expression):
        return Layout.of_expression(layout, ndim)
    if is_of_jax(layout, "NamedSharding"):
        return Layout.of_spec(layout.spec, ndim=ndim)
    if layout is None or isinstance(layout, tuple) or is_of_jax(layout, "PartitionSpec"):
        return Layout.of_spec(() if layout is None else layout, ndim=ndim)
    raise MeshwrightError(f"{layout!r} {NOT_A_LAYOUT}")


@functools.lru_cache(maxsize=4096)
def _counted(expression: Expression, ndim: int | None, mesh: MeshShape) -> Layout:
    """Convert numbers to the mesh axes they line up with."""
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
    """The consecutive mesh axes of each factor, None if they do not line up."""
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


def _does_not_line_up(expression: Expression, factors: Sequence[Factor], mesh: MeshShape) -> str:
    """Why the numbers cannot be placed on this mesh, and what can."""
    if is_device_line(mesh):
        primes = " x ".join(map(str, mesh.axis_sizes))
        axes = ",".join(
            f"{letter}={f.size}" for letter, f in zip("ijklmnop", factors, strict=False)
        )
        return (
            f"layout '{expression}' does not follow the prime factors of {mesh.size} devices, "
            f"largest first ({primes}), so it could not be used in one jit with arrays of other "
            f"expressions; give all of them one mesh: mesh=mw.mesh('{axes}')"
        )
    alone = is_of_jax(mesh, "Mesh") and ", or place by numbers alone: devices=mesh.devices"
    return (
        f"layout '{expression}' does not line up with the mesh ({mesh_text(mesh.shape)}): each "
        "number must be the product of neighbouring axes, in mesh order; name the axes instead "
        f"(x@axis){alone or ''}"
    )


def mesh_shape_of(mesh: "MeshLike") -> Mapping[str, int]:
    """Axis sizes of a mesh, or of mesh text whose sizes are all given."""
    if isinstance(mesh, str | MeshSpec):
        spec = MeshSpec.parse(mesh)
        if not spec.is_resolved:
            raise MeshwrightError(
                f"mesh {spec.quoted} leaves a size open (-1); give it, or pass mw.mesh('{spec}')"
            )
        return spec.shape
    shape = getattr(mesh, "shape", None)
    if not isinstance(shape, Mapping):
        raise MeshwrightError(f"mesh={mesh!r} {NOT_A_MESH}")
    return shape
