"""Convert leaves for storage and back: random keys, other dtypes, empty arrays."""

from typing import Any

import jax
import jax.numpy as jnp

from meshwright.checkpoint.fingerprint import on_mesh_of
from meshwright.checkpoint.record import SavedArray
from meshwright.errors import MeshwrightError


def check_leaf(name: str, leaf: Any) -> None:
    """Raise a MeshwrightError unless the leaf is a jax array of all processes."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        raise MeshwrightError(
            f"{name!r} is a {type(leaf).__name__}, not a jax array; convert it with jnp.asarray, "
            "or put it into meta"
        )
    if leaf.is_deleted():
        raise MeshwrightError(
            f"{name!r} was donated or deleted; save the array that the step returned"
        )
    if leaf.is_fully_addressable and jax.process_count() > 1:
        raise MeshwrightError(
            f"{name!r} is on this process only, of {jax.process_count()}; put it on the mesh of "
            "all processes, replicated if it is small"
        )


def key_kind(leaf: jax.Array) -> str | None:
    """'threefry2x32' and the like for random keys, None for numbers."""
    return str(jax.random.key_impl(leaf)) if is_key(leaf) else None


def is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def as_stored(leaf: jax.Array) -> jax.Array:
    """The stored form of a leaf: the data of a random key, any other array unchanged."""
    if not is_key(leaf):
        return leaf
    with on_mesh_of(leaf.sharding):
        return jax.random.key_data(leaf)


def stored_target(target: Any, saved: SavedArray) -> jax.ShapeDtypeStruct:
    """The target for reading: the saved dtype with the requested sharding."""
    if saved.key is None:
        return jax.ShapeDtypeStruct(saved.shape, jnp.dtype(saved.dtype), sharding=target.sharding)
    plain = jax.ShapeDtypeStruct(saved.shape, target.dtype)
    data = jax.eval_shape(jax.random.key_data, plain)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=target.sharding)


def as_wanted(array: jax.Array, target: Any, saved: SavedArray) -> jax.Array:
    """An array that was read, converted to the target's dtype."""
    with on_mesh_of(target.sharding):
        if saved.key is not None:
            return jax.random.wrap_key_data(array, impl=saved.key)
        if array.dtype == target.dtype:
            return array
        return jax.jit(lambda x: x.astype(target.dtype), out_shardings=target.sharding)(array)


def without_elements(target: jax.ShapeDtypeStruct) -> jax.Array:
    """An array without elements, which Orbax does not store."""
    with on_mesh_of(target.sharding):
        return jax.device_put(jnp.zeros(target.shape, target.dtype), target.sharding)
