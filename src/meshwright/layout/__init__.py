"""The notation: expressions, path rules and logical-axis rules, to one value, the Layout."""

from meshwright.layout.arrays import ArraySpec
from meshwright.layout.explanation import Explanation, explain
from meshwright.layout.initial import Constant, Normal, create
from meshwright.layout.layout import Layout
from meshwright.layout.logical_rules import Rules, standard_rules
from meshwright.layout.optimizer import optimizer_layouts
from meshwright.layout.path_rules import PathRules
from meshwright.layout.place import layouts, shard, sharding, shardings

__all__ = [
    "ArraySpec",
    "Constant",
    "Explanation",
    "Layout",
    "Normal",
    "PathRules",
    "Rules",
    "create",
    "explain",
    "layouts",
    "optimizer_layouts",
    "shard",
    "sharding",
    "shardings",
    "standard_rules",
]
