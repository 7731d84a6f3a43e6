"""Layouts of optimizer state: each array follows the parameter it belongs to.

    >>> params = {"w": jax.ShapeDtypeStruct((1024, 256), jnp.float32)}
    >>> state = jax.eval_shape(optax.adafactor(1e-3).init, params)
    >>> found = optimizer_layouts(state, params, {"w": Layout.parse("a b -> a@tp b@fsdp")})
    >>> found[0].v_row["w"].spec, found[0].v_col["w"].spec
    (P('fsdp',), P('tp',))

A state array belongs to the parameter whose path is inside its own. Moments of the same shape take
the parameter's layout; factored moments, which lack some of its dims, take what is left of it.
Works on any optax chain, and on any state that repeats the parameters' tree.
"""

import itertools
import math
from typing import TYPE_CHECKING, Any

from meshwright.errors import MeshwrightError
from meshwright.layouts.decide import array_shape, layout_tree, one_layout_each
from meshwright.layouts.layout import Layout
from meshwright.layouts.logical_rules import Rules
from meshwright.layouts.path_rules import PathRules
from meshwright.layouts.resolve import as_layout
from meshwright.layouts.trees import flatten, flatten_with_paths, path_text

if TYPE_CHECKING:
    from meshwright.layouts.jax_arrays import MeshLike

Path = tuple[Any, ...]
_SMALL = 1024  # elements


def optimizer_layouts(
    state: Any,
    params: Any,
    rules: Any,
    *,
    mesh: "MeshLike | None" = None,
    dims: Any = None,
    extra: PathRules | None = None,
) -> Any:
    """A tree of Layouts like `state`.

    `state` and `params` may be abstract. `rules` place the parameters: those that `mw.shard` takes,
    with the same `mesh` and `dims`, or a tree of layouts or shardings like `params`, or one for
    all. State that belongs to no parameter is replicated up to 1,024 elements (counts,
    coefficients); `extra` places larger arrays, by their path.
    """
    if isinstance(rules, PathRules | Rules):
        rules = layout_tree(params, rules, mesh=mesh, dims=dims)
    if extra is not None and not isinstance(extra, PathRules):
        raise MeshwrightError(f"extra={extra!r} is not mw.PathRules")
    by_path = {}
    arrays = flatten_with_paths(params)
    for (path, leaf), given in zip(arrays, one_layout_each(rules, params), strict=True):
        shape = array_shape(leaf, path_text(path))
        of_param = as_layout(given, len(shape))
        by_path[tuple(path)] = shape, of_param.check_rank(len(shape), path_text(path), given)
    longest = max(map(len, by_path), default=0)
    found = []
    problems = []
    placed_by_extra: list[str] = []
    for path, leaf in flatten_with_paths(state):
        shape = array_shape(leaf, path_text(path))
        layout = _follow(tuple(path), shape, by_path, longest)
        if layout is None and extra is not None and extra.matcher.found_in(path_text(path)):
            placed_by_extra.append(path_text(path))
            layout = Layout.of_expression(extra.match(path_text(path)).layout, len(shape))
        if layout is None:
            problems.append(f"{path_text(path)!r} of shape {shape}")
            layout = _whole(shape)
        found.append(layout)
    if problems:
        raise MeshwrightError(
            f"optimizer state {', '.join(problems[:4])} follows no parameter: its path holds none, "
            "or its shape is not what is left of one; say where it goes: "
            "extra=mw.PathRules([(regex, layout), …])"
        )
    if extra is not None:
        matches = map(extra.matcher.found_in, placed_by_extra)
        if unused := extra.never_decided(matches, lambda: placed_by_extra):
            raise MeshwrightError(f"extra=: {'; '.join(unused)}")
    return flatten(state)[1].unflatten(found)


def _follow(
    path: Path,
    shape: tuple[int, ...],
    params: dict[Path, tuple[tuple[int, ...], Layout]],
    longest: int,
) -> Layout | None:
    """The layout of the state array at `path`; None if it follows no parameter."""
    for start, stop in _spans(len(path), longest):
        if start == 0 and stop < len(path) and hasattr(path[0], "idx"):
            continue  # the place in an optax chain, not in a list of parameters
        owner = params.get(path[start:stop])
        if owner is not None:
            param_shape, layout = owner
            reduced = reduce_layout(layout, param_shape, shape, path[:start], path[stop:])
            if reduced is not None:
                return reduced
    return _whole(shape) if math.prod(shape) <= _SMALL else None


def _spans(length: int, longest: int) -> list[tuple[int, int]]:
    """Stretches of a path, longest first, then those nearest its end."""
    return [
        (stop - size, stop)
        for size in range(min(longest, length), -1, -1)
        for stop in range(length, size - 1, -1)
    ]


def reduce_layout(
    layout: Layout,
    param_shape: tuple[int, ...],
    shape: tuple[int, ...],
    before: Path = (),
    after: Path = (),
) -> Layout | None:
    """What is left of a parameter's layout for an array that lacks some of its dims.

    Dims of size 1 are not split. Which dims are left can be ambiguous (a square matrix): then
    optax's names decide (`v_row` lacks the largest dim, `v_col` the second largest; SM3 keeps one
    each), and without a name that tells there is no answer (None) unless all readings agree.
    """
    if shape == param_shape:
        return layout
    if all(size == 1 for size in shape):
        return _whole(shape)
    extra_dims = len(shape) - len(param_shape)
    if extra_dims > 0 and shape[extra_dims:] == param_shape:
        # a history of the parameter, as L-BFGS keeps: the new leading dims are not split
        return Layout(((),) * extra_dims + layout.axes)
    if len(shape) == len(param_shape):
        kept = [
            axes if size == whole else ()
            for size, whole, axes in zip(shape, param_shape, layout.axes, strict=True)
        ]
        same_or_one = all(s in (1, w) for s, w in zip(shape, param_shape, strict=True))
        return Layout(tuple(kept), layout.dims) if same_or_one else None
    candidates = [
        dims
        for dims in itertools.combinations(range(len(param_shape)), len(shape))
        if tuple(param_shape[dim] for dim in dims) == shape
    ]
    if not candidates:
        return None
    hinted = _hinted_dims(param_shape, before, after)
    chosen = [hinted] if hinted in candidates else candidates
    readings = {
        Layout(tuple(layout.axes[d] for d in dims), tuple(layout.dims[d] for d in dims))
        for dims in chosen
    }
    agree = len({reading.axes for reading in readings}) == 1
    return min(readings, key=lambda reading: reading.dims) if agree else None


def _hinted_dims(param_shape: tuple[int, ...], before: Path, after: Path) -> tuple[int, ...] | None:
    by_size = sorted(range(len(param_shape)), key=lambda dim: param_shape[dim])
    names = {getattr(key, "name", getattr(key, "key", None)) for key in before}
    if "v_row" in names or "v_col" in names:
        lacking = by_size[-1] if "v_row" in names else by_size[-2]
        return tuple(dim for dim in range(len(param_shape)) if dim != lacking)
    position = getattr(after[0], "idx", None) if after else None
    return None if position is None else (position,)


def _whole(shape: tuple[int, ...]) -> Layout:
    return Layout.whole((None,) * len(shape))
