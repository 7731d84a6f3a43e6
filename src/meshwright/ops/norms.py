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
    """`x` over its last dim to mean square 1, times `scale`.

    The multiplication runs on each device's part, so that the gradient of `scale` may stay partial
    sums until all layers are done (see ops.collectives); the last dim may be split.
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
    """`x + update` as it goes on, and its rms_norm, once for each of so many uses.

        x, [normed] = norm_beside(x, scale, eps, update=out, name="middle")

    The sum is kept under the name, its norm as "normed". On some GPUs one kernel makes both, and
    one adds up the gradients of all of them. A kernel makes all or nothing: where jax.checkpoint
    keeps the sum and makes the norm again, it would need x and update too, so add them before.
    Kernels have a first gradient, by vjp, and no other.
    """
    if not _by_rows(x, update):
        x = x if update is None else checkpoint_name(x + update, name)
        return x, [checkpoint_name(rms_norm(x, scale, eps), "normed")] * uses
    given = (x,) if update is None else (x, update)
    x, *normed = _fused(eps, uses, name, goes_on=True)(scale, *given)
    return x, normed


def norm_alone(
    x: jax.Array, scale: jax.Array, eps: float, update: jax.Array | None = None
) -> jax.Array:
    """The rms_norm of `x + update`, where that sum goes nowhere else; as in norm_beside."""
    if not _by_rows(x, update):
        return rms_norm(x if update is None else x + update, scale, eps)
    given = (x,) if update is None else (x, update)
    normed: jax.Array = _fused(eps, 1, "sum", goes_on=False)(scale, *given)[0]
    return normed


def _by_rows(x: jax.Array, update: jax.Array | None) -> bool:
    """Whether kernels of whole rows can be used."""
    spec = spec_of(x)
    alike = update is None or (spec_of(update), update.dtype) == (spec, x.dtype)
    whole = not axes_of(spec[-1], spec)
    return alike and whole and row_kernels.refuses(x.shape[-1], x.dtype, whole_row=True) is None


def _local(
    x: jax.Array, scale: jax.Array, *, eps: float, size: int, over: tuple[str, ...]
) -> jax.Array:
    wide = x.astype(jnp.float32)
    squares = jnp.sum(wide * wide, axis=-1, keepdims=True)
    if over:
        squares = lax.psum(squares, over)
    normed = wide * lax.rsqrt(squares / size + eps)
    broadcast = (None,) * (x.ndim - 1)
    return (normed * scale.astype(jnp.float32)[*broadcast, :]).astype(x.dtype)


@functools.lru_cache(maxsize=16)
def _fused(eps: float, uses: int, name: str, *, goes_on: bool) -> Any:
    """norm_beside, or norm_alone, of scale, x and maybe an update, with its own backward pass.

    Names are given outside of shard_map, and each array once: what comes out of one a second time
    would be kept a second time.
    """

    def both(scale: jax.Array, x: jax.Array, *update: jax.Array) -> tuple[jax.Array, jax.Array]:
        if not update:
            return x, checkpoint_name(rms_norm(x, scale, eps), "normed")
        total, normed = _by_part(functools.partial(_add_and_norm, eps=eps), scale, x, *update)
        return checkpoint_name(total, name), checkpoint_name(normed, "normed")

    def results(total: jax.Array, normed: jax.Array) -> tuple[jax.Array, ...]:
        return (total, *(normed,) * uses) if goes_on else (normed,) * uses

    @jax.custom_vjp
    def run(scale: jax.Array, *given: jax.Array) -> tuple[jax.Array, ...]:
        return results(*both(scale, *given))

    def forward(scale: jax.Array, *given: jax.Array) -> Any:
        total, normed = both(scale, *given)
        return results(total, normed), (scale, total, (None,) * len(given))

    def backward(kept: Any, gradients: tuple[jax.Array, ...]) -> Any:
        scale, total, given = kept
        local = functools.partial(_norm_gradient, eps=eps, goes_on=goes_on)
        x_gradient, scale_gradient = _by_part(local, scale, total, *gradients, of_scale=True)
        return scale_gradient, *(x_gradient,) * len(given)

    run.defvjp(forward, backward)
    return run


def _by_part(
    local: Any, scale: jax.Array, x: jax.Array, *others: jax.Array, of_scale: bool = False
) -> Any:
    """`local` of each device's part of scale and of what is split as x is.

    Gives two arrays: one split as x is, and another, or the gradient `of_scale`.
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
    scale: jax.Array, x: jax.Array, *gradients: jax.Array, eps: float, goes_on: bool
) -> tuple[jax.Array, jax.Array]:
    flat, *given = (part.reshape(-1, x.shape[-1]) for part in (x, *gradients))
    through = given.pop(0) if goes_on else None
    x_gradient, scale_gradient = row_kernels.norm_gradient(flat, scale, eps, through, *given)
    kind = jax.typeof(scale).manual_axis_type
    if kind.reduced:
        scale_gradient = lax.pcast(scale_gradient, tuple(sorted(kind.reduced)), to="unreduced")
    rest = jax.typeof(scale_gradient).manual_axis_type.varying - kind.varying
    if rest:  # a scale that is whole everywhere, and not marked
        scale_gradient = lax.psum(scale_gradient, tuple(sorted(rest)))
    return x_gradient.reshape(x.shape), scale_gradient.astype(scale.dtype)


def add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """`x` plus a bias over its last dims, on each device's part (as in rms_norm)."""
    spec, bias_spec = spec_of(x), jax.typeof(bias).sharding.spec
    broadcast = (None,) * (x.ndim - bias.ndim)
    return jax.shard_map(
        lambda x, bias: x + bias[*broadcast], in_specs=(spec, bias_spec), out_specs=spec
    )(x, bias)
