"""Arrays of jax in a layout: place them, create them, pad them. The rest here works without jax.

    >>> over_tp = sharding("vocab embed -> vocab@tp embed@fsdp", mesh="fsdp=8,tp=2")
    >>> in_memory = jax.ShapeDtypeStruct((258, 64), jnp.float32, sharding=over_tp)
    >>> stored(in_memory, (257, 64)).sharding.spec
    P(None, ('fsdp', 'tp'))

`sharding` says where, `shard` does it, for one array or a tree of them. `create` gives the same
values on every mesh. A vocabulary of 257 over two devices is padded to 258 in memory; a checkpoint
stores 257: the dim is not split on disk, and its mesh axes split another dim instead, so that no
device holds more.
"""

import dataclasses
import functools
import math
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as PartitionSpec

from meshwright.arithmetic import check_seed, prime_factors, whole_number, whole_numbers
from meshwright.errors import MeshwrightError
from meshwright.layouts.arrays import ArraySpec
from meshwright.layouts.decide import TreeDecisions, decide, is_layout
from meshwright.layouts.expression import Expression
from meshwright.layouts.layout import Layout, axes_of
from meshwright.layouts.modules import with_the_rest
from meshwright.layouts.resolve import (
    NOT_A_LAYOUT,
    NOT_A_MESH,
    line_axes,
    resolve,
)
from meshwright.layouts.trees import tree_paths
from meshwright.meshes import AnyMesh, MachineMesh, MeshSpec, device_list
from meshwright.meshes import mesh as build_mesh
from meshwright.present import mesh_text

_UNOPTIMIZED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

tree_flatten, tree_flatten_with_path = jax.tree.flatten, jax.tree_util.tree_flatten_with_path

LayoutLike = str | Layout | PartitionSpec | NamedSharding | tuple[Any, ...] | Expression | None
"""Anything that means a layout: an expression, a Layout, a PartitionSpec, a tuple like one."""

MeshLike = AnyMesh | MeshSpec | str
"""Anything that means a mesh: one of jax, a MachineMesh, or text."""


def find_mesh(given: MeshLike | None, devices: Sequence[Any] | None = None) -> AnyMesh:
    """The mesh to place on: `given`, the current mesh (jax.set_mesh), or all devices."""
    if given is not None and devices is not None and not isinstance(given, str | MeshSpec):
        raise MeshwrightError("give mesh= or devices=, not both: a mesh has its devices")
    if isinstance(given, str | MeshSpec):
        current = jax.sharding.get_abstract_mesh()
        if devices is None and _is_mesh_of(current, given):
            return _with_devices(current)
        return build_mesh(given, devices=devices)
    if isinstance(given, Mesh | AbstractMesh | MachineMesh):
        return given
    if given is not None:
        raise MeshwrightError(f"mesh={given!r} {NOT_A_MESH}")
    if devices is None:
        current = jax.sharding.get_abstract_mesh()
        if not current.empty:
            return _with_devices(current)
    return device_line(tuple(jax.devices() if devices is None else device_list(devices)))


def _is_mesh_of(current: AbstractMesh, text: str | MeshSpec) -> bool:
    """Whether the current mesh, maybe with explicit axes, matches the text."""
    if current.empty:
        return False
    try:
        spec = MeshSpec.parse(text)
    except MeshwrightError:  # reported where the mesh is built
        return False
    sizes = zip(spec.sizes, current.axis_sizes, strict=False)
    return spec.names == current.axis_names and all(s in (-1, size) for s, size in sizes)


def _with_devices(current: AbstractMesh) -> Mesh | AbstractMesh:
    try:
        concrete = jax.sharding.get_mesh()
    except ValueError:  # inside jit, jax knows the axes only
        return current
    return concrete if concrete.abstract_mesh == current else current


@functools.lru_cache(maxsize=256)
def device_line(devices: tuple[Any, ...]) -> Mesh:
    """The devices in the order given, one axis for each prime factor of their number.

    Large primes first: an odd factor is most often the number of hosts.
    """
    primes = prime_factors(len(devices))[::-1] or [1]
    return Mesh(np.asarray(devices, dtype=object).reshape(primes), line_axes(len(primes)))


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
    """A copy of an array, or of every array of a tree, in its place; what is given stays as it is.

    A tree is any pytree: dicts, a state of Flax, a module of Equinox (its arrays are placed, and
    the result is a new module; the one that is given is not changed).

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
    return with_the_rest(decided.treedef.unflatten(placed), tree)


def einshard(array: Any, expression: str) -> Any:
    """Place an array by an expression: `shard` under the name that einshard's tutorial has.

    >>> w = einshard(np.ones((8, 32)), "x y -> x y*")
    """
    return shard(array, expression)


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


def named_sharding(layout: Layout, mesh: Any) -> NamedSharding:
    """The NamedSharding of a layout on a mesh; a MachineMesh becomes an AbstractMesh."""
    return NamedSharding(mesh.abstract_mesh if isinstance(mesh, MachineMesh) else mesh, layout.spec)


def held_dtype(leaf: Any) -> Any:
    """The dtype in which jax will hold an array or a number."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.asarray(leaf).dtype
    if jnp.issubdtype(dtype, jax.dtypes.extended):  # PRNG keys
        return dtype
    return jax.dtypes.canonicalize_dtype(dtype)


@dataclasses.dataclass(frozen=True)
class Normal:
    """Normal values with this standard deviation: those of jax.random.normal, times `std`."""

    std: float

    def __call__(self, key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
        return self.from_bits(jax.random.bits(key, tuple(shape), jnp.uint32), dtype)

    def from_bits(self, bits: jax.Array, dtype: Any) -> jax.Array:
        """The values of 32 random bits each."""
        # 23 bits are the mantissa of a number in [1, 2), which is moved to (-1, 1)
        mantissa = (bits >> jnp.uint32(9)) | jnp.uint32(0x3F800000)
        low = np.nextafter(np.float32(-1), np.float32(0))
        uniform = jax.lax.bitcast_convert_type(mantissa, jnp.float32) - np.float32(1)
        uniform = jnp.maximum(low, uniform * (np.float32(1) - low) + low)
        values = np.float32(math.sqrt(2)) * jax.lax.erf_inv(uniform)
        # rounded before std, or the compiler may multiply the constants first; in float32 and then
        # rounded to dtype: a bfloat16 model starts from the rounded float32 one
        return (jax.lax.optimization_barrier(values) * np.float32(self.std)).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Constant:
    """One value everywhere."""

    value: float

    def __call__(self, key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
        return jnp.full(shape, self.value, dtype)


def create(specs: Any, shardings: Any, seed: int = 0) -> Any:
    """Create the arrays of `specs`, sharded: no device ever holds a complete array.

    A value depends on the seed, the array's path and the position in it, but not on the mesh or on
    the padding of the array. On CPUs the random bits of initializers that have `from_bits` are
    drawn by a program of their own, compiled without optimization: XLA's CPU compiler takes up to
    15 s to optimize it, and integers are the same either way.
    """
    check_seed(seed)
    is_spec = lambda leaf: isinstance(leaf, ArraySpec)  # noqa: E731
    leaves, treedef = jax.tree.flatten(specs, is_leaf=is_spec)
    paths = tree_paths(specs)
    for path, spec in zip(paths, leaves, strict=True):
        if spec.init is None:
            raise MeshwrightError(
                f"array {path!r} has no init; give ArraySpec(…, init=mw.Normal(0.02)) or the like"
            )
    structure: Any = treedef  # jax's stub has no flatten_up_to
    leaf_shardings = structure.flatten_up_to(jax.tree.broadcast(shardings, specs, is_leaf=is_spec))
    path_numbers = np.array([zlib.crc32(path.encode()) for path in paths], np.uint32)
    devices = {device for sharding in leaf_shardings for device in sharding.device_set}
    on_cpu = {device.platform for device in devices} == {"cpu"}
    by_bits = [i for i, spec in enumerate(leaves) if on_cpu and hasattr(spec.init, "from_bits")]

    def keys(root: jax.Array) -> jax.Array:
        return jax.vmap(jax.random.fold_in, (None, 0))(root, path_numbers)

    def draw(root: jax.Array) -> list[jax.Array]:
        own = keys(root)
        shapes = [(i, leaves[i].unpadded_shape, leaves[i].shape) for i in by_bits]
        return [
            resized(jax.random.bits(own[i], part, jnp.uint32), full) for i, part, full in shapes
        ]

    def make(root: jax.Array, drawn: list[jax.Array]) -> Any:
        made = []
        bits = dict(zip(by_bits, drawn, strict=True))
        for i, (key, spec) in enumerate(zip(keys(root), leaves, strict=True)):
            if i in bits:
                values = spec.init.from_bits(resized(bits[i], spec.unpadded_shape), spec.dtype)
            else:
                values = spec.init(key, spec.unpadded_shape, spec.dtype)
            made.append(resized(values, spec.shape))
        return jax.tree.unflatten(treedef, made)

    # with explicit axes, values would be replicated until the end
    current = jax.sharding.get_abstract_mesh()
    automatic = current.update_axis_types(dict.fromkeys(current.axis_names, AxisType.Auto))
    with jax.threefry_partitionable(True), jax.sharding.use_abstract_mesh(automatic):
        root, drawn = jax.random.key(seed), []
        if by_bits:
            placed = [_automatic(leaf_shardings[i]) for i in by_bits]
            drawn = jax.jit(draw, out_shardings=placed, compiler_options=_UNOPTIMIZED)(root)
        return jax.jit(make, out_shardings=shardings)(root, drawn)


def _automatic(sharding: Any) -> Any:
    """The sharding on a mesh of automatic axes."""
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return sharding
    mesh = sharding.mesh
    types = (AxisType.Auto,) * len(mesh.axis_names)
    return NamedSharding(Mesh(mesh.devices, mesh.axis_names, axis_types=types), sharding.spec)


def resized(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """`x` cut or zero-padded to `shape`."""
    if x.shape == tuple(shape):
        return x
    kept = x[tuple(slice(size) for size in shape)]
    missing = [(0, size - have) for size, have in zip(shape, kept.shape, strict=True)]
    return jnp.pad(kept, missing)


def resized_like(tree: Any, targets: Any) -> Any:
    """Each array of a tree resized to its target's shape, inside jit; types must be automatic."""
    return jax.tree.map(lambda x, target: resized(x, target.shape), tree, targets)


def stored(target: Any, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """An array of `shape`, without padding, laid out like the padded `target` as far as it divides.

    The axes of a dim that they do not divide go to the first other dim that they do; an axis that
    no dim takes holds copies.
    """
    if target.shape == shape:
        return target
    sizes = target.sharding.mesh.shape
    axes = _axes(target.sharding, len(shape))
    uneven = [dim for dim in range(len(shape)) if shape[dim] % _parts(axes[dim], sizes)]
    freed = [axis for dim in uneven for axis in axes[dim]]
    for dim in uneven:
        axes[dim] = ()
    for axis in freed:
        for dim in range(len(shape)):
            if dim not in uneven and shape[dim] % _parts((*axes[dim], axis), sizes) == 0:
                axes[dim] = (*axes[dim], axis)
                break
    spec = PartitionSpec(*(names or None for names in axes))
    sharding = NamedSharding(target.sharding.mesh, spec)
    return jax.ShapeDtypeStruct(shape, target.dtype, sharding=sharding)


def fit(tree: Any, targets: Any) -> Any:
    """Each array in its target's shape: padding taken off or put on. On a mesh of explicit axes.

    Arrays that have that shape are left as they are.
    """

    def one(array: jax.Array, target: Any) -> jax.Array:
        if array.shape == target.shape:
            return array
        with jax.set_mesh(target.sharding.mesh):
            fitted: jax.Array = _fit(target.sharding, target.shape)(array)
        return fitted

    return jax.tree.map(one, tree, targets)


@functools.lru_cache(maxsize=256)
def _fit(sharding: NamedSharding, shape: tuple[int, ...]) -> Any:
    def move(x: jax.Array) -> jax.Array:
        # padding changes where the dim is whole: without it, the dim may not divide
        if math.prod(shape) < x.size:
            return resized(jax.sharding.reshard(x, sharding.spec), shape)
        return jax.sharding.reshard(resized(x, shape), sharding.spec)

    return jax.jit(move)


def _axes(sharding: NamedSharding, ndim: int) -> list[tuple[str, ...]]:
    entries = [axes_of(entry, sharding.spec) for entry in sharding.spec]
    return entries + [()] * (ndim - len(entries))


def _parts(axes: Sequence[str], sizes: Any) -> int:
    return math.prod(sizes[axis] for axis in axes)
