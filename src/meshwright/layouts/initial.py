"""Initializers of arrays, with the same values on every mesh.

>>> Normal(0.02)(jax.random.key(0), (2, 3), jnp.float32).shape
(2, 3)
"""

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.arithmetic import check_seed
from meshwright.errors import MeshwrightError
from meshwright.layouts.arrays import ArraySpec
from meshwright.layouts.decide import tree_paths
from meshwright.layouts.padding import resized

Init = Callable[[jax.Array, Sequence[int], Any], jax.Array]


@dataclasses.dataclass(frozen=True)
class Normal:
    """Normal values with this standard deviation."""

    std: float

    def __call__(self, key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
        # in float32 and then rounded: a bfloat16 model starts from the rounded float32 one
        values = jax.random.normal(key, shape, jnp.float32) * self.std
        return values.astype(dtype)


@dataclasses.dataclass(frozen=True)
class Constant:
    """One value everywhere."""

    value: float

    def __call__(self, key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
        return jnp.full(shape, self.value, dtype)


def create(specs: Any, shardings: Any, seed: int = 0) -> Any:
    """Create the arrays of `specs`, sharded: no device ever holds a complete array.

    A value depends on the seed, the array's path and the position in it, but not on the mesh or on
    the padding of the array.
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

    def make(root: jax.Array) -> Any:
        made = []
        for path, spec in zip(paths, leaves, strict=True):
            key = jax.random.fold_in(root, zlib.crc32(path.encode()))
            made.append(resized(spec.init(key, spec.unpadded_shape, spec.dtype), spec.shape))
        return jax.tree.unflatten(treedef, made)

    with jax.threefry_partitionable(True):
        return jax.jit(make, out_shardings=shardings)(jax.random.key(seed))
