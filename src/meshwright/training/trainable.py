"""The trained part of a tree of arrays: what gradients, moments and updates are made of.

It is a tree like the parameters, with None for frozen arrays; of an array that stacks layers it has
those that are trained. Where all arrays are trained it is the tree itself.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
from jax import lax

from meshwright.layouts import ArraySpec
from meshwright.models import ADAPTER, adapted_names


def trained_specs(arrays: Any) -> Any:
    """The ArraySpecs of the trained part."""
    return jax.tree.map(lambda spec: spec.trained_part, arrays)


def trained_text(arrays: Any, total: int) -> str:
    """How many of `total` parameters are trained, in words."""
    specs = trained_specs(arrays)
    numbers = sum(math.prod(spec.unpadded_shape) for spec in jax.tree.leaves(specs))
    of = f", LoRA of {', '.join(adapted_names(specs))}" if ADAPTER in arrays else ""
    return f"trains {numbers:,} of {total:,} parameters{of}; the rest is frozen"


def unfrozen(arrays: Any, tree: Any) -> Any:
    """The arrays of which something is trained, with all of their layers."""
    return jax.tree.map(lambda spec, leaf: None if spec.trained is False else leaf, arrays, tree)


def with_unfrozen(arrays: Any, tree: Any, changed: Any) -> Any:
    """The tree with `changed`, which is like `unfrozen`, in place of those arrays."""
    return jax.tree.map(lambda _, leaf, new: leaf if new is None else new, arrays, tree, changed)


def trained_part(arrays: Any, tree: Any) -> Any:
    """Of a tree like the parameters, or like `unfrozen`, what is trained; it may be abstract."""

    def part(spec: ArraySpec, leaf: Any) -> Any:
        if isinstance(spec.trained, bool):
            return leaf if spec.trained else None
        if isinstance(leaf, jax.ShapeDtypeStruct):
            shape = (len(spec.trained), *leaf.shape[1:])
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=leaf.sharding)
        taken = [lax.slice_in_dim(leaf, start, stop) for start, stop in _runs(spec.trained)]
        return taken[0] if len(taken) == 1 else lax.concatenate(taken, 0)

    return jax.tree.map(part, arrays, tree)


def with_trained(arrays: Any, tree: Any, part: Any) -> Any:
    """The tree with a trained part in its place."""

    def put(spec: ArraySpec, leaf: Any, new: Any) -> Any:
        if isinstance(spec.trained, bool):
            return new if spec.trained else leaf
        done = 0
        for start, stop in _runs(spec.trained):
            layers = lax.slice_in_dim(new, done, done + stop - start)
            leaf = lax.dynamic_update_slice_in_dim(leaf, layers, start, 0)
            done += stop - start
        return leaf

    return jax.tree.map(put, arrays, tree, part)


def _runs(layers: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Consecutive layers as (first, last + 1)."""
    for _, run in itertools.groupby(enumerate(layers), lambda pair: pair[1] - pair[0]):
        members = [layer for _, layer in run]
        yield members[0], members[-1] + 1
