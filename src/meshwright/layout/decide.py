"""Where every array of a tree goes, who decided, and what is wrong with it.

One walk serves `shard`, `shardings` and `explain`; they differ in what they do with the answer.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from meshwright.errors import MeshwrightError
from meshwright.layout.arrays import ArraySpec, dim_names, is_described
from meshwright.layout.expression import Expression
from meshwright.layout.layout import Layout, name_dims
from meshwright.layout.logical_rules import Rules
from meshwright.layout.path_rules import PathRules
from meshwright.layout.resolve import resolve
from meshwright.mesh import AnyMesh


@dataclasses.dataclass(frozen=True)
class Decision:
    """A placement: the layout, the mesh it speaks of, the rule that decided, who lost and why."""

    layout: Layout
    mesh: AnyMesh
    rule: str
    lost: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class TreeDecisions:
    """One decision for each leaf; arrays of one shape under one rule share theirs."""

    tree: Any
    leaves: list[Any]
    treedef: Any
    decisions: list[Decision]
    problems: list[str]  # what strict placement refuses

    @property
    def paths(self) -> list[str]:
        return tree_paths(self.tree)

    def raise_problems(self) -> None:
        if not self.problems:
            return
        if len(self.problems) == 1:
            raise MeshwrightError(self.problems[0])
        more = len(self.problems) - 8
        listed = self.problems[:8] + ([f"… and {more} more"] if more > 0 else [])
        raise MeshwrightError("\n- ".join([f"{len(self.problems)} mistakes:", *listed]))


def decide(tree: Any, rules: Any, mesh: AnyMesh, dims: Any = None) -> TreeDecisions:
    """Decide for every leaf of `tree`.

    `rules`: one layout for all, Rules (dims from ArraySpec leaves or from `dims`), PathRules, or a
    tree of layouts (a prefix of `tree`).
    """
    leaves, treedef = jax.tree.flatten(tree)
    paths = functools.cache(lambda: tree_paths(tree))  # slow for large trees, and rarely needed
    if isinstance(rules, Rules):
        keys: list[Any] = _dims_of_leaves(treedef, leaves, dims)
        decide_one = functools.partial(_by_dims, rules, mesh)
    elif isinstance(rules, PathRules):
        keys = [rules.find(path) for path in paths()]
        decide_one = functools.partial(_by_path, rules, mesh)
    else:
        keys = _broadcast(rules, tree, treedef)
        decide_one = functools.partial(_as_given, mesh)
    # arrays that share a key (their dims, their rule, their layout) and a shape share the answer
    known: dict[Any, Decision] = {}
    mistakes: dict[Any, list[str]] = {}  # the message, then the paths it also holds for
    decisions = []
    for i, (leaf, key) in enumerate(zip(leaves, keys, strict=True)):
        shape = leaf.shape if hasattr(leaf, "shape") else None
        decision = known.get((key, shape))
        if decision is None:
            path = paths()[i]
            try:
                decision = decide_one(path, _shape(leaf, path), key)
            except MeshwrightError as mistake:
                mistakes[key, shape] = [_about(path, mistake)]
                names = leaf.dims if isinstance(leaf, ArraySpec) else ()
                whole = Layout(((),) * len(shape or ()), name_dims(names))
                decision = Decision(whole, mesh, "undecided")
            known[key, shape] = decision
        elif (key, shape) in mistakes:
            mistakes[key, shape].append(paths()[i])
        decisions.append(decision)
    problems = [_with_others(*mistake) for mistake in mistakes.values()]
    if not problems and isinstance(rules, Rules):
        problems = _dims_never_seen(rules, keys)
    if not problems and isinstance(rules, PathRules):
        problems = rules.never_decided(paths(), set(keys))
    return TreeDecisions(tree, leaves, treedef, decisions, problems)


def tree_paths(tree: Any) -> list[str]:
    """The path of every leaf: `layers/0/wq/kernel`."""
    with_paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [path_text(path) for path, _ in with_paths]


def path_text(path: Sequence[Any]) -> str:
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def _by_dims(
    rules: Rules, mesh: AnyMesh, path: str, shape: tuple[int, ...], dims: tuple[str, ...] | None
) -> Decision:
    if dims is None and shape:
        raise MeshwrightError(
            f"array {path!r} has no dim names, which logical rules need: describe it with "
            "mw.ArraySpec(shape, dims), or pass dims= (a tree like this one, of texts such as "
            "'embed mlp')"
        )
    outcome = rules.outcome(dims or ())
    outcome.layout.check(mesh.shape, shape, f"array {path!r}")
    return Decision(
        outcome.layout,
        mesh,
        ", ".join(str(rules.rules[i]) for i in outcome.fired) or "no dims",
        tuple(f"{rules.rules[i]} ({why})" for i, why in outcome.lost),
    )


def _by_path(
    rules: PathRules, mesh: AnyMesh, path: str, shape: tuple[int, ...], position: int | None
) -> Decision:
    if all(size == 1 for size in shape):
        return Decision(Layout(((),) * len(shape)), mesh, "one element")
    rule = rules.match(path)
    layout, own = resolve(rule.layout, len(shape), mesh)
    layout.check(own.shape, shape, f"array {path!r}", rule.given or rule.layout)
    return Decision(layout, own, repr(rule.pattern))


def _as_given(mesh: AnyMesh, path: str, shape: tuple[int, ...], given: Any) -> Decision:
    layout, own = resolve(given, len(shape), mesh)
    layout.check(own.shape, shape, f"array {path!r}" if path else "array", given)
    return Decision(layout, own, "given")


def _dims_never_seen(rules: Rules, keys: Sequence[Any]) -> list[str]:
    seen = {dim for dims in keys for dim in dims or ()}
    return [
        f"rules for dim {dim!r} match no array; drop them, or say that other arrays have it: "
        f"Rules(…, optional=({dim!r},))"
        for dim in dict.fromkeys(rule.dim for rule in rules.rules)
        if dim not in seen and dim not in rules.optional
    ]


def _broadcast(layouts: Any, tree: Any, treedef: Any) -> list[Any]:
    """One layout for each leaf, from one for all or from a tree that is a prefix of `tree`."""
    if is_layout(layouts):
        return [layouts] * treedef.num_leaves
    given: list[Any]
    structure: Any
    given, structure = jax.tree.flatten(layouts, is_leaf=is_layout)
    for layout in given:
        if not is_layout(layout):
            raise MeshwrightError(
                f"{layout!r} is not a layout; give an expression ('x y -> x y*'), a PartitionSpec, "
                "a tuple of axes, a Layout, PathRules, Rules, or a tree of layouts"
            )
    try:
        parts = structure.flatten_up_to(tree)
    except (ValueError, TypeError, KeyError):
        raise MeshwrightError(
            f"the tree of layouts does not match the tree of arrays: {_difference(layouts, tree)}; "
            "give one layout for all, a layout for each array, PathRules or Rules"
        ) from None
    spread = []
    for layout, part in zip(given, parts, strict=True):
        spread += [layout] * (1 if is_described(part) else len(jax.tree.leaves(part)))
    return spread


def _difference(layouts: Any, tree: Any) -> str:
    """In words, how a tree of layouts is no prefix of a tree of arrays."""
    arrays = tree_paths(tree)
    laid_out = tree_paths(jax.tree.map(lambda _: 0, layouts, is_leaf=is_layout))
    extra = [p for p in laid_out if not any(a == p or a.startswith(f"{p}/") for a in arrays)]
    missing = [a for a in arrays if not any(a == p or a.startswith(f"{p}/") for p in laid_out)]
    words = []
    if extra:
        words.append(f"there is no array {', '.join(map(repr, extra[:3]))}")
    if missing:
        words.append(f"there is no layout for {', '.join(map(repr, missing[:3]))}")
    return " and ".join(words) or "their containers differ in kind (a list is not a tuple)"


def is_layout(value: Any) -> bool:
    """Whether a value stands for one layout (a tuple does if it holds axes)."""
    if isinstance(value, str | Layout | PartitionSpec | Expression):
        return True
    return type(value) is tuple and all(
        entry is None
        or (isinstance(entry, str) and "->" not in entry)
        or (type(entry) is tuple and entry and all(isinstance(axis, str) for axis in entry))
        for entry in value
    )


def _dims_of_leaves(treedef: Any, leaves: list[Any], dims: Any) -> list[Any]:
    """The dim names of each leaf: from `dims`, else from leaves that carry them."""
    if dims is None:
        return [leaf.dims if isinstance(leaf, ArraySpec) else None for leaf in leaves]
    try:
        given = treedef.flatten_up_to(dims)
    except (ValueError, TypeError, KeyError) as reason:
        raise MeshwrightError(
            "dims= does not have the structure of the tree of arrays: "
            f"{str(reason).splitlines()[0]}"
        ) from None
    return [None if names is None else dim_names(names) for names in given]


def _shape(leaf: Any, path: str) -> tuple[int, ...]:
    if is_described(leaf):
        return tuple(leaf.shape)
    if isinstance(leaf, bool | int | float | complex):
        return ()
    raise MeshwrightError(
        f"{path!r} is a {type(leaf).__name__}, not an array; give arrays, jax.ShapeDtypeStruct or "
        "mw.ArraySpec"
        if path
        else f"{leaf!r} is not an array; give arrays, jax.ShapeDtypeStruct or mw.ArraySpec"
    )


def _with_others(mistake: str, *also: str) -> str:
    if not also:
        return mistake
    return (
        f"{mistake} (and {len(also)} more alike: {', '.join(also[:2])}{', …' if also[2:] else ''})"
    )


def _about(path: str, problem: MeshwrightError) -> str:
    text = str(problem)
    return text if not path or repr(path) in text else f"array {path!r}: {text}"
