"""A layout: for each dim of a tensor, the mesh axes that split it. All notations give this value.

>>> layout = Layout.parse("embed mlp -> embed@fsdp mlp@tp")
>>> layout.spec
P('fsdp', 'tp')
>>> Layout.of_spec(layout.spec, ("embed", "mlp")) == layout
True
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.arithmetic import divisors, first_repeated, whole_numbers
from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.layouts.expression import Entry, Expression, is_dim_name
from meshwright.meshes import RESERVED_AXIS, STANDARD_AXES
from meshwright.present import (
    Column,
    Row,
    count,
    mesh_text,
    nearest_multiples,
    table_html,
    text_html,
)

if TYPE_CHECKING:
    from meshwright.layouts.jax_arrays import PartitionSpec


@dataclasses.dataclass(frozen=True)
class Layout:
    """`axes[i]`: the mesh axes that split dim i, major first. Dims without a name are a, b, c …"""

    axes: tuple[tuple[str, ...], ...]
    dims: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.axes, tuple | list) or not isinstance(self.dims, tuple | list):
            raise MeshwrightError(
                f"Layout({self.axes!r}, {self.dims!r}): give a tuple with the mesh axes of each "
                "dim, as in (('fsdp',), ()), and a tuple of names; for text use Layout.parse"
            )
        axes = tuple(axes_of(entry, self.axes) for entry in self.axes)
        object.__setattr__(self, "axes", axes)
        if not all(dim is None or isinstance(dim, str) for dim in self.dims):
            raise MeshwrightError(f"a layout's dims {self.dims!r} are not all names")
        object.__setattr__(self, "dims", name_dims(self.dims or (None,) * len(axes)))
        if len(self.dims) != len(axes):
            raise MeshwrightError(
                f"a layout of {count(len(axes), 'dim')} cannot have the names {self.dims}; one "
                "name each"
            )
        twice = first_repeated([axis for entry in axes for axis in entry])
        if twice is not None:
            raise MeshwrightError(
                f"layout {axes!r} uses mesh axis {twice!r} twice; an axis can split one dim of an "
                "array"
            )
        twice = first_repeated(self.dims)
        if twice is not None:
            raise MeshwrightError(f"a layout's dims {self.dims} name {twice!r} twice; each once")

    @classmethod
    def parse(cls, text: str, ndim: int | None = None) -> "Layout":
        """Read the named form: `batch seq -> batch@dp+fsdp seq`; with `...`, give `ndim`."""
        return cls.of_expression(Expression.parse(text), ndim)

    @classmethod
    def of_expression(cls, expression: Expression, ndim: int | None = None) -> "Layout":
        """From an expression that names axes, for an array of rank `ndim`."""
        if expression.counts_devices:
            raise MeshwrightError(
                f"layout '{expression}' counts devices, so it is a layout only on a mesh: use "
                "mw.sharding(…, mesh=…), or name the axes (x@fsdp)"
            )
        return _of_expression(expression, ndim)

    @classmethod
    def of_spec(
        cls,
        spec: "PartitionSpec | Sequence[str | Sequence[str] | None]",
        dims: Sequence[str | None] = (),
        ndim: int | None = None,
    ) -> "Layout":
        """From a PartitionSpec; with `ndim`, dims it leaves out are not split."""
        if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
            raise MeshwrightError(f"{spec} holds partial sums; a layout says where dims go only")
        axes = tuple(axes_of(entry, spec) for entry in spec)
        rank = ndim if ndim is not None else (len(dims) or len(axes))
        if len(axes) > rank:
            raise MeshwrightError(
                f"{AxesByDim(spec)} names {count(len(axes), 'dim')}, the array has {rank}; "
                "leave out what it does not have"
            )
        return cls(axes + ((),) * (rank - len(axes)), name_dims(dims))

    @classmethod
    def whole(cls, dims: Sequence[str | None]) -> "Layout":
        """Nothing is split: `Layout.whole(("embed", None))`."""
        return cls(((),) * len(dims), name_dims(dims))

    @property
    def ndim(self) -> int:
        return len(self.axes)

    @property
    def used_axes(self) -> tuple[str, ...]:
        return tuple(axis for axes in self.axes for axis in axes)

    @functools.cached_property
    def spec(self) -> "PartitionSpec":
        """The PartitionSpec, without trailing Nones; a single axis is not a tuple."""
        entries = [axes[0] if len(axes) == 1 else (axes or None) for axes in self.axes]
        while entries and entries[-1] is None:
            entries.pop()
        from meshwright.layouts.jax_arrays import PartitionSpec

        return PartitionSpec(*entries)

    @property
    def expression(self) -> Expression:
        """In the named form; dims whose name the notation cannot hold ('conv1') are letters."""
        names = name_dims([dim if is_dim_name(dim) else None for dim in self.dims])
        entries = (Entry(name, axes=axes) for name, axes in zip(names, self.axes, strict=True))
        return Expression(names, tuple(entries))

    def __str__(self) -> str:
        return str(self.expression)

    def _repr_html_(self) -> str:
        columns = [Column("dim", right=False), Column("split over", right=False)]
        pairs = zip(self.expression.left, self.axes, strict=False)
        lines = [Row((str(dim), "+".join(axes) or "nothing")) for dim, axes in pairs]
        return text_html(str(self)) + table_html(columns, lines)

    def numbers(self, mesh_shape: Mapping[str, int]) -> Expression:
        """The same placement in numbers, as einshard writes it: `a b -> b2 a4`.

        Not every layout can be: a dim's axes must be neighbours in the mesh, in mesh order.
        """
        names = self.expression.left
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
            used = [axis for axis in axes if mesh_shape[axis] > 1]
            if used and (i, used) not in runs:
                raise MeshwrightError(
                    f"layout '{self}' cannot be written in numbers on this mesh: {'+'.join(used)} "
                    f"are not neighbours in the mesh order ({', '.join(mesh_shape)}); keep the "
                    "named form"
                )
        entries = [
            Entry(
                None if dim is None else names[dim],
                math.prod(mesh_shape[axis] for axis in axes),
            )
            for dim, axes in runs
        ]
        split = {dim for dim, _ in runs}
        rest = [Entry(name) for i, name in enumerate(names) if i not in split]
        return Expression(names, (*entries, *rest))

    def shard_shape(self, shape: Sequence[int], mesh_shape: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of one shard of an array of `shape`."""
        return tuple(
            size // math.prod(mesh_shape[axis] for axis in axes)
            for size, axes in zip(shape, self.axes, strict=True)
        )

    def shard_indices(self, mesh_shape: Mapping[str, int]) -> np.ndarray:
        """Which part of each dim every position of the mesh holds: [*mesh, dims]."""
        position = dict(zip(mesh_shape, np.indices(tuple(mesh_shape.values())), strict=True))
        indices = np.zeros((*mesh_shape.values(), self.ndim), dtype=int)
        for dim, axes in enumerate(self.axes):
            for axis in axes:
                indices[..., dim] = indices[..., dim] * mesh_shape[axis] + position[axis]
        return indices

    def slices(self, shape: Sequence[int], mesh_shape: Mapping[str, int]) -> np.ndarray:
        """The slice of an array of `shape` at every position of the mesh.

        >>> Layout.parse("a b -> a@x b").slices((8, 2), {"x": 4})[1]
        (slice(2, 4, None), slice(0, 2, None))
        """
        shape = whole_numbers(shape, "shape")
        if not isinstance(mesh_shape, Mapping):
            raise MeshwrightError(f"mesh_shape={mesh_shape!r} is not axis sizes; give mesh.shape")
        whole_numbers(mesh_shape.values(), "mesh sizes", at_least=1)
        shard = self.check(mesh_shape, shape).shard_shape(shape, mesh_shape)
        found = np.empty(tuple(mesh_shape.values()), dtype=object)
        indices = self.shard_indices(mesh_shape)
        for place in np.ndindex(*found.shape):
            starts = indices[place] * shard
            found[place] = tuple(map(slice, starts.tolist(), (starts + shard).tolist()))
        return found

    def copies(self, mesh_shape: Mapping[str, int]) -> int:
        """The number of devices that hold the same shard."""
        return math.prod(size for axis, size in mesh_shape.items() if axis not in self.used_axes)

    # Checks: each raises or returns the layout. `what` and `given` are for the message: which
    # array, and the layout as the user wrote it.

    def check(
        self,
        mesh_shape: Mapping[str, int] | None,
        shape: Sequence[int] | None,
        what: str = "array",
        given: object = None,
    ) -> "Layout":
        """Raise unless it fits this mesh and this shape, where they are known."""
        given = self if given is None else given
        if shape is not None:
            self.check_rank(len(shape), what, given)
        if mesh_shape is not None:
            self._check_axes(mesh_shape, what, given)
        if mesh_shape is not None and shape is not None:
            self._check_divides(mesh_shape, shape, what, given)
        return self

    def check_rank(self, ndim: int, what: str = "array", given: object = None) -> "Layout":
        if ndim != self.ndim:
            raise MeshwrightError(
                f"{what} has {count(ndim, 'dim')}, layout '{self if given is None else given}' is "
                f"for {count(self.ndim, 'dim')}; name one dim for each"
            )
        return self

    def _check_axes(self, mesh_shape: Mapping[str, int], what: str, given: object) -> None:
        for axis in self.used_axes:
            if axis in mesh_shape:
                continue
            if any(name.startswith(RESERVED_AXIS) for name in mesh_shape):
                raise MeshwrightError(
                    f"{what}: layout '{given}' names mesh axis {axis!r} but no mesh is given; pass "
                    "mesh=, or set one: with jax.set_mesh(mw.mesh('…'))"
                )
            hint = did_you_mean(axis, mesh_shape)
            if axis in STANDARD_AXES:
                hint = (
                    f"; name one of its axes, or add {axis}=1 to the mesh (which then splits "
                    f"nothing over {axis})"
                )
            raise MeshwrightError(
                f"{what}: layout '{given}' uses mesh axis {axis!r}, which the mesh "
                f"({mesh_text(mesh_shape)}) does not have{hint}"
            )

    def _check_divides(
        self, mesh_shape: Mapping[str, int], shape: Sequence[int], what: str, given: object
    ) -> None:
        for name, size, axes in zip(self.dims, shape, self.axes, strict=True):
            parts = math.prod(mesh_shape[axis] for axis in axes)
            if size % parts:
                over = "+".join(f"{axis}={mesh_shape[axis]}" for axis in axes)
                over = "" if axes[0].startswith(RESERVED_AXIS) else f" ({over})"
                most = max(d for d in divisors(size) if d <= parts)
                raise MeshwrightError(
                    f"{what} of shape {tuple(shape)}: dim {name!r} of size {size} cannot be split "
                    f"in {parts}{over} by layout '{given}'; make it "
                    f"{nearest_multiples(size, parts)}, or split it in at most {most}"
                )


class AxesByDim(tuple[Any, ...]):
    """The mesh axes of the first dims of an array, which may have more, as in a PartitionSpec."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"P{tuple(self)!r}"


def is_of_jax(value: object, *names: str) -> bool:
    """Whether a value is of one of these classes of jax.sharding; jax is not imported for it."""
    module = sys.modules.get("jax.sharding")
    return module is not None and isinstance(value, tuple(getattr(module, name) for name in names))


def axes_of(entry: object, given: object) -> tuple[str, ...]:
    """One dim's mesh axes, as a PartitionSpec writes them: None, a name, or several."""
    if entry is None:
        return ()
    if isinstance(entry, str):
        return (entry,)
    if isinstance(entry, tuple | list) and all(isinstance(axis, str) for axis in entry):
        return tuple(entry)
    raise MeshwrightError(
        f"{given!r} has the entry {entry!r}; each dim takes a mesh axis, a tuple of them, or None"
    )


def name_dims(dims: Iterable[str | None]) -> tuple[str, ...]:
    """Names for all dims: those given, and unused letters for the others."""
    dims = tuple(dims)
    free = (name for name in _letters() if name not in dims)
    return tuple(next(free) if dim is None else dim for dim in dims)


@functools.lru_cache(maxsize=4096)
def _of_expression(expression: Expression, ndim: int | None) -> Layout:
    dims = expression.dims(ndim)
    axes = {entry.dim: entry.axes for entry in expression.right}
    return Layout(tuple(axes[dim] if dim is not None else () for dim in dims), name_dims(dims))


def _letters() -> Iterator[str]:
    width = 1
    while True:
        for letter in "abcdefghijklmnopqrstuvwxyz":
            yield letter * width
        width += 1
