"""`explain(model, mesh, rules)`: the table of a placement, with the shard of every rank."""

import dataclasses
import math
from typing import Any

import numpy as np
from torch import nn

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.layouts import Explanation, PlacedArray, replication_notes
from meshwright.present import Column, Row, table_text
from meshwright.torch.checks import check_model
from meshwright.torch.placement import Placement, Placements, Slices, place, tied

_SHOWN = 8  # ranks in the printed table of shards


@dataclasses.dataclass(frozen=True, repr=False)
class TorchExplanation(Explanation):
    """The placement of every parameter; `shards(path)` has the slices of every rank."""

    placements: Placements | None = None

    def shards(self, path: str) -> dict[int, Slices]:
        """The slices of a parameter that each rank holds: `{0: (slice(0, 2), slice(0, 6)), …}`."""
        assert self.placements is not None
        name = path.replace("/", ".")
        placed = self.placements.by_name.get(name)
        if placed is None:
            known = self.placements.by_name
            raise MeshwrightError(f"no parameter {name!r}{did_you_mean(name, known)}")
        shape = self.placements.spec.shape
        positions = np.ndindex(*shape.values())
        return {
            rank: placed.slices(shape, dict(zip(shape, position, strict=True)))
            for rank, position in enumerate(positions)
        }

    def text(self, collapse: bool = True, width: int = 160) -> str:
        return f"{super().text(collapse, width)}\n\n{self._shards_text(width)}"

    def _shards_text(self, width: int) -> str:
        """Which rows and columns each rank holds, of one array of each kind."""
        ranks = min(math.prod(self.mesh_shape.values()), _SHOWN)
        columns = [Column("shard", right=False)]
        columns += [Column(f"rank {rank}", importance=ranks - rank) for rank in range(ranks)]
        rows, seen = [], set()
        for row in self.rows:
            kind = (row.path.rpartition("/")[0].rpartition("/")[2], row.shape)
            if kind not in seen:
                seen.add(kind)
                shards = self.shards(row.path)
                cells = [_slices_text(shards[rank], row.shape) for rank in range(ranks)]
                rows.append(Row((row.path, *cells)))
        return table_text(columns, rows, width)


def explain(model: nn.Module, mesh: Any, rules: Any = None) -> TorchExplanation:
    """Where every parameter of a model goes, checked as `parallelize` would.

    The model may be on the meta device, and `mesh` may be text with all sizes: no process group
    is needed.
    """
    placements = place(model, mesh, rules)
    check_model(model, placements)
    copies = {
        name
        for names in tied(dict(model.named_parameters(remove_duplicate=False)))
        for name in names[1:]
    }
    rows = [
        _row(placed, placements)
        for name, placed in placements.by_name.items()
        if name not in copies
    ]
    shape = dict(placements.spec.shape)
    notes = tuple(replication_notes(rows, shape))
    return TorchExplanation(tuple(rows), shape, (), notes, placements)


def _row(placed: Placement, placements: Placements) -> PlacedArray:
    shape = placements.spec.shape
    itemsize = placed.dtype.itemsize
    elements = math.prod(placed.shape)
    return PlacedArray(
        path=placed.path,
        shape=placed.shape,
        dtype=str(placed.dtype).removeprefix("torch."),
        layout=placed.layout,
        bytes_total=elements * itemsize,
        bytes_per_device=placed.largest_shard(shape) * itemsize,
        copies=placed.layout.copies(shape),
        rule=placed.rule,
        lost=placed.lost,
        expression=placed.layout.expression,
        num_elements=elements,
    )


def _slices_text(slices: Slices, shape: tuple[int, ...]) -> str:
    parts = [
        ":" if (part.start, part.stop) == (0, size) else f"{part.start}:{part.stop}"
        for part, size in zip(slices, shape, strict=True)
    ]
    return f"[{', '.join(parts)}]"
