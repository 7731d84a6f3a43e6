"""What modules of Flax and Equinox say of their arrays; neither is imported here.

Flax keeps names of dims beside an array: in a box (`nn.with_logical_partitioning`) or in a variable
(`nnx.with_partitioning`). A module of Equinox holds functions and numbers beside its arrays, which
`equinox.partition` separates.
"""

import sys
from typing import Any

from meshwright.layouts.arrays import is_abstract
from meshwright.layouts.trees import flatten

_NNX_NAMES = ("out_sharding", "sharding_names", "sharding")  # by version of Flax


def dims_of_boxes(tree: Any) -> list[tuple[str | None, ...] | None]:
    """For each leaf the names of its dims that Flax keeps, None where there are none."""
    if "flax" not in sys.modules:
        return [None] * len(flatten(tree)[0])
    dims: list[tuple[str | None, ...] | None] = []
    for node in flatten(tree, is_leaf=lambda node: _box_names(node) is not None)[0]:
        names = _box_names(node)
        dims += [names] * (1 if names is None else len(flatten(node)[0]))
    return dims


def _box_names(node: Any) -> tuple[str | None, ...] | None:
    """The names in a box of flax.linen or in a variable of flax.nnx."""
    if not any(kind.__module__.startswith("flax.") for kind in type(node).__mro__):
        return None
    if hasattr(node, "get_metadata"):
        kept = node.get_metadata()
        names = next((kept[name] for name in _NNX_NAMES if kept.get(name)), None)
    else:
        names = getattr(node, "names", None)
    if not isinstance(names, tuple) and type(names).__name__ != "PartitionSpec":
        return None
    return tuple(name if isinstance(name, str) else None for name in names or ())


def only_arrays(tree: Any) -> Any:
    """The tree with None for what is no array in modules of Equinox; other trees as they are."""
    equinox = sys.modules.get("equinox")
    if equinox is None or not _holds_module(tree, equinox.Module):
        return tree
    return equinox.filter(tree, is_abstract)


def with_the_rest(arrays: Any, tree: Any) -> Any:
    """Arrays that were placed, in a module with all else that the tree holds."""
    equinox = sys.modules.get("equinox")
    if equinox is None or not _holds_module(tree, equinox.Module):
        return arrays
    return equinox.combine(arrays, tree)


def _holds_module(tree: Any, module: type) -> bool:
    nodes, _ = flatten(tree, is_leaf=lambda node: isinstance(node, module))
    return any(isinstance(node, module) for node in nodes)
