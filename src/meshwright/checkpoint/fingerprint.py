"""A 64-bit fingerprint of an array's values, the same on every mesh.

    >>> whole = jnp.arange(64, dtype=jnp.float32).reshape(8, 8)
    >>> cut = mw.shard(whole, "a b -> a@fsdp b@tp", mesh="fsdp=8,tp=2")
    >>> fingerprint_text(fingerprint(whole)) == fingerprint_text(fingerprint(cut))
    True
    >>> fingerprint_text(fingerprint(whole)) == fingerprint_text(fingerprint(whole.at[3, 3].set(0)))
    False

The bits of each element are hashed with its position in the full array, and the results are summed
modulo 2**32. An integer sum does not depend on the order, so each device sums its own shard: one
pass over its memory and an all-reduce of 8 bytes. Two such sums, with different hashes, make 64
bits. A change of one element (of up to 32 bits) always changes them, since the hash is a bijection;
any other change, such as a lost shard or two swapped shards, goes unnoticed with probability
2**-64.
"""

import contextlib
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from meshwright.checkpoint.pieces import FIRST, POSITION, RANGE, SECOND, mix, runs
from meshwright.errors import MeshwrightError


def fingerprint(array: jax.Array) -> jax.Array:
    """uint32[2], replicated over the devices of `array`; not waited for."""
    if max(array.shape, default=0) > RANGE:
        raise MeshwrightError(f"shape {array.shape}: a dim beyond 2**32 has no fingerprint")
    sharding = array.sharding
    if len(sharding.device_set) > 1 and not isinstance(sharding, NamedSharding):
        raise MeshwrightError(
            f"an array of shape {array.shape} is placed by {type(sharding).__name__}; "
            "place it with a NamedSharding (mw.shard)"
        )
    if sharding.memory_kind == "pinned_host":  # jit needs device memory
        sharding = sharding.with_memory_kind("device")
        array = jax.device_put(array, sharding)
    with on_mesh_of(sharding):
        if isinstance(sharding, NamedSharding):
            return _on_mesh(sharding.mesh, sharding.spec, array.shape)(array)
        return _alone(array)


def on_mesh_of(sharding: Sharding | None) -> contextlib.AbstractContextManager[Any]:
    """Set the array's own mesh as the current mesh, whatever the caller has set."""
    mesh = getattr(sharding, "mesh", None)
    return jax.set_mesh(mesh) if isinstance(mesh, Mesh) else contextlib.nullcontext()


def fingerprint_text(sums: jax.Array) -> str:
    """16 hex digits; waits for the devices."""
    return "".join(f"{int(part):08x}" for part in np.asarray(sums.addressable_data(0)))


@jax.jit
def _alone(array: jax.Array) -> jax.Array:
    return sums_of_part(array, [jnp.uint32(0)] * array.ndim, array.shape)


@functools.lru_cache(maxsize=4096)
def _on_mesh(mesh: Any, spec: P, shape: tuple[int, ...]) -> Any:
    """One compiled function per shape and sharding, shared by parameters and their moments."""
    axes_of = [_as_tuple(entry) for entry in spec] + [()] * (len(shape) - len(spec))
    splitting = tuple(axis for axes in axes_of for axis in axes)

    def sums(part: jax.Array) -> jax.Array:
        starts = [
            lax.convert_element_type(lax.axis_index(axes), jnp.uint32) * np.uint32(size)
            if axes
            else jnp.uint32(0)
            for axes, size in zip(axes_of, part.shape, strict=True)
        ]
        found = sums_of_part(part, starts, shape)
        # sum only over the axes that shard the array, so that copies count once
        return lax.psum(found, splitting) if splitting else found

    return jax.jit(jax.shard_map(sums, mesh=mesh, in_specs=spec, out_specs=P()))


def sums_of_part(part: jax.Array, starts: Sequence[jax.Array], shape: Sequence[int]) -> jax.Array:
    """The two sums over `part`, which begins at `starts` of an array of `shape`."""
    if not shape:
        part, starts, shape = part.reshape(1), [jnp.uint32(0)], (1,)
    key = _position_key(part.shape, starts, shape)
    first = second = jnp.zeros(part.shape, jnp.uint32)
    for number, word in enumerate(_words(part)):
        salt = np.uint32(0x9E3779B9 * (2 * number + 1) % RANGE)
        first = first + mix(word ^ (key + salt), FIRST)
        second = second + mix(word ^ (key * np.uint32(0xB5297A4D) + salt), SECOND)
    # one reduction for both, so that no array-sized intermediate is written to memory
    zero = jnp.uint32(0)
    both = lax.reduce(
        (first, second), (zero, zero), lambda a, b: (a[0] + b[0], a[1] + b[1]), range(part.ndim)
    )
    return jnp.stack(both)


def _position_key(
    part_shape: Sequence[int], starts: Sequence[jax.Array], shape: Sequence[int]
) -> jax.Array:
    """A hash of each element's position in the full array.

    The row-major index of an array with more than 2**32 elements does not fit 32 bits. So the dims
    are grouped into runs small enough to index exactly, and the runs are hashed one after another.
    """
    key: jax.Array = jnp.full(part_shape, 0x6A09E667, jnp.uint32)
    for run in runs(shape):
        index = jnp.zeros(part_shape, jnp.uint32)
        for dim in run:
            stride = np.uint32(math.prod(shape[d] for d in run if d > dim) % RANGE)
            coordinate = lax.broadcasted_iota(jnp.uint32, part_shape, dim) + lax.broadcast(
                starts[dim], part_shape
            )
            index = index + coordinate * stride
        key = mix(key + index, POSITION)
    return key


def _words(array: jax.Array) -> list[jax.Array]:
    """The bits of each element as one uint32, or two for 64-bit types."""
    if array.dtype == jnp.bool_:
        return [array.astype(jnp.uint32)]
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return [*_words(array.real), *_words(array.imag)]
    limits = jnp.iinfo if jnp.issubdtype(array.dtype, jnp.integer) else jnp.finfo
    bits = limits(array.dtype).bits
    if bits == 64:
        pairs = lax.bitcast_convert_type(array, jnp.uint32)
        return [pairs[..., 0], pairs[..., 1]]
    return [lax.bitcast_convert_type(array, f"uint{bits}").astype(jnp.uint32)]


def _as_tuple(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)
