"""Decide the layout of every array of a tree, with the rule that decided, and list problems.

`shard`, `shardings` and `explain` all use this.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.arithmetic import first_repeated
from meshwright.errors import MeshwrightError
from meshwright.layouts.arrays import ArraySpec, dim_names, is_abstract
from meshwright.layouts.expression import Expression
from meshwright.layouts.layout import AxesByDim, Layout, is_of_jax
from meshwright.layouts.logical_rules import Rules
from meshwright.layouts.modules import dims_of_boxes, only_arrays
from meshwright.layouts.path_rules import PathRules
from meshwright.layouts.resolve import NOT_A_LAYOUT, is_device_line, mesh_for_layouts, resolve
from meshwright.layouts.trees import flatten, flatten_with_paths, path_text, tree_paths
from meshwright.meshes import MeshShape

if TYPE_CHECKING:
    from meshwright.layouts.jax_arrays import MeshLike


@dataclasses.dataclass(frozen=True)
class Decision:
    """A layout, its mesh, the rule that decided, and the rules that lost with the reason."""

    layout: Layout
    mesh: MeshShape
    rule: str
    lost: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class TreeDecisions:
    """One decision per leaf; arrays with the same shape and rule share one."""

    tree: Any
    leaves: list[Any]
    treedef: Any
    decisions: list[Decision]
    problems: list[str]  # errors with strict=True

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


def decide(tree: Any, rules: Any, mesh: MeshShape, dims: Any = None) -> TreeDecisions:
    """Decide for every leaf of `tree`.

    `rules`: one layout for all, Rules (dims from ArraySpec leaves, from Flax's names or from
    `dims`), PathRules, or a tree of layouts (a prefix of `tree`).
    """
    try:
        tree = only_arrays(tree)
        leaves, treedef = flatten(tree)
    except (ValueError, TypeError) as reason:  # keys that cannot be sorted
        raise MeshwrightError(f"this is no tree of arrays: {reason}") from None
    paths = functools.cache(lambda: tree_paths(tree))  # slow for large trees, and rarely needed
    if dims is not None and not isinstance(rules, Rules):
        raise MeshwrightError(
            "dims= names the dims of arrays for logical rules; with "
            f"{'path rules' if isinstance(rules, PathRules) else 'a layout'} leave it out"
        )
    if isinstance(rules, Rules):
        keys: list[Any] = _dims_of_leaves(tree, treedef, leaves, dims)
        decide_one = functools.partial(_by_dims, rules, mesh)
    elif isinstance(rules, PathRules):
        matcher = rules.matcher
        keys = [matcher.found_in(path) for path in paths()]
        decide_one = functools.partial(_by_path, rules, mesh)
    else:
        keys = one_layout_each(rules, tree)
        decide_one = functools.partial(_as_given, mesh)
    # arrays that share a key (their dims, their rules, their layout) and a shape share the answer
    known: dict[Any, Decision] = {}
    mistakes: dict[Any, list[str]] = {}  # the message, then the paths with the same problem
    decisions = []
    for i, (leaf, key) in enumerate(zip(leaves, keys, strict=True)):
        shape = leaf.shape if is_abstract(leaf) else None
        own_dims = leaf.dims if isinstance(leaf, ArraySpec) else _is_array(leaf)
        same = (key, shape, own_dims)
        decision = known.get(same)
        if decision is None:
            path = paths()[i]
            try:
                decision = decide_one(path, array_shape(leaf, path), key, leaf)
            except MeshwrightError as mistake:
                mistakes[same] = [_about(path, mistake)]
                decision = Decision(_whole(leaf), mesh, "undecided")
            known[same] = decision
        elif same in mistakes:
            mistakes[same].append(paths()[i])
        decisions.append(decision)
    problems = [_with_others(*mistake) for mistake in mistakes.values()]
    if not problems and isinstance(rules, Rules):
        problems = _dims_never_seen(rules, keys)
    if not problems and isinstance(rules, PathRules):
        problems = rules.never_decided(dict.fromkeys(keys), paths)
    return TreeDecisions(tree, leaves, treedef, decisions, problems)


def layout_tree(
    tree: Any,
    rules: Any,
    *,
    mesh: "MeshLike | None" = None,
    devices: Sequence[Any] | None = None,
    dims: Any = None,
) -> Any:
    """A tree of Layouts like `tree`: what the rules say, as values."""
    base = mesh_for_layouts(mesh, devices)
    decided = decide(tree, rules, base, dims)
    decided.raise_problems()
    if is_device_line(base):
        raise MeshwrightError(
            "layouts say which mesh axes split each dim, and no mesh is given; pass mesh="
        )
    return decided.treedef.unflatten([decision.layout for decision in decided.decisions])


def _by_dims(
    rules: Rules,
    mesh: MeshShape,
    path: str,
    shape: tuple[int, ...],
    dims: tuple[str, ...] | None,
    leaf: Any,
) -> Decision:
    if dims is None and shape:
        raise MeshwrightError(
            f"{_named(path)} has no dim names, which logical rules need: describe it with "
            "mw.ArraySpec(shape, dims), or pass dims= (a tree like this one, of texts such as "
            "'embed mlp')"
        )
    if isinstance(leaf, ArraySpec) and dims is not None and dims != leaf.dims:
        raise MeshwrightError(
            f"{_named(path)} has dims {leaf.dims} in its ArraySpec, but dims= says {dims}; give one"
        )
    outcome = rules.outcome(dims or ())
    outcome.layout.check(mesh.shape, shape, _named(path))
    return Decision(
        outcome.layout,
        mesh,
        ", ".join(map(str, outcome.fired)) or "no dims",
        tuple(f"{rule} ({why})" for rule, why in outcome.lost),
    )


def _by_path(
    rules: PathRules,
    mesh: MeshShape,
    path: str,
    shape: tuple[int, ...],
    found: tuple[int, ...],
    leaf: Any,
) -> Decision:
    if all(size == 1 for size in shape):
        return Decision(_whole(leaf), mesh, "one element")
    rule = rules.match(path)
    if rule.layout.counts_devices:
        layout, own = resolve(rule.layout, len(shape), mesh)
    else:  # a rule that splits nothing need not count devices
        layout, own = Layout.of_expression(rule.layout, len(shape)), mesh
    layout.check(own.shape, shape, _named(path), rule.given or rule.layout)
    lost = tuple(f"{rules.rules[i].pattern!r} (comes later)" for i in found[1:])
    return Decision(layout, own, repr(rule.pattern), lost)


def _as_given(
    mesh: MeshShape, path: str, shape: tuple[int, ...], given: Any, leaf: Any
) -> Decision:
    layout, own = resolve(given, len(shape), mesh)
    layout.check(own.shape, shape, _named(path), given)
    own_dims = leaf.dims if isinstance(leaf, ArraySpec) else layout.dims
    if layout.dims != own_dims and sorted(layout.dims) == sorted(map(str, own_dims)):
        raise MeshwrightError(
            f"{_named(path)} has dims {' '.join(map(str, own_dims))}, layout '{given}' names them "
            "in another order; a layout reads dims in the order of the array"
        )
    return Decision(layout, own, "given")


def _dims_never_seen(rules: Rules, keys: Sequence[Any]) -> list[str]:
    seen = {dim for dims in keys for dim in dims or ()} | rules.optional
    unseen = {rule.dim: rule for rule in reversed(rules.rules) if rule.dim not in seen}
    return [
        f"rules for dim {dim!r} match no array; drop them, or say that other arrays have it: "
        f"Rules(…, optional=({dim!r},)), in a rules file '{dim}? -> {rule.axes_text}'"
        for dim, rule in reversed(unseen.items())
    ]


def one_layout_each(layouts: Any, tree: Any) -> list[Any]:
    """One layout for each leaf of `tree`, from a single layout or a prefix tree of layouts.

    The tree of arrays decides what a tuple means: for a tuple of arrays it holds one layout each,
    for anything else it is one layout, like a PartitionSpec.
    """
    spread: list[Any] = []
    if not _spread(layouts, tree, spread):
        raise MeshwrightError(_mismatch(layouts, tree, ""))
    return spread


def _spread(layouts: Any, tree: Any, spread: list[Any]) -> bool:
    """Append a layout for each leaf; False where the two trees do not match."""
    if type(layouts) is tuple and type(tree) is not tuple:
        # with every entry it has, so that one too many for the array is noticed
        layouts = AxesByDim(axes or None for axes in Layout.of_spec(layouts).axes)
    if is_layout(layouts):
        spread += [layouts] * (1 if is_abstract(tree) else len(flatten(tree)[0]))
        return True
    if type(layouts) is dict and type(tree) is dict:  # by far the most common, and in jax's order
        return layouts.keys() == tree.keys() and all(
            _spread(layouts[key], tree[key], spread) for key in sorted(tree)
        )
    parts, shape = _one_level(layouts)
    arrays, tree_shape = _one_level(tree)
    if _is_leaf(layouts) or shape != tree_shape:
        return False
    return all(_spread(part, below, spread) for part, below in zip(parts, arrays, strict=True))


def _one_level(tree: Any) -> tuple[list[Any], Any]:
    return flatten(tree, is_leaf=lambda node: node is not tree)


def _one_level_names(tree: Any) -> list[str]:
    below = flatten_with_paths(tree, is_leaf=lambda node: node is not tree)
    return [path_text(path) for path, _ in below]


def _is_leaf(tree: Any) -> bool:
    """Whether jax sees no container in it; an empty one is a container."""
    parts, _ = _one_level(tree)
    return len(parts) == 1 and parts[0] is tree


def _mismatch(layouts: Any, tree: Any, path: str) -> str:
    """Why `layouts` is neither a layout nor a tree of layouts for `tree`, in words."""
    parts, shape = _one_level(layouts)
    arrays, tree_shape = _one_level(tree)
    if shape == tree_shape and not _is_leaf(layouts):
        for name, part, below in zip(_one_level_names(tree), parts, arrays, strict=True):
            if not _spread(part, below, []):
                return _mismatch(part, below, f"{path}/{name}" if path else name)
    where = f" at {path!r}" if path else ""
    axes_only = isinstance(layouts, list) and not any("->" in str(part) for part in layouts)
    if is_abstract(tree) and axes_only:
        return f"{layouts!r}{where} is a list; write a tuple or a PartitionSpec for one layout"
    if _is_leaf(layouts):
        alone = isinstance(layouts, str) and layouts.isidentifier()
        hint = "; a tuple beside a tuple of arrays holds one layout each: use P(…) for all"
        return f"{layouts!r}{where} {NOT_A_LAYOUT}{hint if alone else ''}"
    if is_abstract(tree):
        return f"{layouts!r}{where} {NOT_A_LAYOUT}"
    have, given = _one_level_names(tree), _one_level_names(layouts)
    prefix = f"{path}/" if path else ""
    extra = [prefix + name for name in given if name not in have]
    missing = [prefix + name for name in have if name not in given]
    words = []
    if extra:
        words.append(f"there is no array {', '.join(map(repr, extra[:3]))}")
    if missing:
        words.append(f"there is no layout for {', '.join(map(repr, missing[:3]))}")
    difference = " and ".join(words) or (
        f"a {type(layouts).__name__} of layouts does not match a {type(tree).__name__} of arrays"
        f"{where}"
    )
    return (
        f"the tree of layouts does not match the tree of arrays: {difference}; give one layout for "
        "all, a layout for each array, PathRules or Rules"
    )


def is_layout(value: Any) -> bool:
    """Whether a value is always a single layout; None splits nothing."""
    return value is None or (
        isinstance(value, Layout | AxesByDim | Expression)
        or is_of_jax(value, "PartitionSpec", "NamedSharding")
        or (isinstance(value, str) and "->" in value)
    )


def _dims_of_leaves(tree: Any, treedef: Any, leaves: list[Any], dims: Any) -> list[Any]:
    """The dim names of each leaf: from `dims`, else from leaves or Flax's boxes that hold them."""
    if dims is None:
        boxed = dims_of_boxes(tree)
        pairs = zip(leaves, boxed, strict=True)
        return [leaf.dims if isinstance(leaf, ArraySpec) else names for leaf, names in pairs]
    try:
        given = treedef.flatten_up_to(dims)
    except (ValueError, TypeError, KeyError) as reason:
        raise MeshwrightError(
            "dims= does not have the structure of the tree of arrays: "
            f"{str(reason).splitlines()[0]}"
        ) from None
    return [None if names is None else dim_names(names) for names in given]


def _is_array(leaf: Any) -> bool:
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.kind not in "OSUMm"
    return is_abstract(leaf) or isinstance(leaf, bool | int | float | complex)


def array_shape(leaf: Any, path: str) -> tuple[int, ...]:
    """The shape of an array, abstract or real, or of a number."""
    if _is_array(leaf):
        return tuple(getattr(leaf, "shape", ()))
    kind = leaf.dtype if is_abstract(leaf) else type(leaf).__name__
    raise MeshwrightError(
        f"{path!r} is a {kind}, not an array; give arrays, jax.ShapeDtypeStruct or mw.ArraySpec"
        if path
        else f"{leaf!r} is not an array; give arrays, jax.ShapeDtypeStruct or mw.ArraySpec"
    )


def _whole(leaf: Any) -> Layout:
    """A layout that splits nothing; without names if they repeat, since it also replaces errors."""
    names = leaf.dims if isinstance(leaf, ArraySpec) else ()
    if not names or first_repeated(names) is not None:
        names = (None,) * (len(leaf.shape) if is_abstract(leaf) else 0)
    return Layout.whole(names)


def _named(path: str) -> str:
    return f"array {path!r}" if path else "the array"


def _with_others(mistake: str, *also: str) -> str:
    if not also:
        return mistake
    more = f"{', '.join(also[:2])}{', …' if also[2:] else ''}"
    return f"{mistake} (and {len(also)} more alike: {more})"


def _about(path: str, problem: MeshwrightError) -> str:
    text = str(problem)
    return text if not path or repr(path) in text else f"array {path!r}: {text}"
