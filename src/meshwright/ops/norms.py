"""Norms over the last dim, computed in float32, and biases."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.ops.collectives import spec_of, split_axes

NORMS = ("rms", "rms+1", "layer")


@dataclasses.dataclass(frozen=True)
class NormKind:
    """A norm, and what it adds to the variance."""

    eps: float = 1e-5
    kind: str = "rms"  # rms+1: times 1 + scale; layer: the mean is subtracted
    bias: bool = False

    def __post_init__(self) -> None:
        if self.kind not in NORMS:
            hint = did_you_mean(self.kind, NORMS)
            raise MeshwrightError(f"norm={self.kind!r} is not a norm{hint}")
        if not 0 < self.eps < 1:  # nan too
            raise MeshwrightError(f"norm_eps={self.eps} must be above 0, such as 1e-5")


def normalize(
    x: jax.Array, scale: jax.Array, kind: NormKind, bias: jax.Array | None = None
) -> jax.Array:
    """The norm of x over the dims of `scale`, its last, times that, plus a bias if there is one.

    The multiplication runs inside shard_map, so that the gradient of `scale` can stay partial sums
    until all layers are done (see ops.collectives). The last dims may be sharded.
    """
    spec, dims = spec_of(x), scale.ndim
    over, size = split_axes(spec[-dims:]), math.prod(x.shape[-dims:])
    local = functools.partial(_local, kind=kind, size=size, over=over)
    scale_spec = jax.typeof(scale).sharding.spec
    normed = jax.shard_map(local, in_specs=(spec, scale_spec), out_specs=spec)(x, scale)
    return normed if bias is None else add_bias(normed, bias.astype(normed.dtype))


def _local(
    x: jax.Array, scale: jax.Array, *, kind: NormKind, size: int, over: tuple[str, ...]
) -> jax.Array:
    def total(x: jax.Array) -> jax.Array:
        part = jnp.sum(x, axis=tuple(range(-scale.ndim, 0)), keepdims=True)
        return lax.psum(part, over) if over else part

    x32 = x.astype(jnp.float32)
    if kind.kind == "layer":
        x32 = x32 - total(x32) / size
    normed = x32 * lax.rsqrt(total(x32 * x32) / size + kind.eps)
    broadcast = (None,) * (x.ndim - scale.ndim)
    scale = scale.astype(jnp.float32)[*broadcast]
    scaled = normed * scale
    # not 1 + scale: its gradient is still partial sums
    return (normed + scaled if kind.kind == "rms+1" else scaled).astype(x.dtype)


def add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """`x` plus a bias over its last dims, inside shard_map (as in normalize)."""
    spec, bias_spec = spec_of(x), jax.typeof(bias).sharding.spec
    broadcast = (None,) * (x.ndim - bias.ndim)
    return jax.shard_map(
        lambda x, bias: x + bias[*broadcast], in_specs=(spec, bias_spec), out_specs=spec
    )(x, bias)
