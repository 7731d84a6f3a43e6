"""The notation: expressions, path rules and logical rules, which all give a Layout."""

from meshwright.layouts.arrays import ArraySpec, is_abstract
from meshwright.layouts.decide import path_text, tree_paths
from meshwright.layouts.explanation import Explanation, explain
from meshwright.layouts.initial import Constant, Normal, create
from meshwright.layouts.layout import Layout, axes_of
from meshwright.layouts.logical_rules import Rules, standard_rules
from meshwright.layouts.optimizer import optimizer_layouts
from meshwright.layouts.padding import fit, resized_like, stored
from meshwright.layouts.path_rules import PathRules
from meshwright.layouts.place import layout_tree, shard, sharding, shardings
from meshwright.layouts.resolve import LayoutLike, resolve

__all__ = [
    "ArraySpec",
    "Constant",
    "Explanation",
    "Layout",
    "LayoutLike",
    "Normal",
    "PathRules",
    "Rules",
    "axes_of",
    "create",
    "explain",
    "fit",
    "is_abstract",
    "layout_tree",
    "optimizer_layouts",
    "path_text",
    "resized_like",
    "resolve",
    "shard",
    "sharding",
    "shardings",
    "standard_rules",
    "stored",
    "tree_paths",
]
