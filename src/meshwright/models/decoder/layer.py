"""One layer of a decoder, by its kind: attention and an MLP that add to the residual stream."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from meshwright.models.blocks import (
    Params,
    Update,
    attention_output,
    enter,
    feed_forward,
    gather_weight,
    norm_after,
    norm_before,
    project,
)
from meshwright.models.compute import Compute
from meshwright.models.decoder.decode_step import DecodeStep, attention_block, experts_block
from meshwright.models.decoder.experts import RouterSums, mixture
from meshwright.models.decoder.kinds import LayerKind
from meshwright.models.decoder.latent import latent_heads
from meshwright.ops import add_bias, all_gather, normalize


@dataclasses.dataclass(frozen=True)
class TokenContext:
    """What a layer knows of its tokens besides their vectors."""

    # queries, keys, values, the sinks or None, the layer's state → the mix of values, its state
    attend: Callable[..., tuple[jax.Array, Any]]
    rope: Callable[[jax.Array], jax.Array]  # rotates queries or keys by their positions
    padding: jax.Array | None = None  # [batch, length]: of an engine's step, which are nobody's
    uncounted: jax.Array | None = None  # [batch, length]: padding in training
    step: DecodeStep | None = None  # whose blocks may have kernels for few tokens


def run_layer(
    x: jax.Array,
    update: Update | None,
    w: Params,
    state: Any,
    *,
    kind: LayerKind,
    context: TokenContext,
    compute: Compute,
) -> tuple[jax.Array, Update, Any]:
    """The residual stream after one layer but for the last update, that update, and what it keeps.

    That is the state, or in training what the router of experts did, if there is one.
    """
    own, of_mlp, step = w["attention"], w["mlp"], context.step
    with jax.named_scope("attention"):
        if step is not None and step.runs_attention(own, state, kind, compute):
            x, update, state = attention_block(x, update, own, state, step, kind, compute)
            normed = x  # not of the mlp
        else:
            x, normed, update, state = _attention(x, update, own, state, kind, context, compute)
    with jax.named_scope("mlp"):
        padding = context.padding
        if step is not None and padding is not None and step.runs_experts(of_mlp, kind, compute):
            return *experts_block(x, update, of_mlp, padding, kind), state
        if not kind.parallel:
            x, normed = enter(x, update, of_mlp, kind.norm, "middle", compute)
            added, sums = _mlp(normed, of_mlp, kind, compute, context)
            return x, added, sums if state is None else state
        normed = normed if kind.shared_norm else norm_before(x, of_mlp, kind.norm)
        added, sums = _mlp(normed, of_mlp, kind, compute, context)
        return x, update + added, sums if state is None else state


def _attention(
    x: jax.Array,
    update: Update | None,
    w: Params,
    state: Any,
    kind: LayerKind,
    context: TokenContext,
    compute: Compute,
) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
    """x with the update, its norm, what attention adds, and the state."""
    layouts = compute.layouts
    x, normed = enter(x, update, w, kind.norm, "input", compute)
    if kind.attention.kv_rank is None:
        inputs = all_gather(normed, layouts.all_gathered(layouts.heads))
        q, k, v = _heads(inputs, w, context.rope, kind, compute)
    else:
        q, k, v = latent_heads(normed, w, context.rope, kind, compute)
    mixed, state = context.attend(q, k, v, w.get("sinks"), state)
    mixed = mixed[..., : kind.attention.values_dim]
    update = attention_output(mixed, w, compute)
    if kind.attention.output_bias:
        update = add_bias(update, w["bo"].astype(update.dtype))
    return x, normed, _scaled(norm_after(update, w, kind.norm), kind), state


def _mlp(
    normed: jax.Array, w: Params, kind: LayerKind, compute: Compute, context: TokenContext
) -> tuple[jax.Array, RouterSums | None]:
    """What the mlp or the experts add, and what their router did."""
    sums = None
    if kind.experts.count:
        of_tokens = context.padding, context.uncounted
        added, sums = mixture(normed, w, kind.mlp, kind.experts, compute, *of_tokens)
    else:
        added = feed_forward(normed, w, compute, kind.mlp.activation, kind.mlp.clamp)
    return _scaled(norm_after(added, w, kind.norm), kind), sums


def _scaled(update: jax.Array, kind: LayerKind) -> jax.Array:
    return update if kind.residual_scale == 1 else update * kind.residual_scale


def _heads(
    normed: jax.Array,
    w: Params,
    rope: Callable[[jax.Array], jax.Array],
    kind: LayerKind,
    compute: Compute,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values, with biases, norms and rotary positions."""
    layouts, of = compute.layouts, kind.attention

    def finish(name: str, y: jax.Array) -> jax.Array:
        if of.qkv_bias:
            y = add_bias(y, w[f"b{name}"].astype(y.dtype))
        if name == "v":
            return checkpoint_name(y, "v")
        if of.qk_norm:  # whose gradient needs its input
            y = normalize(checkpoint_name(y, name), w[f"{name}_norm"], kind.norm)
            return scaled(name, rope(y))
        return checkpoint_name(scaled(name, rope(y)), name)

    def scaled(name: str, y: jax.Array) -> jax.Array:
        """Queries for attention that multiplies scores with head_dim^-0.5."""
        if name != "q" or of.scale is None or of.scale == of.head_dim**-0.5:
            return y
        return y * (of.scale * of.head_dim**0.5)

    def projected(name: str, layout: P) -> jax.Array:
        weight = gather_weight(w[f"w{name}"], compute)
        return finish(name, project("ble,ehd->blhd", normed, weight, layout, compute))

    if "wqkv" in w:  # see serving_weights
        batch, length, heads, _ = layouts.kv_heads.partitions
        target = P(batch, length, heads, None, None)
        weight = gather_weight(w["wqkv"], compute)
        merged = project("ble,ekgd->blkgd", normed, weight, target, compute)
        q = merged[:, :, :, :-2]
        q = jnp.reshape(q, (*q.shape[:2], of.heads, of.head_dim), out_sharding=layouts.heads)
        return finish("q", q), finish("k", merged[:, :, :, -2]), finish("v", merged[:, :, :, -1])
    q = projected("q", layouts.heads)
    return q, projected("k", layouts.kv_heads), projected("v", layouts.kv_heads)
