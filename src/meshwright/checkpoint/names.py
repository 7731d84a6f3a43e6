"""The name of every array of a tree: its path, without Python classes.

    >>> state = optax.TraceState(trace={"w": 1})
    >>> list(named_leaves({"optimizer": (state, optax.EmptyState()), "step": 2}))
    ['optimizer/0/trace/w', 'step']

A field of a namedtuple, a key of a dict and an attribute contribute their name, a list item its
index. So names on disk do not depend on classes, only on the names of fields.
"""

from typing import Any

import jax

from meshwright.errors import MeshwrightError
from meshwright.layouts import path_text


def named_leaves(tree: Any, what: str = "tree") -> dict[str, Any]:
    """Name → leaf, in the tree's order; two leaves with the same name are an error."""
    found: dict[str, Any] = {}
    on_disk: dict[str, str] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = path_text(path)
        parts = [path_text((key,)) for key in path]
        if not parts:
            raise MeshwrightError(
                f"{what} is a bare {type(leaf).__name__}; give a dict, so that every array has a "
                'name: {"params": …, "step": …}'
            )
        for part in parts:
            if not part or "/" in part or "\0" in part or part in (".", ".."):
                raise MeshwrightError(
                    f"{what}: the key {part!r} of {name!r} cannot be part of a name on disk; "
                    "rename it to text without '/'"
                )
        # Orbax joins the parts with dots, so 'a.b' and 'a/b' would be one array
        other = on_disk.setdefault(".".join(parts), name)
        if other != name or name in found:
            raise MeshwrightError(
                f"{what}: {other!r} and {name!r} would be one array on disk; rename one"
            )
        found[name] = leaf
    return found


def nested(leaves: dict[str, Any]) -> dict[str, Any]:
    """Names back to plain dicts: `{"a/b": 1}` → `{"a": {"b": 1}}`."""
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *folders, last = name.split("/")
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = leaf
    return tree


def like(tree: Any, leaves: dict[str, Any]) -> Any:
    """`tree` with its leaves replaced by those of the same names."""
    return jax.tree.unflatten(
        jax.tree.structure(tree), [leaves[name] for name in named_leaves(tree)]
    )
