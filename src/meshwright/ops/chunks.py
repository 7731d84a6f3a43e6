"""Apply a function of tokens in chunks of each device's tokens.

out = over_chunks(lambda h, w: jax.nn.silu(h @ w) @ w.T, h, [w], size=1024)

Intermediate values then exist for one chunk at a time, forward and backward.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from meshwright.arithmetic import divisors
from meshwright.layouts import axes_of
from meshwright.ops.collectives import spec_of


def over_chunks(
    function: Callable[..., jax.Array], x: jax.Array, weights: Sequence[jax.Array], size: int
) -> jax.Array:
    """function(x, *weights) for x [batch, length, embed], in chunks of at most `size` tokens.

    The length may be sharded: each device chunks its own part. The result is sharded as `x`.
    """
    batch, length, embed = x.shape
    spec = spec_of(x)
    sizes = jax.sharding.get_abstract_mesh().shape
    ways = math.prod(sizes[axis] for axis in axes_of(spec[1], spec))
    part = length // ways
    chunks = next(n for n in divisors(part) if n * size >= part)
    if chunks == 1:
        return function(x, *weights)
    cut = P(spec[0], spec[1], None, None, spec[2])
    parts = jnp.reshape(x, (batch, ways, chunks, part // chunks, embed), out_sharding=cut)

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
    def one(h: jax.Array) -> jax.Array:
        flat = jnp.reshape(h, (batch, length // chunks, embed), out_sharding=spec)
        out = function(flat, *weights)
        return jnp.reshape(out, h.shape, out_sharding=P(*cut[:2], None, cut[4]))

    done: Any = lax.map(one, jnp.moveaxis(parts, 2, 0))
    return jnp.reshape(jnp.moveaxis(done, 0, 2), x.shape, out_sharding=spec)
