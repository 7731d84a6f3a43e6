"""What the layers of all transformers have in common: weights, projections, the mlp, the loop.

An addition to the residual stream waits for the norm that follows, so that the sum has one name in
every remat policy: a block takes `x` and an `update` still to be added, and returns both.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from meshwright.models.activations import ActivationLayouts
from meshwright.models.compute import OFFLOAD, Compute, remat_policy
from meshwright.ops import (
    Fp8Weight,
    Quantized,
    all_gather,
    einsum,
    fp8_einsum,
    over_chunks,
    partial_sums,
    plain_weights,
    reduce_to,
    rms_norm,
    scaled,
    split_axes,
    weight_in_fp8,
)

Params = dict[str, Any]
Weight = jax.Array | Quantized | Fp8Weight
# x, the update or None, the layer's weights, its part of the attention state
# → x, the next update, what the attention state keeps of this layer
Layer = Callable[[jax.Array, jax.Array | None, Params, Any], tuple[jax.Array, jax.Array, Any]]

# what a layer saves for its backward pass, by checkpoint_name; the rest is recomputed, and weights
# are all-gathered again
_MATMULS = frozenset({"input", "q", "k", "v", "attention", "middle", "gate", "up"})
REMAT: dict[str, frozenset[str]] = {
    "none": _MATMULS | {"normed", "activated"},  # everything that takes time to compute
    "elementwise": _MATMULS,  # norms and activations twice
    "mlp": _MATMULS - {"gate", "up"},  # and the first half of the mlp: a third of the memory
    "full": frozenset({"input"}),  # every layer's forward twice
    OFFLOAD: frozenset({"input"}),  # the same, with those inputs in the host's memory
}


def through_layers(
    layer: Layer, x: jax.Array, weights: Any, states: Any, compute: Compute
) -> tuple[jax.Array, jax.Array | None, Any]:
    """x through all layers, the update still to be added (or None), and what the layers keep.

    `weights` and `states` have one entry per layer, or are stacked: dim `layers` first.
    """
    checkpointed = functools.partial(jax.checkpoint, policy=remat_policy(compute.remat, REMAT))
    if not compute.scan:
        layer, update, kept = checkpointed(layer), None, []
        weights = weights if isinstance(weights, list) else _unstack(weights)
        states = states if isinstance(states, list) else [None] * len(weights)
        skips = compute.fp8_skips
        for i, (layer_weights, state) in enumerate(zip(weights, states, strict=True)):
            if not skips <= i < len(weights) - skips:
                layer_weights = plain_weights(layer_weights)
            x, update, keeps = layer(x, update, layer_weights, state)
            kept.append(keeps)
        return x, update, kept

    # the carry of a loop is written and read again: one array, not two
    def added(x: jax.Array, w: Params, state: Any) -> tuple[jax.Array, Any]:
        x, update, keeps = layer(x, None, w, state)
        return x + update, keeps

    run = checkpointed(added, prevent_cse=False)
    loop = functools.partial(lax.scan, lambda x, part: run(x, *part))
    if compute.matmul != "fp8" or not compute.fp8_skips:
        x, kept = loop(x, (weights, states))
        return x, None, kept
    # three loops: what the first and the last run over is not in fp8
    first, middle, last = _split_ends(weights, compute.fp8_skips)
    for part in (plain_weights(first), middle, plain_weights(last)):
        x, _ = loop(x, (part, None))
    return x, None, None


def prepare_weights(layers: Params, layouts: ActivationLayouts, compute: Compute) -> Params:
    """The stacked weights of all layers, ready for the loop.

    Matrices are cast while they are sharded. Vectors (norms, biases) are small and replicated:
    marked here, their gradients are reduced once for all layers, after the loop.
    """

    def ready(name: str, w: jax.Array) -> Any:
        match name:
            case "norm" | "bo":
                return along_residual(w, layouts)
            case "bq" | "bk" | "bv":
                return all_gather(w, split_axes(layouts.heads.partitions[:2]))
            case "q_norm" | "k_norm":
                return all_gather(w, split_axes(layouts.heads.partitions))
            case _ if isinstance(w, Quantized):
                return w
            case _:
                w = w.astype(compute.dtype)
                return weight_in_fp8(w) if compute.matmul == "fp8" else w

    return {
        block: {name: ready(name, w) for name, w in arrays.items()}
        for block, arrays in layers.items()
    }


def _unstack(weights: Params) -> list[Params]:
    """The weights of each layer; by split, whose gradient is one concatenation."""
    leaves, treedef = jax.tree.flatten(weights)
    layers = leaves[0].shape[0]
    parts = [lax.split(leaf, (1,) * layers, axis=0) for leaf in leaves]
    return [
        jax.tree.unflatten(treedef, [lax.squeeze(part[i], (0,)) for part in parts])
        for i in range(layers)
    ]


def _split_ends(weights: Params, ends: int) -> tuple[Params, Params, Params]:
    """The stacked weights of the first layers, of those between, and of the last."""
    leaves, treedef = jax.tree.flatten(weights)
    sizes = (ends, leaves[0].shape[0] - 2 * ends, ends)
    parts = [lax.split(leaf, sizes, axis=0) for leaf in leaves]
    first, middle, last = (jax.tree.unflatten(treedef, part) for part in zip(*parts, strict=True))
    return first, middle, last


def along_residual(vector: jax.Array, layouts: ActivationLayouts) -> jax.Array:
    """A vector over embed, split as the residual stream is."""
    *tokens, embed_axes = layouts.residual.partitions
    vector = reshard(vector, P(*(None,) * (vector.ndim - 1), embed_axes))
    return all_gather(vector, split_axes(tokens))


def enter(
    x: jax.Array,
    update: jax.Array | None,
    scale: jax.Array,
    name: str,
    eps: float,
    compute: Compute,
) -> tuple[jax.Array, jax.Array]:
    """A block's first step: `x + update`, by name, and its norm."""
    if update is not None:
        x = checkpoint_name(x + update, name)
    elif compute.remat == OFFLOAD:  # an argument: saved where it is, unless named
        x = checkpoint_name(x, name)
    return x, checkpoint_name(rms_norm(x, scale, eps), "normed")


def last_norm(x: jax.Array, update: jax.Array | None, scale: jax.Array, eps: float) -> jax.Array:
    """The norm of `x + update`, after the last layer of a stack."""
    return rms_norm(x if update is None else x + update, scale, eps)


def enter_attention(
    x: jax.Array,
    update: jax.Array | None,
    scale: jax.Array,
    name: str,
    eps: float,
    compute: Compute,
) -> tuple[jax.Array, jax.Array]:
    """x with the update, and its norm as the projections to heads take it."""
    x, normed = enter(x, update, scale, name, eps, compute)
    return x, all_gather(normed, compute.layouts.all_gathered(compute.layouts.heads))


def gather_weight(weight: Weight, compute: Compute) -> Any:
    """A weight as a matmul takes it: all-gathered, unless weights are stationary."""
    axes = compute.layouts.weight_axes
    if isinstance(weight, Fp8Weight):  # its matmul all-gathers it
        return weight
    if isinstance(weight, Quantized):  # `scaled` places the scale
        return Quantized(all_gather(weight.values, axes), weight.scale)
    return all_gather(weight, axes)


def _multiply(
    dims: str, x: jax.Array, weight: Weight, out: P, compute: Compute, **options: Any
) -> jax.Array:
    """The einsum of x and a weight, in fp8 if the weight is to be."""
    if isinstance(weight, Fp8Weight):
        return fp8_einsum(dims, x, weight, compute.layouts.weight_axes, out)
    return einsum(dims, x, weight, out_sharding=out, **options)


def project(
    dims: str, x: jax.Array, weight: Weight, target: P, compute: Compute, **options: Any
) -> jax.Array:
    """The product of x [batch, length, embed] and a weight, sharded as `target`."""
    layouts = compute.layouts
    out = partial_sums(layouts.beside_weight(target), layouts.summed)
    y = _multiply(dims, x, weight, out, compute, **options)
    return _scaled(reduce_to(y, layouts.summed, target), weight)


def _scaled(y: jax.Array, weight: Weight) -> jax.Array:
    return y if isinstance(weight, Fp8Weight) else scaled(y, weight)


def attention_output(mixed: jax.Array, w: Params, compute: Compute) -> jax.Array:
    """What heads [batch, length, heads, head_dim] add to the residual stream."""
    layouts = compute.layouts
    over = layouts.axes(layouts.heads)
    if layouts.stationary:
        mixed = reshard(mixed, layouts.beside_weight(layouts.heads))
    weight = gather_weight(w["wo"], compute)
    out = _multiply("blhd,hde->ble", mixed, weight, partial_sums(layouts.block, over), compute)
    return _scaled(reduce_to(out, over, layouts.residual), weight)


def mlp(
    x: jax.Array,
    update: jax.Array | None,
    w: Params,
    eps: float,
    compute: Compute,
    activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
) -> tuple[jax.Array, jax.Array]:
    """x with the update, and the next update.

    With a weight `gate` the activation of its product multiplies that of `up`; without, the mlp is
    the activation between `up` and `down`. `gate_up` [embed, 2, mlp] is both in one.
    """
    layouts = compute.layouts
    over, inputs_over = layouts.axes(layouts.mlp), layouts.all_gathered(layouts.mlp)
    names = [name for name in ("gate_up", "gate", "up") if name in w]
    x, normed = enter(x, update, w["norm"], "middle", eps, compute)
    weights = [gather_weight(w[name], compute) for name in (*names, "down")]

    def forward(target: P, normed: jax.Array, *weights: Any) -> Any:
        *first, down = weights
        normed = all_gather(normed, inputs_over)  # [batch, length, embed]
        hidden = [
            checkpoint_name(_to_mlp(normed, weight, compute), name)
            for name, weight in zip(names, first, strict=True)
        ]
        if names == ["gate_up"]:
            hidden = [hidden[0][:, :, 0], hidden[0][:, :, 1]]
        gated = activation(hidden[0])
        activated = checkpoint_name(gated * hidden[1] if len(hidden) == 2 else gated, "activated")
        out = _multiply("blm,me->ble", activated, down, partial_sums(layouts.block, over), compute)
        return _scaled(reduce_to(out, over, target), down)

    if not compute.mlp_chunk:
        return x, forward(layouts.residual, normed, *weights)
    # all-reduced, since a chunk's tokens are not those that tp splits between blocks
    chunk = functools.partial(forward, layouts.block)
    out = over_chunks(chunk, reshard(normed, layouts.block), weights, compute.mlp_chunk)
    return x, reshard(out, layouts.residual)


def _to_mlp(h: jax.Array, weight: Weight, compute: Compute) -> jax.Array:
    """[batch, length, mlp]; of a merged weight [batch, length, 2, mlp]."""
    target = compute.layouts.mlp
    if weight.ndim == 2:
        return project("ble,em->blm", h, weight, target, compute)
    batch, length, mlp_axes = target.partitions
    return project("ble,ecm->blcm", h, weight, P(batch, length, None, mlp_axes), compute)
