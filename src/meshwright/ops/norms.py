"""Root-mean-square norm, computed in float32."""

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.layout.layout import axes_of
from meshwright.ops.exchange import spec_of


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """`x` over its last dim to mean square 1, times `scale`.

    The multiplication runs on each device's part, so that the gradient of `scale` may stay partial
    sums until all layers are done (see ops.exchange); the last dim may be split.
    """
    spec = spec_of(x)
    over = axes_of(spec[-1], spec)
    size = x.shape[-1]

    def local(x: jax.Array, scale: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        squares = jnp.sum(wide * wide, axis=-1, keepdims=True)
        if over:
            squares = lax.psum(squares, over)
        normed = wide * lax.rsqrt(squares / size + eps)
        broadcast = (None,) * (x.ndim - 1)
        return (normed * scale.astype(jnp.float32)[*broadcast, :]).astype(x.dtype)

    scale_spec = jax.typeof(scale).sharding.spec
    return jax.shard_map(local, in_specs=(spec, scale_spec), out_specs=spec)(x, scale)


def add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """`x` plus a bias over its last dims, on each device's part (as in rms_norm)."""
    spec, bias_spec = spec_of(x), jax.typeof(bias).sharding.spec
    broadcast = (None,) * (x.ndim - bias.ndim)
    return jax.shard_map(
        lambda x, bias: x + bias[*broadcast], in_specs=(spec, bias_spec), out_specs=spec
    )(x, bias)
