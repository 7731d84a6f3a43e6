"""The table of a placement: each array's layout, bytes, the rule that decided, and what lost.

    >>> arrays = {"w": ArraySpec((64, 256), "embed mlp")}
    >>> table = explain(arrays, Rules([("embed", "fsdp"), ("mlp", "tp")]), "fsdp=8,tp=4")
    >>> table.summary()
    '1 array, 16,384 elements, 64.0 KiB on 32 devices (fsdp=8,tp=4): 2.0 KiB per device, ...'

`print` shows a table; `.data()` is plain data, `.markdown()` a Markdown table.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.layouts.arrays import is_abstract
from meshwright.layouts.decide import TreeDecisions, decide
from meshwright.layouts.expression import Expression
from meshwright.layouts.layout import Layout
from meshwright.layouts.path_rules import PathRules
from meshwright.layouts.resolve import is_device_line, mesh_for_layouts
from meshwright.layouts.trees import with_jax
from meshwright.meshes import MeshShape
from meshwright.present import (
    Column,
    Row,
    aligned,
    bytes_text,
    count,
    mesh_text,
    paragraph,
    table_html,
    table_markdown,
    table_text,
    text_html,
    wrapped,
)

if TYPE_CHECKING:
    from meshwright.layouts.jax_arrays import MeshLike

LARGE = 16 * 2**20  # bytes per device from which a replicated array gets a warning
_COLUMNS = [
    Column("array", right=False),
    Column("shape"),
    Column("dtype", right=False, importance=2),
    Column("layout", right=False, least=24),
    Column("bytes/device"),
    Column("copies"),
    Column("decided by", right=False, importance=3),
    Column("lost", right=False, importance=1),
]

# a path segment that is a number, or ends in _number: layers/3, layers_3; not w1
_LAYER_NUMBER = re.compile(r"(?:(?<=/)|(?<=_)|^)\d+(?=/|$)")


@dataclasses.dataclass(frozen=True)
class PlacedArray:
    """One array's placement."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    layout: Layout
    bytes_total: int
    bytes_per_device: int
    copies: int
    rule: str
    lost: tuple[str, ...]
    expression: Expression  # the layout in the notation: by axes, or by numbers without a mesh
    num_elements: int  # without padding
    count: int = 1  # arrays alike, where rows are collapsed

    def cells(self) -> tuple[str, ...]:
        name = f"{self.path} ×{self.count}" if self.count > 1 else self.path
        return (
            name or "(array)",
            "×".join(map(str, self.shape)) or "scalar",
            self.dtype,
            self._where(),
            bytes_text(self.bytes_per_device),
            str(self.copies),
            self.rule.replace(" -> ", "→"),
            "; ".join(self.lost).replace(" -> ", "→"),
        )

    def pattern(self) -> str:
        """A regex for the path; collapsed rows stand for any layer number."""
        literal = re.escape(self.path)
        return f"^{literal.replace(re.escape('*'), '[0-9]+') if self.count > 1 else literal}$"

    def _where(self) -> str:
        if self.expression.counts_devices:
            return str(self.expression).partition("->")[2].strip()
        dims = zip(self.layout.dims, self.layout.axes, strict=True)
        return " ".join(f"{dim}@{'+'.join(axes)}" if axes else dim for dim, axes in dims)


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """The placement of every array, with problems and notes."""

    rows: tuple[PlacedArray, ...]
    mesh_shape: Mapping[str, int]
    problems: tuple[str, ...]  # mistakes (only with strict=False; otherwise they were raised)
    notes: tuple[str, ...]  # large replicated arrays

    @property
    def num_elements(self) -> int:
        return sum(row.num_elements * row.count for row in self.rows)

    @property
    def bytes_total(self) -> int:
        return sum(row.bytes_total * row.count for row in self.rows)

    @property
    def bytes_per_device(self) -> int:
        return sum(row.bytes_per_device * row.count for row in self.rows)

    def collapsed(self) -> "Explanation":
        """Merge rows that differ only in the numbers of their paths (the layers)."""
        groups: dict[Any, list[PlacedArray]] = {}
        for row in self.rows:
            alike = dataclasses.replace(row, path=_LAYER_NUMBER.sub("*", row.path))
            groups.setdefault(alike, []).append(row)
        rows = [
            rows[0] if len(rows) == 1 else dataclasses.replace(alike, count=len(rows))
            for alike, rows in groups.items()
        ]
        return dataclasses.replace(self, rows=tuple(rows))

    def path_rules(self) -> PathRules:
        """The same placement as path rules, one an array (or one for all alike, if collapsed)."""
        return PathRules([(row.pattern(), row.expression) for row in self.rows])

    def summary(self) -> str:
        devices = math.prod(self.mesh_shape.values())
        mesh = mesh_text(self.mesh_shape)
        arrays = sum(row.count for row in self.rows)
        even = self.bytes_total / devices
        return (
            f"{count(arrays, 'array')}, {count(self.num_elements, 'element')}, "
            f"{bytes_text(self.bytes_total)} on {count(devices, 'device')} ({mesh}): "
            f"{bytes_text(self.bytes_per_device)} per device"
            + (f", {self.bytes_per_device / even:.2f}× an even split" if even else "")
        )

    def __repr__(self) -> str:
        """Its summary; print it for the table."""
        return f"Explanation({self.summary()})"

    def data(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "mesh": dict(self.mesh_shape),
            "bytes_total": self.bytes_total,
            "bytes_per_device": self.bytes_per_device,
            "elements": self.num_elements,
            "problems": list(self.problems),
            "notes": list(self.notes),
            "arrays": [
                {
                    "path": row.path,
                    "shape": list(row.shape),
                    "dtype": row.dtype,
                    "dims": list(row.layout.dims),
                    "axes": [list(axes) for axes in row.layout.axes],
                    "layout": str(row.expression),
                    "bytes_per_device": row.bytes_per_device,
                    "copies": row.copies,
                    "rule": row.rule,
                    "lost": list(row.lost),
                    "count": row.count,
                }
                for row in self.rows
            ],
        }

    def markdown(self, collapse: bool = True) -> str:
        table = self.collapsed() if collapse else self
        lines = [table_markdown(*table._table()), "", self.summary()]
        lines += [f"- {line}" for line in self.remarks]
        return "\n".join(lines) + "\n"

    def text(self, collapse: bool = True, width: int = 160) -> str:
        """The table as plain text; `print(explanation)` is the same."""
        columns, rows = (self.collapsed() if collapse else self)._table()
        lines = [table_text(columns, rows, width), wrapped(self.summary(), width)]
        lines += [wrapped(f"! {line}", width) for line in self.remarks]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return table_html(*self.collapsed()._table()) + text_html(self.summary(), *self.remarks)

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        columns, rows = self.collapsed()._table()
        width = options.max_width
        yield from aligned(columns, rows, width)
        yield paragraph(self.summary(), width, 0)
        yield from (paragraph(f"! {line}", width, 0, style="yellow") for line in self.remarks)

    def _table(self) -> tuple[list[Column], list[Row]]:
        """Without the last column where nothing lost."""
        last = None if any(array.lost for array in self.rows) else -1
        return _COLUMNS[:last], [Row(array.cells()[:last]) for array in self.rows]

    @property
    def remarks(self) -> tuple[str, ...]:
        """Problems first, then notes."""
        return (*self.problems, *self.notes)


def explain(
    tree: Any,
    rules: Any,
    mesh: "MeshLike | None" = None,
    *,
    devices: Sequence[Any] | None = None,
    dims: Any = None,
    strict: bool = True,
) -> Explanation:
    """The layout of every array of `tree` under `rules` on `mesh`, as a table.

    Takes what `shard` takes; the arrays and the devices need not exist. `mesh` may be text with
    all sizes given. Mistakes (an unknown name, a rule that matches nothing, dims that do not
    divide) raise, or with `strict=False` are listed with the table.
    """
    concrete = mesh_for_layouts(mesh, devices)
    decided = decide(tree, rules, concrete, dims)
    if strict:
        decided.raise_problems()
    return _explanation(decided, concrete)


def _explanation(decided: TreeDecisions, mesh: MeshShape) -> Explanation:
    rows, shared = [], []
    for path, leaf, decision in zip(decided.paths, decided.leaves, decided.decisions, strict=True):
        shape = tuple(int(size) for size in leaf.shape) if is_abstract(leaf) else ()
        dtype, itemsize = _dtype(leaf)
        layout, mesh_shape = decision.layout, decision.mesh.shape
        by_number = is_device_line(decision.mesh)
        total = math.prod(shape) * itemsize
        rows.append(
            PlacedArray(
                path=path,
                shape=shape,
                dtype=dtype,
                layout=layout,
                bytes_total=total,
                bytes_per_device=math.prod(layout.shard_shape(shape, mesh_shape)) * itemsize,
                copies=layout.copies(mesh_shape),
                rule=decision.rule,
                lost=decision.lost,
                expression=layout.numbers(mesh_shape) if by_number else layout.expression,
                num_elements=math.prod(getattr(leaf, "unpadded_shape", shape)),
            )
        )
        if decision.mesh is mesh:
            shared.append(rows[-1])
    notes = replication_notes(shared, mesh.shape)
    return Explanation(tuple(rows), dict(mesh.shape), tuple(decided.problems), tuple(notes))


def _dtype(leaf: Any) -> tuple[str, int]:
    """Name and bytes of the dtype as jax will hold it: float64 is float32 unless x64 is enabled."""
    if not hasattr(leaf, "dtype") and not isinstance(leaf, bool | int | float | complex):
        return type(leaf).__name__, 0  # no array at all: listed among the problems
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    if (jax_arrays := with_jax()) is not None:
        dtype = jax_arrays.held_dtype(leaf)
    return str(dtype), dtype.itemsize


def replication_notes(rows: Sequence[PlacedArray], mesh_shape: Mapping[str, int]) -> list[str]:
    """Large arrays that are replicated along axes that split others (or split nothing at all)."""
    nontrivial = {axis for axis, size in mesh_shape.items() if size > 1}
    used = nontrivial & {axis for row in rows for axis in row.layout.used_axes}
    found: dict[tuple[str, ...], list[PlacedArray]] = {}
    for row in rows:
        along = nontrivial - set(row.layout.used_axes)
        idle = along & used if row.layout.used_axes else along
        if idle and row.bytes_per_device >= LARGE:
            found.setdefault(tuple(axis for axis in mesh_shape if axis in idle), []).append(row)
    notes = []
    for axes, large in found.items():
        names = ", ".join(row.path or "the array" for row in large[:3])
        more = f" and {len(large) - 3} more" if len(large) > 3 else ""
        where = (
            "every device" if set(axes) == nontrivial else f"every device along {'+'.join(axes)}"
        )
        total = bytes_text(sum(row.bytes_per_device for row in large))
        notes.append(
            f"the same on {where}: {names}{more}, {total} on each; split a dim, or leave it so if "
            "that is meant"
        )
    return notes
