"""Root-mean-square norm, computed in float32."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.layouts import axes_of
from meshwright.ops.collectives import spec_of


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """RMSNorm over the last dim, times `scale`.

    The multiplication runs inside shard_map, so that the gradient of `scale` can stay partial sums
    until all layers are done (see ops.collectives). The last dim may be sharded.
    """
    spec = spec_of(x)
    local = functools.partial(_local, eps=eps, size=x.shape[-1], over=axes_of(spec[-1], spec))
    scale_spec = jax.typeof(scale).sharding.spec
    return jax.shard_map(local, in_specs=(spec, scale_spec), out_specs=spec)(x, scale)


def _local(
    x: jax.Array, scale: jax.Array, *, eps: float, size: int, over: tuple[str, ...]
) -> jax.Array:
    x32 = x.astype(jnp.float32)
    squares = jnp.sum(x32 * x32, axis=-1, keepdims=True)
    if over:
        squares = lax.psum(squares, over)
    normed = x32 * lax.rsqrt(squares / size + eps)
    broadcast = (None,) * (x.ndim - 1)
    return (normed * scale.astype(jnp.float32)[*broadcast, :]).astype(x.dtype)


def add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """`x` plus a bias over its last dims, inside shard_map (as in rms_norm)."""
    spec, bias_spec = spec_of(x), jax.typeof(bias).sharding.spec
    broadcast = (None,) * (x.ndim - bias.ndim)
    return jax.shard_map(
        lambda x, bias: x + bias[*broadcast], in_specs=(spec, bias_spec), out_specs=spec
    )(x, bias)
