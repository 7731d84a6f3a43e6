"""The notation: expressions, path rules and logical rules, which all give a Layout."""

from typing import TYPE_CHECKING

from meshwright.layouts.arrays import ArraySpec, is_abstract
from meshwright.layouts.decide import decide, layout_tree
from meshwright.layouts.explanation import Explanation, PlacedArray, explain, replication_notes
from meshwright.layouts.layout import Layout, axes_of
from meshwright.layouts.logical_rules import Rules, standard_rules
from meshwright.layouts.optimizer import optimizer_layouts
from meshwright.layouts.path_rules import PathMatcher, PathRules
from meshwright.layouts.resolve import resolve
from meshwright.layouts.trainable import select_trainable
from meshwright.layouts.trees import path_text, tree_paths
from meshwright.lazy import import_when_used

if TYPE_CHECKING:
    from meshwright.layouts.jax_arrays import (
        Constant,
        LayoutLike,
        Normal,
        create,
        einshard,
        fit,
        resized_like,
        shard,
        sharding,
        shardings,
        stored,
    )

__all__ = [
    "ArraySpec", "Constant", "Explanation", "Layout", "LayoutLike", "Normal", "PathMatcher",
    "PathRules", "PlacedArray", "Rules", "axes_of", "create", "decide", "einshard", "explain",
    "fit", "is_abstract", "layout_tree", "optimizer_layouts", "path_text", "replication_notes",
    "resized_like", "resolve", "select_trainable", "shard", "sharding", "shardings",
    "standard_rules", "stored", "tree_paths",
]  # fmt: skip

import_when_used(__name__)
