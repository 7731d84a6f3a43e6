"""Zero-padded arrays, where the mesh does not divide a dim.

    >>> over_tp = sharding("vocab embed -> vocab@tp embed@fsdp", mesh="fsdp=8,tp=2")
    >>> in_memory = jax.ShapeDtypeStruct((258, 64), jnp.float32, sharding=over_tp)
    >>> stored(in_memory, (257, 64)).sharding.spec
    P(None, ('fsdp', 'tp'))

A vocabulary of 257 over two devices is padded to 258 in memory. A checkpoint stores 257: the dim is
not split on disk, and its mesh axes split another dim instead, so that no device holds more.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from meshwright.layouts.layout import axes_of


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
    spec = P(*(names or None for names in axes))
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
            return resized(reshard(x, sharding.spec), shape)
        return reshard(resized(x, shape), sharding.spec)

    return jax.jit(move)


def _axes(sharding: NamedSharding, ndim: int) -> list[tuple[str, ...]]:
    entries = [axes_of(entry, sharding.spec) for entry in sharding.spec]
    return entries + [()] * (ndim - len(entries))


def _parts(axes: Sequence[str], sizes: Any) -> int:
    return math.prod(sizes[axis] for axis in axes)
