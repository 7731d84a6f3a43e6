"""Sequences in zig-zag order: device i of n holds chunks i and 2n-1-i of 2n.

x = to_zigzag(x)        # [batch, length, ..], the length split over devices
x = from_zigzag(x)

Each direction is two ppermutes, one of the even chunks and one of the odd chunks: a device always
has one of each.
"""

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.errors import MeshwrightError
from meshwright.layouts import axes_of
from meshwright.ops.attention.permute import permute
from meshwright.ops.collectives import spec_of
from meshwright.present import nearest_multiples


def to_zigzag(x: jax.Array) -> jax.Array:
    """From contiguous to zig-zag order."""
    return _reordered(x, back=False)


def from_zigzag(x: jax.Array) -> jax.Array:
    """From zig-zag to contiguous order."""
    return _reordered(x, back=True)


def holder(chunk: int, ways: int) -> int:
    """The device that holds a chunk in zig-zag order."""
    return min(chunk, 2 * ways - 1 - chunk)


def _reordered(x: jax.Array, back: bool) -> jax.Array:
    spec = spec_of(x)
    over = axes_of(spec[1], spec)
    if not over:
        return x
    ways = 1
    for axis in over:
        ways *= jax.sharding.get_abstract_mesh().shape[axis]
    if x.shape[1] % (2 * ways):
        raise MeshwrightError(
            f"sequences of {x.shape[1]} tokens over {ways} devices have no zigzag order, which "
            f"needs two chunks per device; {nearest_multiples(x.shape[1], 2 * ways)} would fit"
        )
    # contiguous order has chunks 2i and 2i+1 on device i
    even = [(i, holder(2 * i, ways)) for i in range(ways)]
    odd = [(i, holder(2 * i + 1, ways)) for i in range(ways)]

    def local(part: jax.Array) -> jax.Array:
        first, second = jnp.split(part, 2, axis=1)
        # in zig-zag order device i's first chunk is number i
        is_even = lax.axis_index(over) % 2 == 0
        if back:
            evens = jnp.where(is_even, first, second)
            odds = jnp.where(is_even, second, first)
            first = permute(evens, over, [(to, at) for at, to in even])
            second = permute(odds, over, [(to, at) for at, to in odd])
        else:
            evens, odds = permute(first, over, even), permute(second, over, odd)
            first, second = jnp.where(is_even, evens, odds), jnp.where(is_even, odds, evens)
        return jnp.concatenate([first, second], axis=1)

    return jax.shard_map(local, in_specs=spec, out_specs=spec)(x)
