"""Place arrays: `sharding` says where, `shard` does it, for one array or a tree of them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from meshwright.arithmetic import whole_number, whole_numbers
from meshwright.errors import MeshwrightError
from meshwright.layouts.arrays import ArraySpec
from meshwright.layouts.decide import TreeDecisions, decide, is_layout
from meshwright.layouts.layout import Layout
from meshwright.layouts.resolve import (
    NOT_A_LAYOUT,
    LayoutLike,
    MeshLike,
    find_mesh,
    is_device_line,
    named_sharding,
    resolve,
)
from meshwright.meshes import AnyMesh
from meshwright.present import mesh_text


def sharding(
    layout: LayoutLike,
    ndim: int | None = None,
    *,
    mesh: MeshLike | None = None,
    devices: Sequence[Any] | None = None,
    shape: Sequence[int] | None = None,
) -> NamedSharding:
    """The sharding an expression describes, for device_put, in_shardings and out_shardings.

    >>> columns = sharding("x y -> x y*")                     # over all devices
    >>> everywhere = sharding("... -> * ...", ndim=3)         # a copy on each
    >>> sharding("embed mlp -> embed@fsdp mlp@tp", mesh="fsdp=-1,tp=4").spec
    P('fsdp', 'tp')

    `ndim` is needed with an ellipsis. `mesh` (a mesh, or its text) is needed where axes are named;
    without it, the current mesh (jax.set_mesh) or all devices in jax's order. `shape` checks that
    the dims divide.
    """
    if ndim is not None:
        ndim = whole_number(ndim, "ndim")
    if shape is not None:
        shape = whole_numbers(shape, "shape")
        if ndim is not None and ndim != len(shape):
            raise MeshwrightError(f"ndim={ndim} and shape={shape} disagree; give one")
        ndim = len(shape)
    base = find_mesh(mesh, devices)
    if isinstance(layout, list) or not (is_layout(layout) or isinstance(layout, tuple)):
        raise MeshwrightError(f"{layout!r} {NOT_A_LAYOUT}")
    resolved, own = resolve(layout, ndim, base)
    if ndim is not None:
        resolved.check_rank(ndim, given=layout)
    resolved.check(own.shape, shape, given=layout)
    return named_sharding(resolved, own)


def shard(
    tree: Any,
    layout: Any,
    *,
    mesh: MeshLike | None = None,
    devices: Sequence[Any] | None = None,
    dims: Any = None,
) -> Any:
    """Place an array, or every array of a tree.

    >>> x = shard(np.ones((8, 32)), "x y -> x y*")
    >>> params = {"w1": np.ones((8, 16)), "w2": np.ones((16, 8))}
    >>> by_path = PathRules([("w1", ("fsdp", "tp")), ("w2", ("tp", "fsdp"))])
    >>> placed = shard(params, by_path, mesh="fsdp=-1,tp=4")
    >>> by_dim = Rules([("mlp", "tp"), ("embed", "fsdp")])
    >>> dims = {"w1": "embed mlp", "w2": "mlp embed"}
    >>> again = shard(params, by_dim, mesh="fsdp=-1,tp=4", dims=dims)
    >>> placed["w2"].sharding == again["w2"].sharding
    True

    `layout`: one expression (PartitionSpec, Layout) for all, a tree of them, PathRules, or Rules.
    jax and NumPy arrays are put on devices, jax.ShapeDtypeStruct and ArraySpec get a sharding,
    and inside jit it is a constraint.
    """
    base = find_mesh(mesh, devices)
    decided = decide(tree, layout, base, dims)
    decided.raise_problems()
    targets = _shardings(decided)
    leaves = decided.leaves
    placed = list(leaves)
    concrete = []
    for i, (leaf, target) in enumerate(zip(leaves, targets, strict=True)):
        if isinstance(leaf, jax.core.Tracer):
            placed[i] = _constrain(leaf, target)
        elif isinstance(leaf, jax.ShapeDtypeStruct):
            placed[i] = leaf.update(sharding=target)
        elif isinstance(leaf, ArraySpec):
            placed[i] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=target)
        else:
            concrete.append(i)
    if concrete and _is_tracing():
        for i in concrete:
            placed[i] = _constrain(jnp.asarray(leaves[i]), targets[i])
    elif concrete:
        _need_devices(base)
        put = jax.device_put([leaves[i] for i in concrete], [targets[i] for i in concrete])
        for i, array in zip(concrete, put, strict=True):
            placed[i] = array
    return decided.treedef.unflatten(placed)


def shardings(
    tree: Any,
    layout: Any,
    *,
    mesh: MeshLike | None = None,
    devices: Sequence[Any] | None = None,
    dims: Any = None,
) -> Any:
    """A tree of shardings like `tree`, for in_shardings and out_shardings.

    >>> init = lambda: {"w": jnp.ones((8, 16))}
    >>> wanted = shardings(jax.eval_shape(init), "x y -> x y@dp", mesh="dp=-1")
    >>> jax.jit(init, out_shardings=wanted)()["w"].sharding.spec
    P(None, 'dp')
    """
    decided = decide(tree, layout, find_mesh(mesh, devices), dims)
    decided.raise_problems()
    return decided.treedef.unflatten(_shardings(decided))


def layout_tree(
    tree: Any,
    rules: Any,
    *,
    mesh: MeshLike | None = None,
    devices: Sequence[Any] | None = None,
    dims: Any = None,
) -> Any:
    """A tree of Layouts like `tree`: what the rules say, as values."""
    base = find_mesh(mesh, devices)
    decided = decide(tree, rules, base, dims)
    decided.raise_problems()
    if is_device_line(base):
        raise MeshwrightError(
            "layouts say which mesh axes split each dim, and no mesh is given; pass mesh="
        )
    return decided.treedef.unflatten([decision.layout for decision in decided.decisions])


def _shardings(decided: TreeDecisions) -> list[NamedSharding]:
    """A sharding for each leaf; decisions are shared, so few are made."""
    distinct = {id(decision): decision for decision in decided.decisions}
    known = {key: named_sharding(d.layout, d.mesh) for key, d in distinct.items()}
    return [known[id(decision)] for decision in decided.decisions]


def _is_tracing() -> bool:
    """Inside jit, grad, scan …, where even a new constant is traced."""
    try:
        return isinstance(jnp.zeros((), bool), jax.core.Tracer)
    except ValueError:  # the current mesh has no devices, so no array can be created
        return False


def _constrain(value: jax.Array, target: NamedSharding) -> jax.Array:
    """Constrain a traced value, on the current mesh where that says the same."""
    current = jax.sharding.get_abstract_mesh()
    wanted = target.mesh if isinstance(target.mesh, AbstractMesh) else target.mesh.abstract_mesh
    alike = current.axis_names == wanted.axis_names and current.axis_sizes == wanted.axis_sizes
    kinds = dict(zip(current.axis_names, current.axis_types, strict=True))
    used = Layout.of_spec(target.spec).used_axes
    if AxisType.Manual in kinds.values():
        manual = [axis for axis, kind in kinds.items() if kind == AxisType.Manual]
        if len(manual) == len(kinds) or not alike or any(axis in manual for axis in used):
            raise MeshwrightError(
                f"inside shard_map {', '.join(manual)} are manual: each device has its own part "
                "already, and mw.shard cannot move it over them; use jax.lax collectives there"
            )
        return jax.lax.with_sharding_constraint(value, NamedSharding(current, target.spec))
    if isinstance(target.mesh, AbstractMesh) and not alike:
        raise MeshwrightError(
            f"the mesh ({mesh_text(wanted.shape)}) has no devices, so a constraint on it would do "
            "nothing; give a mesh with devices, or make it current: with jax.set_mesh(mesh)"
        )
    explicit = AxisType.Explicit in (*kinds.values(), *wanted.axis_types)
    if not explicit:
        return jax.lax.with_sharding_constraint(value, target)
    if not alike:
        raise MeshwrightError(
            "with explicit axes a value inside jit is placed on the current mesh, which is "
            f"({mesh_text(current.shape)}), not ({mesh_text(wanted.shape)}): make that "
            "current, with jax.set_mesh(mesh)"
        )
    automatic = [axis for axis in used if kinds[axis] != AxisType.Explicit]
    if automatic:
        raise MeshwrightError(
            f"the current mesh has explicit and automatic axes, and the layout uses "
            f"{', '.join(automatic)}, which is automatic: constrain over one kind at a time"
        )
    # explicit axes carry the sharding in the type: a constraint would only assert it
    return jax.sharding.reshard(value, NamedSharding(current, target.spec))


def _need_devices(mesh: AnyMesh) -> None:
    if not isinstance(mesh, Mesh):
        what = "abstract" if isinstance(mesh, AbstractMesh) else f"of an absent machine ({mesh!r})"
        raise MeshwrightError(
            f"arrays cannot be put on a mesh without devices: this one is {what}; use "
            "mw.mesh(text, machine=…, devices=jax.devices()), or shard jax.ShapeDtypeStruct"
        )
