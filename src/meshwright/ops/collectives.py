"""Collectives with sharding in types: the gradient of an all-gather is a reduce-scatter.

On explicit mesh axes jax tracks how an array is sharded, and also over which axes it is *reduced*
(equal on all devices, and its gradient arrives as partial sums) or *unreduced* (it holds partial
sums itself). A weight that is all-gathered over fsdp and marked reduced there gets its gradient by
one reduce-scatter, on every compiler. Plain automatic partitioning often emits an all-reduce, which
sends twice the bytes.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from meshwright.layouts import axes_of
from meshwright.machines import CHIPS

LANES = 128  # the last dim of a TPU's arrays is in parts of this many


def current_platform() -> str:
    """The platform of the current mesh, which may be of an absent machine; else of this machine."""
    return current_device()[0]


def current_device() -> tuple[str, str]:
    """The platform and the device kind of the current mesh, in jax's names."""
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    return str(device.platform), str(device.device_kind)


def split_axes(spec: Iterable[Any]) -> tuple[str, ...]:
    """The mesh axes that split any dim of a spec."""
    return tuple(axis for entry in spec for axis in axes_of(entry, spec))


def spec_of(x: jax.Array) -> P:
    """The PartitionSpec of an array's type, with one entry for each dim."""
    spec = jax.typeof(x).sharding.spec.partitions
    return P(*spec, *(None,) * (x.ndim - len(spec)))


def nontrivial_axes(mesh_shape: Mapping[str, int] | None = None) -> frozenset[str]:
    """The axes of size > 1, of the current mesh unless one is given."""
    shape = jax.sharding.get_abstract_mesh().shape if mesh_shape is None else mesh_shape
    return frozenset(axis for axis, size in shape.items() if size > 1)


def drop_trivial_axes(spec: P, nontrivial: frozenset[str]) -> P:
    """A spec without axes of size 1, since every axis named in a type must be handled."""
    entries = (axes_of(entry, spec) for entry in spec.partitions)
    return P(*(tuple(a for a in axes if a in nontrivial) or None for axes in entries))


def all_gather(
    x: jax.Array, onto: Sequence[str], *, table: bool = False, apart: bool = False
) -> jax.Array:
    """All-gather `x` over the axes `onto`; its gradient is reduce-scattered.

    Over an axis that does not shard `x`, each device has it already, and only the gradient is
    summed (all-reduce). `table`: it is an embedding or LM head, see `stacks`. `apart`: all-gather
    along a new first dim and merge it afterwards. XLA for GPUs all-gathers along the first dim in
    memory, and would copy a whole stack of layers to make another one the first.
    """
    nontrivial = nontrivial_axes()
    onto = tuple(axis for axis in onto if axis in nontrivial)
    source = drop_trivial_axes(spec_of(x), nontrivial)
    x = jax.sharding.reshard(x, source)
    held = tuple(axes_of(entry, source) for entry in source)
    kept = tuple(tuple(axis for axis in axes if axis not in onto) for axes in held)
    rest = tuple(axis for axis in onto if axis not in split_axes(source))
    if not onto:
        return x

    def local(part: jax.Array) -> jax.Array:
        if rest:
            part = lax.pcast(part, rest, to="reduced")
        for dim, axes in enumerate(held):
            gone = tuple(axis for axis in axes if axis in onto)
            if gone and apart:
                stacked = lax.all_gather(part, gone, axis=0, to="reduced")
                shape = (*part.shape[:dim], -1, *part.shape[dim + 1 :])
                part = jnp.moveaxis(stacked, 0, dim).reshape(shape)
            elif gone:
                part = _all_gather_dim(part, gone, dim, table)
        return part

    target = P(*(axes or None for axes in kept), reduced=frozenset(onto))
    return jax.shard_map(local, in_specs=source, out_specs=target)(x)


def stacks(shard: int, is_last: bool, table: bool, is_inner: bool = False) -> bool:
    """Whether shards of this size should be stacked in a dim of their own on a TPU.

    libtpu 0.0.42 makes an all-reduce of some reduce-scatters, and slices afterwards: twice the
    bytes. Along a dim of its own it scatters. That copies some arrays, so it is for what is
    all-reduced otherwise: along the last dim in odd multiples of 128 lanes, and of embeddings and
    LM heads, which are large, also along other dims and in parts that are no multiple. `is_inner`:
    a matrix whose dim was scattered over another axis first, in multiples of 256; its parts that
    are no multiple are all-reduced too.
    """
    if is_last:
        rest = shard % (2 * LANES)
        return rest != 0 if table or is_inner else rest == LANES
    return table


def _can_scatter(axis: str) -> bool:
    """Whether the TPU compiler reduce-scatters over a mesh axis at all.

    Over all devices of a slice it does only if that is small, or flat and not square.
    """
    mesh = jax.sharding.get_abstract_mesh()
    ways = mesh.shape[axis]
    if ways < mesh.size or ways < 8:
        return True
    _, kind = current_device()
    flat = any(kind in chip.device_kinds for chip in CHIPS.values() if chip.torus_dims == 2)
    return flat and (ways < 16 or math.isqrt(ways) ** 2 != ways)


def _all_gather_dim(part: jax.Array, over: tuple[str, ...], dim: int, table: bool) -> jax.Array:
    """Inside shard_map: all-gather along a dim; the gradient is reduce-scattered along it."""
    if current_platform() != "tpu":
        return lax.all_gather(part, over, axis=dim, tiled=True, to="reduced")
    # one axis at a time, innermost first: for several axes at once, whose device order on the torus
    # it does not support, the TPU compiler emits an all-reduce of zero-padded arrays
    for axis in reversed(over):
        shard, is_last = part.shape[dim], dim == part.ndim - 1
        is_whole = shard * lax.axis_size(axis) % (2 * LANES) == 0
        is_inner = axis != over[0] and part.ndim == 2 and is_whole
        stacked = _can_scatter(axis) and stacks(shard, is_last, table, is_inner)
        found = lax.all_gather(part, (axis,), axis=dim, tiled=not stacked, to="reduced")
        part = found.reshape(*part.shape[:dim], -1, *part.shape[dim + 1 :])
    return part


def partial_sums(spec: P, over: Sequence[str]) -> P:
    """The type of partial sums that must still be reduced over these axes."""
    return P(*spec, unreduced=frozenset(over)) if over else spec


def reduce_to(x: jax.Array, over: Sequence[str], target: P) -> jax.Array:
    """Reduce partial sums: reduce-scatter where `target` shards a dim, else all-reduce."""
    if not over:
        return x
    source = jax.typeof(x).sharding.spec
    return jax.shard_map(
        lambda part: reduce_part(part, over, target), in_specs=source, out_specs=target
    )(x)


def reduce_part(part: jax.Array, over: Sequence[str], target: P) -> jax.Array:
    """Inside shard_map: as `reduce_to`."""
    left = list(over)
    for dim, entry in enumerate(target):
        axes = tuple(axis for axis in axes_of(entry, target) if axis in over)
        if axes:
            part = lax.psum_scatter(part, axes, scatter_dimension=dim, tiled=True)
            left = [axis for axis in left if axis not in axes]
    return lax.psum(part, tuple(left)) if left else part


@jax.custom_vjp
def tie_gradients(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The identity; in the backward pass, each gradient waits for the other.

    A scheduler may delay what nothing waits for. Here the gradient of `x`, with which the backward
    pass continues, waits for that of `weight`, so the inputs of the latter can be freed. A weight
    that is not differentiated has none to wait for.
    """
    return x, weight


def _identity(x: Any, weight: Any) -> tuple[tuple[jax.Array, jax.Array], Any]:
    # a residual must be made of arrays; whether it is None is known when the program is traced
    return (x.value, weight.value), None if weight.perturbed else ()


def _barrier(frozen: Any, gradients: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, Any]:
    if frozen is not None:
        return gradients[0], None
    x, weight = lax.optimization_barrier(gradients)
    return x, weight


tie_gradients.defvjp(_identity, _barrier, symbolic_zeros=True)


def varying_like(x: jax.Array, *others: jax.Array) -> jax.Array:
    """Inside shard_map: `x`, cast to vary over all mesh axes that `others` vary over."""
    axes = {axis for other in others for axis in jax.typeof(other).manual_axis_type.varying}
    kind = jax.typeof(x).manual_axis_type
    for state in (axes & kind.reduced, axes - kind.varying - kind.reduced):
        x = lax.pcast(x, tuple(sorted(state)), to="varying") if state else x
    return x


def untyped(run: Callable[..., Any], *arrays: Any) -> Any:
    """Inside shard_map: run a function whose results lack varying axes, and add these."""
    from jax._src import config

    with config._check_vma(False):
        found = run(*arrays)
    return jax.tree.map(lambda x: varying_like(x, *jax.tree.leaves(arrays)), found)
