"""Root-mean-square norm, computed in float32."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from meshwright.layouts import axes_of
from meshwright.ops import row_kernels
from meshwright.ops.collectives import partial_sums, spec_of


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """RMSNorm over the last dim, times `scale`.

    The multiplication runs inside shard_map, so that the gradient of `scale` can stay partial sums
    until all layers are done (see ops.collectives). The last dim may be sharded.
    """
    spec = spec_of(x)
    local = functools.partial(_local, eps=eps, size=x.shape[-1], over=axes_of(spec[-1], spec))
    scale_spec = jax.typeof(scale).sharding.spec
    return jax.shard_map(local, in_specs=(spec, scale_spec), out_specs=spec)(x, scale)


def norm_beside(
    x: jax.Array,
    scale: jax.Array,
    eps: float,
    uses: int = 1,
    update: jax.Array | None = None,
    name: str = "sum",
) -> tuple[jax.Array, list[jax.Array]]:
    """`x + update`, and its rms_norm, once per use.

        x, [normed] = norm_beside(x, scale, eps, update=out, name="middle")

    The checkpoint_name of the sum is `name`, that of the norm "normed". On some GPUs one kernel
    computes both, and one kernel sums all gradients. A kernel computes all of its outputs: where
    jax.checkpoint keeps the sum and recomputes the norm, it would need x and update too, so add
    them before. Kernels have a vjp, and no higher derivatives.
    """
    if not _by_rows(x, update):
        x = x if update is None else checkpoint_name(x + update, name)
        return x, [checkpoint_name(rms_norm(x, scale, eps), "normed")] * uses
    inputs = (x,) if update is None else (x, update)
    x, *normed = _fused(eps, uses, name, returns_sum=True)(scale, *inputs)
    return x, normed


def norm_alone(
    x: jax.Array, scale: jax.Array, eps: float, update: jax.Array | None = None
) -> jax.Array:
    """The rms_norm of `x + update`, where that sum has no other use; see norm_beside."""
    if not _by_rows(x, update):
        return rms_norm(x if update is None else x + update, scale, eps)
    inputs = (x,) if update is None else (x, update)
    normed: jax.Array = _fused(eps, 1, "sum", returns_sum=False)(scale, *inputs)[0]
    return normed


def _by_rows(x: jax.Array, update: jax.Array | None) -> bool:
    """Whether row_kernels can be used."""
    spec = spec_of(x)
    alike = update is None or (spec_of(update), update.dtype) == (spec, x.dtype)
    whole = not axes_of(spec[-1], spec)
    return alike and whole and row_kernels.refuses(x.shape[-1], x.dtype, whole_row=True) is None


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


@functools.lru_cache(maxsize=16)
def _fused(eps: float, uses: int, name: str, *, returns_sum: bool) -> Any:
    """norm_beside or norm_alone of (scale, x, optional update), with its own backward pass.

    Each array is named once, outside of shard_map: a second output of shard_map would be saved a
    second time.
    """

    def both(scale: jax.Array, x: jax.Array, *update: jax.Array) -> tuple[jax.Array, jax.Array]:
        if not update:
            return x, checkpoint_name(rms_norm(x, scale, eps), "normed")
        total, normed = _by_part(functools.partial(_add_and_norm, eps=eps), scale, x, *update)
        return checkpoint_name(total, name), checkpoint_name(normed, "normed")

    def results(total: jax.Array, normed: jax.Array) -> tuple[jax.Array, ...]:
        return (total, *(normed,) * uses) if returns_sum else (normed,) * uses

    @jax.custom_vjp
    def run(scale: jax.Array, *inputs: jax.Array) -> tuple[jax.Array, ...]:
        return results(*both(scale, *inputs))

    def forward(scale: jax.Array, *inputs: jax.Array) -> Any:
        total, normed = both(scale, *inputs)
        return results(total, normed), (scale, total, (None,) * len(inputs))

    def backward(kept: Any, gradients: tuple[jax.Array, ...]) -> Any:
        scale, total, inputs = kept
        local = functools.partial(_norm_gradient, eps=eps, returns_sum=returns_sum)
        x_gradient, scale_gradient = _by_part(local, scale, total, *gradients, of_scale=True)
        return scale_gradient, *(x_gradient,) * len(inputs)

    run.defvjp(forward, backward)
    return run


def _by_part(
    local: Any, scale: jax.Array, x: jax.Array, *others: jax.Array, of_scale: bool = False
) -> Any:
    """shard_map `local` over scale and arrays sharded as x.

    Returns two arrays: both sharded as x, or with `of_scale` the second is the gradient of scale.
    """
    spec, scale_spec = spec_of(x), jax.typeof(scale).sharding.spec
    second = partial_sums(spec_of(scale), sorted(scale_spec.reduced)) if of_scale else spec
    in_specs = (scale_spec, *(spec,) * (1 + len(others)))
    return jax.shard_map(local, in_specs=in_specs, out_specs=(spec, second))(scale, x, *others)


def _add_and_norm(
    scale: jax.Array, x: jax.Array, update: jax.Array, *, eps: float
) -> tuple[jax.Array, jax.Array]:
    flat, more = (part.reshape(-1, x.shape[-1]) for part in (x, update))
    total, normed = row_kernels.add_and_norm(flat, more, scale, eps)
    return total.reshape(x.shape), normed.reshape(x.shape)


def _norm_gradient(
    scale: jax.Array, x: jax.Array, *gradients: jax.Array, eps: float, returns_sum: bool
) -> tuple[jax.Array, jax.Array]:
    flat, *dnormed = (part.reshape(-1, x.shape[-1]) for part in (x, *gradients))
    dsum = dnormed.pop(0) if returns_sum else None
    x_gradient, scale_gradient = row_kernels.norm_gradient(flat, scale, eps, dsum, *dnormed)
    kind = jax.typeof(scale).manual_axis_type
    if kind.reduced:
        scale_gradient = lax.pcast(scale_gradient, tuple(sorted(kind.reduced)), to="unreduced")
    rest = jax.typeof(scale_gradient).manual_axis_type.varying - kind.varying
    if rest:  # scale is replicated, and not marked as reduced
        scale_gradient = lax.psum(scale_gradient, tuple(sorted(rest)))
    return x_gradient.reshape(x.shape), scale_gradient.astype(scale.dtype)


def add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """`x` plus a bias over its last dims, inside shard_map (as in rms_norm)."""
    spec, bias_spec = spec_of(x), jax.typeof(bias).sharding.spec
    broadcast = (None,) * (x.ndim - bias.ndim)
    return jax.shard_map(
        lambda x, bias: x + bias[*broadcast], in_specs=(spec, bias_spec), out_specs=spec
    )(x, bias)
