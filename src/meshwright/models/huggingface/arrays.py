"""Hugging Face's tensors of a model beside our arrays.

Theirs are one tensor a layer, or one for each expert of a layer; output dims first, heads and
head_dim as one dim. Ours are stacked over layers and experts, input dims first. Several of ours may
be parts of one tensor of theirs, such as q, k and v in `(parts head_dim) embed`: the parts lie side
by side along the dim of theirs that is called `parts`, in the order of the table.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

from meshwright.layouts import ArraySpec, tree_paths


@dataclasses.dataclass(frozen=True)
class HfArray:
    """One of our arrays and the tensor, or the tensor a layer, that it is made of."""

    path: str
    name: str  # theirs, with {layer} if there is one a layer, {expert} if one an expert
    shape: tuple[int, ...]  # of a tensor of theirs
    unfolded: tuple[int, ...]  # the same with the dims in brackets apart
    window: tuple[slice | int, ...]  # which part of the unfolded tensor it is
    order: tuple[int, ...]  # our dim i, without layers, is dim order[i] of that part
    layers: int | None  # how many there are, None for a tensor that is no layer's
    experts: int | None = None  # how many of a layer, None for one tensor a layer
    first: int = 0  # the number of its first layer in their names

    @property
    def stack(self) -> tuple[str, int]:
        """What the names of the arrays of the same layers begin with; of a single one, all."""
        return self.name.partition("{layer}")[0], self.first

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Of what it is in a tensor of theirs."""
        pairs = zip(self.window, self.unfolded, strict=True)
        return tuple(len(range(size)[one]) for one, size in pairs if isinstance(one, slice))

    @property
    def stacked(self) -> tuple[int, ...]:
        """The sizes of our first dims, along which there is one tensor each."""
        return tuple(size for size in (self.layers, self.experts) if size is not None)

    @property
    def names(self) -> list[str]:
        """Theirs, in the order of our first dims."""
        return list(itertools.chain.from_iterable(self.names_by_layer))

    @property
    def names_by_layer(self) -> list[list[str]]:
        """The same, those of a layer together."""
        return [
            [self.name.format(layer=layer, expert=expert) for expert in range(self.experts or 1)]
            for layer in range(self.first, self.first + (self.layers or 1))
        ]


@dataclasses.dataclass(frozen=True)
class HfModel:
    """What the folder of one config holds."""

    specs: Any  # our arrays, a tree
    arrays: Mapping[str, HfArray]  # the same by path, in the order a Hugging Face model has them
    write_config: Callable[[str], dict[str, Any]]  # the fields of config.json, for a dtype
    source: str | None  # the folder that the config was read from
    # tensors that the files may hold too: the same as another
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ()  # endings of names of tensors that the model does not use
    prefix: str = ""  # of all names but the LM head's; some published files leave it out
    beyond: str = ""  # what names of tensors begin with that are of layers after the last
    config_file: str = "config.json"
    weights_file: str = "model.safetensors"  # where one holds all

    def without_prefix(self) -> "HfModel":
        """The same for files whose names lack the prefix."""

        def short(name: str) -> str:
            return name.removeprefix(self.prefix)

        return dataclasses.replace(
            self,
            arrays={
                path: dataclasses.replace(array, name=short(array.name))
                for path, array in self.arrays.items()
            },
            copies={short(copy): short(name) for copy, name in self.copies.items()},
            prefix="",
        )


def hf_arrays(
    specs: Any, names: Mapping[str, tuple[str, str]], first: Mapping[str, int] | None = None
) -> dict[str, HfArray]:
    """Every array by path; `names` has for each path the name of theirs and its dims.

    `first` has, by what its paths begin with, the number of a stack's first layer in their names.
    """
    by_path = dict(zip(tree_paths(specs), jax.tree.leaves(specs), strict=True))
    paths = [path for path in names if path in by_path]
    roots = {path: path.partition("/")[0] for path in paths}
    ends: dict[tuple[str, str], int] = {}  # of the parts so far, by stack and tensor
    starts = {}
    for path in paths:
        name, text = names[path]
        tensor = roots[path], name
        starts[path] = ends.get(tensor, 0)
        ends[tensor] = starts[path] + _part_size(by_path[path], text)
    found = {
        path: _hf_array(
            path, by_path[path], *names[path], starts[path], ends[roots[path], names[path][0]]
        )
        for path in paths
    }
    return {
        path: dataclasses.replace(array, first=(first or {}).get(roots[path], 0))
        for path, array in found.items()
    }


def _own_dim(spec: ArraySpec, text: str) -> str | None:
    """The dim of ours along which parts of their tensor lie; None: each part is one index."""
    named = {dim for part in _parts(text) for dim in part.split()}
    others = (str(dim) for dim in spec.dims if dim not in (*named, "layers", "experts"))
    return next(others, None)


def _part_size(spec: ArraySpec, text: str) -> int:
    own = _own_dim(spec, text)
    return 1 if own is None else spec.shape[spec.dims.index(own)]


def _hf_array(path: str, spec: ArraySpec, name: str, text: str, start: int, end: int) -> HfArray:
    size = dict(zip(spec.dims, spec.shape, strict=True)) | {"parts": end}
    folds = [part.split() for part in _parts(text)]
    unfolded = [dim for fold in folds for dim in fold]
    own = _own_dim(spec, text)
    part: slice | int = start if own is None else slice(start, start + _part_size(spec, text))
    kept = [own if dim == "parts" else dim for dim in unfolded if dim != "parts" or own]
    apart = [dim for dim in spec.dims if dim == "layers" or f"{{{str(dim)[:-1]}}}" in name]
    ours = [dim for dim in spec.dims if dim not in apart]
    return HfArray(
        path=path,
        name=name,
        shape=tuple(math.prod(size[dim] for dim in fold) for fold in folds),
        unfolded=tuple(size[dim] for dim in unfolded),
        window=tuple(part if dim == "parts" else slice(None) for dim in unfolded),
        order=tuple(kept.index(str(dim)) for dim in ours),
        layers=size.get("layers"),
        experts=size["experts"] if "experts" in apart else None,
    )


def _parts(text: str) -> list[str]:
    """`"(heads head_dim) embed"` as `["heads head_dim", "embed"]`."""
    parts: list[str] = []
    for i, piece in enumerate(text.replace(")", "(").split("(")):
        parts += [piece] if i % 2 else piece.split()
    return parts
