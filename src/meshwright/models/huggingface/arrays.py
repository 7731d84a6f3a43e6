"""Hugging Face's tensors of a model beside our arrays.

Theirs are one tensor a layer, output dims first, heads and head_dim as one dim. Ours are stacked
over layers, input dims first.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

from meshwright.layouts import ArraySpec, tree_paths


@dataclasses.dataclass(frozen=True)
class HfArray:
    """One of our arrays and the tensor, or the tensor a layer, that it is made of."""

    path: str
    name: str  # theirs, with {layer} if there is one a layer
    shape: tuple[int, ...]  # of a tensor of theirs
    unfolded: tuple[int, ...]  # the same with the dims in brackets apart
    order: tuple[int, ...]  # our dim i, without layers, is their unfolded dim order[i]
    layers: int | None  # how many tensors, None for one that is no layer's

    @property
    def stack(self) -> str:
        """What the names of the arrays of the same layers begin with; of a single one, all."""
        return self.name.partition("{layer}")[0]

    @property
    def names(self) -> list[str]:
        """Theirs, in the order of our dim `layers`."""
        if self.layers is None:
            return [self.name]
        return [self.name.format(layer=layer) for layer in range(self.layers)]


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


def hf_arrays(specs: Any, names: Mapping[str, tuple[str, str]]) -> dict[str, HfArray]:
    """Every array by path; `names` has for each path the name of theirs and its dims."""
    by_path = dict(zip(tree_paths(specs), jax.tree.leaves(specs), strict=True))
    return {path: _hf_array(path, by_path[path], *names[path]) for path in names if path in by_path}


def _hf_array(path: str, spec: ArraySpec, name: str, text: str) -> HfArray:
    size = dict(zip(spec.dims, spec.shape, strict=True))
    folds = [part.split() for part in _parts(text)]
    unfolded = [dim for fold in folds for dim in fold]
    ours = [dim for dim in spec.dims if dim != "layers"]
    return HfArray(
        path=path,
        name=name,
        shape=tuple(math.prod(size[dim] for dim in fold) for fold in folds),
        unfolded=tuple(size[dim] for dim in unfolded),
        order=tuple(unfolded.index(str(dim)) for dim in ours),
        layers=size.get("layers"),
    )


def _parts(text: str) -> list[str]:
    """`"(heads head_dim) embed"` as `["heads head_dim", "embed"]`."""
    parts: list[str] = []
    for i, piece in enumerate(text.replace(")", "(").split("(")):
        parts += [piece] if i % 2 else piece.split()
    return parts
