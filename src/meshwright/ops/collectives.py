"""Collectives in the types: what is gathered going forward is scattered coming back.

On explicit mesh axes jax tracks, beside where an array is split, over which axes it is *reduced*
(equal everywhere, and its gradient will arrive as partial sums) and *unreduced* (partial sums
itself). A weight gathered over fsdp and marked reduced there gets its gradient summed and split
again in one reduce-scatter, whatever the compiler; plain automatic partitioning often makes an
all-reduce of it, which sends twice the bytes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from meshwright.layouts import axes_of


def current_platform() -> str:
    """The platform of the current mesh, which may be a machine that is not here; else this one."""
    return current_device()[0]


def current_device() -> tuple[str, str]:
    """The platform of the current mesh and its kind of device, as jax names them."""
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    return str(device.platform), str(device.device_kind)


def split_axes(spec: Iterable[Any]) -> tuple[str, ...]:
    """The mesh axes that split any dim of a spec."""
    return tuple(axis for entry in spec for axis in axes_of(entry, spec))


def spec_of(x: jax.Array) -> P:
    """Where an array is split, one entry for each dim, from its type."""
    spec = jax.typeof(x).sharding.spec.partitions
    return P(*spec, *(None,) * (x.ndim - len(spec)))


def nontrivial_axes(mesh_shape: Mapping[str, int] | None = None) -> frozenset[str]:
    """The axes with more than one device, of the current mesh unless one is given.

    The others split nothing.
    """
    shape = jax.sharding.get_abstract_mesh().shape if mesh_shape is None else mesh_shape
    return frozenset(axis for axis, size in shape.items() if size > 1)


def drop_trivial_axes(spec: P, wide: frozenset[str]) -> P:
    """A spec without the axes that split nothing: in types, every axis named must be dealt with."""
    entries = (axes_of(entry, spec) for entry in spec.partitions)
    return P(*(tuple(a for a in axes if a in wide) or None for axes in entries))


def all_gather(x: jax.Array, onto: Sequence[str]) -> jax.Array:
    """`x` whole over the axes `onto`, its gradient summed over them and split as `x` is.

    Where `x` is split over one of them it is gathered; where it is not, each device has it already
    and only the gradient is summed.
    """
    wide = nontrivial_axes()
    onto = tuple(axis for axis in onto if axis in wide)
    source = drop_trivial_axes(spec_of(x), wide)
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
            if gone:
                part = _gathered(part, gone, dim)
        return part

    target = P(*(axes or None for axes in kept), reduced=frozenset(onto))
    return jax.shard_map(local, in_specs=source, out_specs=target)(x)


def _gathered(part: jax.Array, over: tuple[str, ...], dim: int) -> jax.Array:
    """Inside shard_map: whole along a dim; the gradient is scattered along it."""
    if current_platform() != "tpu":
        return lax.all_gather(part, over, axis=dim, tiled=True, to="reduced")
    # one axis after the other, the innermost first: together they lie on the torus in an order that
    # the TPU compiler gathers by adding up arrays filled with zeros
    for axis in reversed(over):
        part = lax.all_gather(part, (axis,), axis=dim, tiled=True, to="reduced")
    return part


def partial_sums(spec: P, over: Sequence[str]) -> P:
    """The type of partial sums that are still to be added over these axes."""
    return P(*spec, unreduced=frozenset(over)) if over else spec


def reduce_to(x: jax.Array, over: Sequence[str], target: P) -> jax.Array:
    """Partial sums over `over`, added; where `target` splits a dim over them, only that part."""
    if not over:
        return x
    source = jax.typeof(x).sharding.spec
    scattered = [
        (dim, tuple(axis for axis in axes_of(entry, target) if axis in over))
        for dim, entry in enumerate(target)
    ]

    def local(part: jax.Array) -> jax.Array:
        left = list(over)
        for dim, axes in scattered:
            if axes:
                part = lax.psum_scatter(part, axes, scatter_dimension=dim, tiled=True)
                left = [axis for axis in left if axis not in axes]
        return lax.psum(part, tuple(left)) if left else part

    return jax.shard_map(local, in_specs=source, out_specs=target)(x)


@jax.custom_vjp
def tie_gradients(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both as they are; going back, neither gradient is handed on before the other is there.

    A scheduler may put off whatever nothing waits for. Here the gradient of `x`, with which the
    backward pass goes on, waits for that of `weight`, so what that is made of need not be kept.
    """
    return x, weight


def _as_they_are(x: jax.Array, weight: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
    return (x, weight), None


def _together(_: None, gradients: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    x, weight = lax.optimization_barrier(gradients)
    return x, weight


tie_gradients.defvjp(_as_they_are, _together)


def varying_like(x: jax.Array, *others: jax.Array) -> jax.Array:
    """Inside shard_map: `x` with the type of something that differs wherever one of these does."""
    axes = {axis for other in others for axis in jax.typeof(other).manual_axis_type.varying}
    kind = jax.typeof(x).manual_axis_type
    for state in (axes & kind.reduced, axes - kind.varying - kind.reduced):
        x = lax.pcast(x, tuple(sorted(state)), to="varying") if state else x
    return x


def untyped(run: Callable[..., Any], *arrays: Any) -> Any:
    """Inside shard_map: run what does not say in its types over which axes its results differ."""
    from jax._src import config

    with config._check_vma(False):
        found = run(*arrays)
    return jax.tree.map(lambda x: varying_like(x, *jax.tree.leaves(arrays)), found)
