"""Trees of arrays: every tree of jax, or where jax is not installed dicts, lists and tuples.

>>> flatten_with_paths({"layers": [{"wq": 1}, {"wq": 2}]})[1][0]
(DictKey(key='layers'), SequenceKey(idx=1), DictKey(key='wq'))
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

IsLeaf = Callable[[Any], bool]


def flatten(tree: Any, is_leaf: IsLeaf | None = None) -> tuple[list[Any], Any]:
    """The leaves, and the structure: it has `unflatten` and `flatten_up_to` as in jax."""
    jax_arrays = with_jax()
    if jax_arrays is not None:
        leaves, treedef = jax_arrays.tree_flatten(tree, is_leaf=is_leaf)
        return leaves, treedef
    node = _node(tree, is_leaf)
    return node.flatten_up_to(tree), node


def flatten_with_paths(
    tree: Any, is_leaf: IsLeaf | None = None
) -> list[tuple[tuple[Any, ...], Any]]:
    """(path, leaf) of every leaf."""
    jax_arrays = with_jax()
    if jax_arrays is not None:
        return [*jax_arrays.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]]
    node = _node(tree, is_leaf)
    return [*zip(node.paths(), node.flatten_up_to(tree), strict=True)]


def tree_paths(tree: Any) -> list[str]:
    """The path of every leaf: `layers/0/wq/kernel`."""
    return [path_text(path) for path, _ in flatten_with_paths(tree)]


def path_text(path: Sequence[Any]) -> str:
    """`layers/0/wq`, from the keys that lead to a leaf."""
    return "/".join(str(_key_name(key)) for key in path)


def _key_name(key: Any) -> Any:
    for kind in ("key", "idx", "name"):
        if hasattr(key, kind):
            return getattr(key, kind)
    return key


@functools.cache
def with_jax() -> Any:
    """The part of this package that needs jax; None where jax is not installed."""
    try:
        from meshwright.layouts import jax_arrays
    except ImportError:
        return None
    return jax_arrays


@dataclasses.dataclass(frozen=True)
class DictKey:
    key: Any


@dataclasses.dataclass(frozen=True)
class SequenceKey:
    idx: int


@dataclasses.dataclass(frozen=True)
class Node:
    """The structure of a tree without jax; a leaf has no container."""

    container: type | None
    keys: tuple[Any, ...] = ()
    children: "tuple[Node, ...]" = ()

    def paths(self) -> Iterator[tuple[Any, ...]]:
        if self.container is None:
            yield ()
        for key, child in zip(self.keys, self.children, strict=True):
            yield from ((key, *path) for path in child.paths())

    def flatten_up_to(self, tree: Any) -> list[Any]:
        """The parts of `tree` at the places of this structure's leaves."""
        if self.container is None:
            return [tree]
        own = dataclasses.replace(
            _node(tree, lambda part: part is not tree), children=self.children
        )
        if self != own:
            raise ValueError(f"{type(tree).__name__} is not a {self.container.__name__} like it")
        below = [tree[_key_name(key)] for key in self.keys]
        parts = zip(self.children, below, strict=True)
        return [leaf for child, part in parts for leaf in child.flatten_up_to(part)]

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        return self._take(iter(leaves))

    def _take(self, leaves: Iterator[Any]) -> Any:
        if self.container is None:
            return next(leaves)
        values = [child._take(leaves) for child in self.children]
        if self.container is type(None):
            return None
        if self.container is dict:
            return dict(zip((key.key for key in self.keys), values, strict=True))
        is_named = hasattr(self.container, "_fields")
        return self.container(*values) if is_named else self.container(values)


def _node(tree: Any, is_leaf: IsLeaf | None) -> Node:
    if is_leaf is not None and is_leaf(tree):
        return Node(None)
    if isinstance(tree, dict):
        keys = sorted(tree)
        children = tuple(_node(tree[key], is_leaf) for key in keys)
        return Node(dict, tuple(map(DictKey, keys)), children)
    if isinstance(tree, list | tuple):
        indices = tuple(map(SequenceKey, range(len(tree))))
        return Node(type(tree), indices, tuple(_node(part, is_leaf) for part in tree))
    return Node(type(None)) if tree is None else Node(None)
