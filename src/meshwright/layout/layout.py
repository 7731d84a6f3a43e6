"""A layout: for each dim of a tensor, the mesh axes that split it. One value, said in many ways.

>>> layout = Layout.parse("embed mlp -> embed@fsdp mlp@tp")
>>> layout.spec
P('fsdp', 'tp')
>>> Layout.of_spec(layout.spec, ("embed", "mlp")) == layout
True
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence

from jax.sharding import PartitionSpec

from meshwright.errors import (
    MeshwrightError,
    count,
    did_you_mean,
    largest_divisor,
    nearest_multiples,
)
from meshwright.layout.expression import Entry, Expression
from meshwright.mesh import STANDARD_AXES

UNNAMED_AXIS = "devices_"  # axes of the devices themselves, where no mesh is given; never shown


@dataclasses.dataclass(frozen=True)
class Layout:
    """`axes[i]`: the mesh axes that split dim i, major first. Dims without a name are a, b, c …"""

    axes: tuple[tuple[str, ...], ...]
    dims: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        dims = name_dims(self.dims or (None,) * len(self.axes))
        object.__setattr__(self, "dims", dims)
        if len(self.dims) != len(self.axes):
            raise MeshwrightError(
                f"a layout of {count(len(self.axes), 'dim')} cannot have the names {self.dims}; "
                "one name each"
            )
        used = [axis for axes in self.axes for axis in axes]
        twice = [axis for i, axis in enumerate(used) if axis in used[:i]]
        if twice:
            raise MeshwrightError(
                f"layout {tuple(self.axes)!r} uses mesh axis {twice[0]!r} twice; an axis can split "
                "one dim of an array"
            )

    @classmethod
    def parse(cls, text: str, ndim: int | None = None) -> "Layout":
        """Read the named form: `batch seq -> batch@dp+fsdp seq`; with `...`, give `ndim`."""
        expression = Expression.parse(text)
        if expression.counts_devices:
            raise MeshwrightError(
                f"layout {text!r} counts devices, so it is a layout only on a mesh: use "
                "mw.sharding(…, mesh=…), or name the axes (x@fsdp)"
            )
        return _from_named(expression, ndim)

    @classmethod
    def of_spec(
        cls,
        spec: "PartitionSpec | Sequence[str | Sequence[str] | None]",
        dims: Sequence[str | None] = (),
        ndim: int | None = None,
    ) -> "Layout":
        """From a PartitionSpec; with `ndim`, dims it leaves out are whole."""
        axes = tuple(_axes_of(entry, spec) for entry in spec)
        rank = ndim if ndim is not None else (len(dims) or len(axes))
        if len(axes) > rank:
            raise MeshwrightError(
                f"{PartitionSpec(*spec)} names {count(len(axes), 'dim')}, the array has {rank}; "
                "leave out what it does not have"
            )
        return cls(axes + ((),) * (rank - len(axes)), name_dims(dims))

    @property
    def ndim(self) -> int:
        return len(self.axes)

    @functools.cached_property
    def spec(self) -> PartitionSpec:
        """For jax. Trailing whole dims are left out, a single axis is not a tuple."""
        entries = [axes[0] if len(axes) == 1 else (axes or None) for axes in self.axes]
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)

    @property
    def expression(self) -> Expression:
        """In the named form."""
        entries = (Entry(dim, axes=axes) for dim, axes in zip(self.dims, self.axes, strict=True))
        return Expression(self.dims, tuple(entries))

    def __str__(self) -> str:
        return str(self.expression)

    def numbers(self, mesh_shape: Mapping[str, int]) -> Expression:
        """The same placement in numbers, as einshard writes it: `a b -> b2 a4`.

        Not every layout can be: a dim's axes must be neighbours in the mesh, in mesh order.
        """
        owner = {axis: i for i, axes in enumerate(self.axes) for axis in axes}
        runs: list[tuple[int | None, list[str]]] = []
        for axis, size in mesh_shape.items():
            if size == 1:
                continue
            dim = owner.get(axis)
            if runs and runs[-1][0] == dim:
                runs[-1][1].append(axis)
            else:
                runs.append((dim, [axis]))
        for i, axes in enumerate(self.axes):
            wide = [axis for axis in axes if mesh_shape[axis] > 1]
            if wide and (i, wide) not in runs:
                raise MeshwrightError(
                    f"layout '{self}' cannot be written in numbers on this mesh: {'+'.join(wide)} "
                    f"are not neighbours in the mesh order ({', '.join(mesh_shape)}); keep the "
                    "named form"
                )
        entries = [
            Entry(
                None if dim is None else self.dims[dim],
                math.prod(mesh_shape[axis] for axis in axes),
            )
            for dim, axes in runs
        ]
        split = {dim for dim, _ in runs}
        whole = [Entry(dim) for i, dim in enumerate(self.dims) if i not in split]
        return Expression(self.dims, (*entries, *whole))

    def shard_shape(self, shape: Sequence[int], mesh_shape: Mapping[str, int]) -> tuple[int, ...]:
        """What one device holds of an array of `shape`."""
        return tuple(
            size // math.prod(mesh_shape[axis] for axis in axes)
            for size, axes in zip(shape, self.axes, strict=True)
        )

    def copies(self, mesh_shape: Mapping[str, int]) -> int:
        """How many devices hold the same part."""
        used = {axis for axes in self.axes for axis in axes}
        return math.prod(size for axis, size in mesh_shape.items() if axis not in used)

    def check(
        self,
        mesh_shape: Mapping[str, int] | None,
        shape: Sequence[int] | None = None,
        what: str = "array",
        given: object = None,
    ) -> "Layout":
        """Raise unless it fits this mesh and this shape; gives itself back.

        `what` and `given` are for the message: which array, and how the user wrote the layout.
        """
        given = self if given is None else given
        if shape is not None and len(shape) != self.ndim:
            raise MeshwrightError(
                f"{what} has shape {tuple(shape)}, layout '{given}' is for "
                f"{count(self.ndim, 'dim')}; name one dim for each"
            )
        if mesh_shape is None:
            return self
        for axis in (axis for axes in self.axes for axis in axes):
            if axis not in mesh_shape:
                hint = (
                    f"; add {axis}=1 to the mesh"
                    if axis in STANDARD_AXES
                    else did_you_mean(axis, mesh_shape)
                )
                raise MeshwrightError(
                    f"{what}: layout '{given}' uses mesh axis {axis!r}, which the mesh "
                    f"({_mesh_text(mesh_shape)}) does not have{hint}"
                )
        if shape is None:
            return self
        for name, size, axes in zip(self.dims, shape, self.axes, strict=True):
            parts = math.prod(mesh_shape[axis] for axis in axes)
            if size % parts:
                over = "+".join(f"{axis}={mesh_shape[axis]}" for axis in axes)
                over = "" if axes[0].startswith(UNNAMED_AXIS) else f" ({over})"
                raise MeshwrightError(
                    f"{what} of shape {tuple(shape)}: dim {name!r} of size {size} cannot be split "
                    f"in {parts}{over} by layout '{given}'; make it "
                    f"{nearest_multiples(size, parts)}, or split it in at most "
                    f"{largest_divisor(size, parts)}"
                )
        return self


@functools.lru_cache(maxsize=4096)
def _from_named(expression: Expression, ndim: int | None) -> Layout:
    dims = expression.dims(ndim)
    axes = {entry.dim: entry.axes for entry in expression.right}
    return Layout(tuple(axes[dim] if dim is not None else () for dim in dims), name_dims(dims))


def _axes_of(entry: object, spec: object) -> tuple[str, ...]:
    if entry is None:
        return ()
    if isinstance(entry, str):
        return (entry,)
    if isinstance(entry, tuple | list) and all(isinstance(axis, str) for axis in entry):
        return tuple(entry)
    raise MeshwrightError(
        f"{spec!r} has the entry {entry!r}; each dim takes a mesh axis, a tuple of them, or None"
    )


def name_dims(dims: Iterable[str | None]) -> tuple[str, ...]:
    """Names for all dims: those given, and unused letters for the others."""
    dims = tuple(dims)
    free = (name for name in _letters() if name not in dims)
    return tuple(next(free) if dim is None else dim for dim in dims)


def _letters() -> Iterable[str]:
    width = 1
    while True:
        for letter in "abcdefghijklmnopqrstuvwxyz":
            yield letter * width
        width += 1


def _mesh_text(mesh_shape: Mapping[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in mesh_shape.items())
