"""What the layers of all transformers have in common: weights, projections, the mlp, the loop.

An addition to the residual stream waits for the norm that follows, so that the sum has one name in
every remat policy: a block takes `x` and an `update` still to be added, and returns both.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from meshwright.errors import MeshwrightError
from meshwright.layouts import ArraySpec, axes_of
from meshwright.models.activations import ActivationLayouts
from meshwright.models.compute import OFFLOAD, Compute, remat_policy
from meshwright.models.lora import Adapted
from meshwright.ops import (
    Fp8Weight,
    NormKind,
    PartialSums,
    Quantized,
    add_bias,
    all_gather,
    current_device,
    einsum,
    experts_not_in_fp8,
    fp8_einsum,
    low_rank_product,
    normalize,
    over_chunks,
    partial_sums,
    plain_weights,
    reduce_to,
    scaled,
    spec_of,
    split_axes,
    weight_in_fp8,
)

Params = dict[str, Any]
Weight = jax.Array | Quantized | Fp8Weight | Adapted
Update = jax.Array | PartialSums
# x, the update or None, the layer's weights, its part of the attention state
# → x, the next update, what the attention state keeps of this layer
Layer = Callable[[jax.Array, Update | None, Params, Any], tuple[jax.Array, Update, Any]]

# what a layer saves for its backward pass, by checkpoint_name; the rest is recomputed, and weights
# are all-gathered again
_MATMULS = frozenset({"input", "q", "k", "v", "attention", "middle", "gate", "up", "output"})
REMAT: dict[str, frozenset[str]] = {
    "none": _MATMULS | {"normed", "activated"},  # everything that takes time to compute
    "elementwise": _MATMULS,  # norms and activations twice
    "mlp": _MATMULS - {"gate", "up"},  # and the first half of the mlp: a third of the memory
    "full": frozenset({"input"}),  # every layer's forward twice
    OFFLOAD: frozenset({"input"}),  # the same, with those inputs in the host's memory
}


def through_layers(
    pattern: Sequence[Layer],
    x: jax.Array,
    weights: Any,
    states: Any,
    compute: Compute,
    encoded: bool = False,
) -> tuple[jax.Array, Update | None, Any]:
    """x through all layers, the update still to be added (or None), and what the layers keep.

    Layer i runs `pattern[i % len(pattern)]`. `weights` have one entry per layer, or are stacked,
    dim `layers` first; for a loop over several kinds, see `by_period`. `states`, in an engine, have
    one entry per layer. What the layers keep is a list; of a loop, of stacks. `encoded`: layers
    multiply weights with something that is not among their arguments, as the encoder's tokens.
    """
    checkpointed = functools.partial(jax.checkpoint, policy=remat_policy(compute.remat, REMAT))
    if not compute.scan:
        weights = weights if isinstance(weights, list) else _unstack(weights)
        hold = encoded or _held_in_backward(weights[0], compute)
        # of a layer's arguments; a tuple holds nothing that is not among them
        held = True if hold else (True, True, False, True)
        layers = [checkpointed(layer, prevent_cse=held) for layer in pattern]
        update, kept = None, []
        states = [None] * len(weights) if states is None else states
        skips = compute.fp8_skips
        for i, (layer_weights, state) in enumerate(zip(weights, states, strict=True)):
            if not skips <= i < len(weights) - skips:
                layer_weights = plain_weights(layer_weights)
            layer = layers[i % len(layers)]
            x, update, keeps = layer(x, update, layer_weights, state)
            kept.append(keeps)
        return x, update, kept

    # the carry of a loop is written and read again: one array, not two
    def added(layer: Layer, x: jax.Array, w: Params) -> tuple[jax.Array, Any]:
        x, update, keeps = layer(x, None, w, None)
        return add_update(x, update), keeps

    runs = [checkpointed(functools.partial(added, layer), prevent_cse=False) for layer in pattern]
    if len(pattern) > 1:
        x, kept = _through_periods(runs, x, weights, compute)
        return x, None, kept
    parts, kept = [weights], []
    if compute.matmul == "fp8" and compute.fp8_skips:
        # three loops: what the first and the last run over is not in fp8
        first, middle, last = _split_ends(weights, compute.fp8_skips)
        parts = [plain_weights(first), middle, plain_weights(last)]
    for part in parts:
        x, keeps = lax.scan(runs[0], x, part)
        kept.append(keeps)
    return x, None, kept


def _held_in_backward(weights: Params, compute: Compute) -> bool:
    """Whether an unrolled backward pass must compute again what it needs of the weights alone.

    It must where weights are converted, or all-gathered over axes of the tokens: XLA would keep
    the results of all layers. Elsewhere the barrier for it only copies each layer's weights out of
    the stack, where XLA lets kernels read them (jax 0.11.2).
    """
    arrays = jax.tree.leaves(weights, is_leaf=lambda w: not isinstance(w, dict))
    is_converted = not all(isinstance(w, jax.Array) for w in arrays)
    return bool(compute.layouts.weight_axes) or is_converted


def _through_periods(
    runs: Sequence[Any], x: jax.Array, weights: Any, compute: Compute
) -> tuple[jax.Array, list[Any]]:
    """x through layers of several kinds: a loop over full periods of the pattern, then the rest."""
    if compute.matmul == "fp8":
        raise MeshwrightError(
            f"fp8 matmuls in a loop over layers of {len(runs)} kinds are not supported; unroll the "
            "layers (--compute.layers unroll)"
        )

    def period(x: jax.Array, part: Params) -> tuple[jax.Array, list[Any]]:
        kept = []
        for run, w in zip(runs, _unstack(part), strict=True):
            x, keeps = run(x, w)
            kept.append(keeps)
        return x, kept

    periods, rest = weights
    kept: list[Any] = []
    if periods:
        x, kept = lax.scan(period, x, periods)
    for run, w in zip(runs, rest, strict=False):
        x, keeps = run(x, w)
        kept.append(keeps)
    return x, kept


def by_period(weights: Params, period: int) -> tuple[Params, list[Params]]:
    """Stacked weights [layers, ..] as [periods, period, ..], and those of the layers left over."""
    leaves, treedef = jax.tree.flatten(weights)
    layers = leaves[0].shape[0]
    full = layers // period * period
    parts = [lax.split(leaf, (full, layers - full), axis=0) for leaf in leaves]

    def folded(part: jax.Array) -> jax.Array:
        spec = spec_of(part)
        shape = (full // period, period, *part.shape[1:])
        return jnp.reshape(part, shape, out_sharding=P(None, None, *spec[1:]))

    periods = jax.tree.unflatten(treedef, [folded(part) for part, _ in parts]) if full else {}
    rest = jax.tree.unflatten(treedef, [part for _, part in parts])
    return periods, _unstack(rest) if full < layers else []


def prepare_weights(layers: Params, specs: Params, compute: Compute) -> Params:
    """The weights of layers, stacked or of one, ready for use.

    Matrices are cast while they are sharded. Vectors (norms, biases) are small and replicated:
    marked here, their gradients are reduced once for all layers, after the loop. `specs` describe
    the arrays of the stack; those that are merged for serving are matrices.
    """

    def ready(w: Any, spec: ArraySpec | None) -> Any:
        if spec is not None and spec.activation == "residual":
            return along_residual(w, compute.layouts)
        if spec is not None and spec.activation:  # stored as the activation is split
            axes = getattr(compute.layouts, spec.activation).partitions
            dims = zip(("batch", "length", spec.activation, "head_dim"), axes, strict=False)
            return all_gather(w, split_axes(axes for dim, axes in dims if dim not in spec.dims))
        if isinstance(w, Quantized) or (spec is not None and not spec.is_cast):
            return w
        if isinstance(w, Adapted):
            a, b = jax.tree.map(lambda one: one.astype(compute.dtype), (w.a, w.b))
            return dataclasses.replace(w, base=ready(w.base, spec), a=a, b=b)
        w = w.astype(compute.dtype)
        return weight_in_fp8(w) if compute.matmul == "fp8" and multiplied(w, spec) else w

    def multiplied(w: jax.Array, spec: ArraySpec | None) -> bool:
        if spec is not None and spec.kind == "expert":
            dims = _device_dims(w, compute.layouts.weight_axes)
            return (
                experts_not_in_fp8(*current_device(), jnp.dtype(compute.dtype).name, dims) is None
            )
        return spec is None or spec.kind == "matrix"

    return {
        block: {name: ready(w, specs[block].get(name)) for name, w in arrays.items()}
        for block, arrays in layers.items()
    }


def _device_dims(matrix: jax.Array, weight_axes: Sequence[str]) -> tuple[int, int]:
    """The last two dims of a device's part of a matrix that is all-gathered over these axes."""
    sizes, spec = jax.sharding.get_abstract_mesh().shape, spec_of(matrix)
    inputs, outputs = (
        dim // math.prod(sizes[axis] for axis in axes_of(entry, spec) if axis not in weight_axes)
        for dim, entry in zip(matrix.shape[-2:], spec.partitions[-2:], strict=True)
    )
    return inputs, outputs


def along_residual(vector: jax.Array, layouts: ActivationLayouts) -> jax.Array:
    """A vector over embed, split as the residual stream is, and replicated over its tokens' axes.

    It is stored whole, whatever splits the residual stream.
    """
    *tokens, embed_axes = layouts.residual.partitions
    vector = reshard(vector, P(*(None,) * (vector.ndim - 1), embed_axes))
    return all_gather(vector, split_axes(tokens))


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


def add_update(x: jax.Array, update: Update) -> jax.Array:
    """The residual stream [batch, length, embed] with an update, which may be partial sums."""
    if isinstance(update, PartialSums):
        return (x.astype(jnp.float32) + update.total()[None]).astype(x.dtype)
    return x + update


def enter(
    x: jax.Array, update: Update | None, w: Params, norm: NormKind, name: str, compute: Compute
) -> tuple[jax.Array, jax.Array]:
    """A block's first step: `x + update`, by name, and its norm; `w` are the block's arrays."""
    if update is not None:
        x = checkpoint_name(add_update(x, update), name)
    elif compute.remat == OFFLOAD:  # an argument: saved where it is, unless named
        x = checkpoint_name(x, name)
    return x, norm_before(x, w, norm)


def norm_before(x: jax.Array, w: Params, norm: NormKind) -> jax.Array:
    """What a block reads: the norm of the residual stream, or itself where there is none before."""
    if "norm" not in w:
        return x
    return checkpoint_name(normalize(x, w["norm"], norm, w.get("norm_bias")), "normed")


def norm_after(update: jax.Array, w: Params, norm: NormKind) -> jax.Array:
    """What a block adds: its output, or the norm of that."""
    if "post_norm" not in w:
        return update
    update = checkpoint_name(update, "output")  # the gradient of the norm needs it
    return normalize(update, w["post_norm"], norm, w.get("post_norm_bias"))


def last_norm(
    x: jax.Array, update: Update | None, params: Params, norm: NormKind, compute: Compute
) -> jax.Array:
    """The norm of `x + update`, after the last layer of a stack that has these params."""
    x = x if update is None else add_update(x, update)
    scale = along_residual(params["norm"], compute.layouts)
    if not norm.bias:
        return normalize(x, scale, norm)
    return normalize(x, scale, norm, along_residual(params["norm_bias"], compute.layouts))


def enter_attention(
    x: jax.Array, update: Update | None, w: Params, norm: NormKind, name: str, compute: Compute
) -> tuple[jax.Array, jax.Array]:
    """x with the update, and its norm as the projections to heads take it."""
    x, normed = enter(x, update, w, norm, name, compute)
    return x, all_gather(normed, compute.layouts.all_gathered(compute.layouts.heads))


def gather_weight(
    weight: Weight, compute: Compute, split: Sequence[str] = (), also: Sequence[str] = ()
) -> Any:
    """A weight as a matmul takes it: all-gathered, unless weights are stationary.

    Experts stay split over the axes `split`. `also` are axes that split the tokens of this matmul
    and no others: over them too the gradient is reduced.
    """
    axes = tuple(axis for axis in (*compute.layouts.weight_axes, *also) if axis not in split)
    if isinstance(weight, Fp8Weight):  # its matmul all-gathers it
        return weight
    if isinstance(weight, Quantized):  # `scaled` places a scale of outputs
        scale = all_gather(weight.scale, axes, apart=True) if weight.is_nf4 else weight.scale
        return Quantized(all_gather(weight.values, axes, apart=True), scale)
    if isinstance(weight, Adapted):
        a, b = jax.tree.map(lambda one: all_gather(one, axes), (weight.a, weight.b))
        base = gather_weight(weight.base, compute, split, also)
        return dataclasses.replace(weight, base=base, a=a, b=b)
    return all_gather(weight, axes)


def project(
    dims: str,
    x: jax.Array,
    weight: Weight,
    target: P,
    compute: Compute,
    *,
    of_embed: bool = True,
    **options: Any,
) -> jax.Array:
    """The product of x [batch, length, embed] and a weight, sharded as `target`.

    Without `of_embed` it is of something else than embed, which no device has in part.
    """
    over = compute.layouts.summed if of_embed else ()
    return _product(dims, x, weight, target, over, target, compute, **options)


def _product(
    dims: str,
    x: jax.Array,
    weight: Weight,
    whole: P,
    over: Sequence[str],
    target: P,
    compute: Compute,
    **options: Any,
) -> jax.Array:
    """The product of x and a weight, sharded as `target`.

    Devices along the axes `over` have partial sums, sharded as `whole` and then reduced.
    """
    if isinstance(weight, Adapted):
        y = _product(dims, x, weight.base, whole, over, target, compute, **options)
        factors = weight.a, weight.b
        update = low_rank_product(dims, x, *factors, over, target, weight.mask, weight.dropout)
        return y + (update * weight.scale).astype(y.dtype)
    partial = partial_sums(whole, over)
    if isinstance(weight, Fp8Weight):
        y = fp8_einsum(dims, x, weight, compute.layouts.weight_axes, partial)
        return reduce_to(y, over, target)
    y = einsum(dims, x, weight, out_sharding=partial, **options)
    return scaled(reduce_to(y, over, target), weight)


def attention_output(mixed: jax.Array, w: Params, compute: Compute) -> jax.Array:
    """What heads [batch, length, heads, head_dim] add to the residual stream."""
    layouts = compute.layouts
    weight, over = gather_weight(w["wo"], compute), layouts.axes(layouts.heads)
    return _product("blhd,hde->ble", mixed, weight, layouts.block, over, layouts.residual, compute)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_sigmoid": lambda x: x * jax.nn.sigmoid(1.702 * x),
}


def activate(
    up: jax.Array, gate: jax.Array | None, activation: str, clamp: float | None = None
) -> jax.Array:
    """The activation of `up`, or of `gate`, which then multiplies `up`.

    With a clamp, `gate` is at most that and `up` within it on both sides, and 1 is added to `up`.
    """
    if gate is None:
        return ACTIVATIONS[activation](up)
    if clamp is not None:
        gate, up = jnp.minimum(gate, clamp), jnp.clip(up, -clamp, clamp) + 1
    return ACTIVATIONS[activation](gate) * up


def mlp(
    x: jax.Array,
    update: Update | None,
    w: Params,
    norm: NormKind,
    compute: Compute,
    activation: str = "silu",
) -> tuple[jax.Array, jax.Array]:
    """x with the update, and the next update."""
    x, normed = enter(x, update, w, norm, "middle", compute)
    return x, norm_after(feed_forward(normed, w, compute, activation), w, norm)


def feed_forward(
    normed: jax.Array,
    w: Params,
    compute: Compute,
    activation: str = "silu",
    clamp: float | None = None,
) -> jax.Array:
    """The mlp of what `norm_before` gives: see `activate`, between `gate` and `up` and `down`.

    Without a weight `gate` the activation is of the product with `up`. `gate_up` [embed, 2, mlp]
    is both in one. Each may have a bias.
    """
    layouts = compute.layouts
    over, inputs_over = layouts.axes(layouts.mlp), layouts.all_gathered(layouts.mlp)
    names = [name for name in ("gate_up", "gate", "up") if name in w]
    biased = [name for name in ("gate", "up") if f"{name}_bias" in w]
    weights = [gather_weight(w[name], compute) for name in (*names, "down")]
    biases = [w[f"{name}_bias"].astype(compute.dtype) for name in biased]

    def forward(target: P, normed: jax.Array, *arrays: Any) -> Any:
        *first, down = arrays[: len(weights)]
        bias_of = dict(zip(biased, arrays[len(weights) :], strict=True))
        normed = all_gather(normed, inputs_over)  # [batch, length, embed]

        def hidden(name: str, weight: Weight) -> list[jax.Array]:
            y = _to_mlp(normed, weight, compute)
            parts = [y[:, :, 0], y[:, :, 1]] if name == "gate_up" else [y]
            of = ("gate", "up") if name == "gate_up" else (name,)
            return [
                checkpoint_name(add_bias(part, bias_of[one]) if one in bias_of else part, one)
                for one, part in zip(of, parts, strict=True)
            ]

        *gates, up = itertools.chain.from_iterable(map(hidden, names, first))
        activated = activate(up, gates[0] if gates else None, activation, clamp)
        activated = checkpoint_name(activated, "activated")
        return _product("blm,me->ble", activated, down, layouts.block, over, target, compute)

    if not compute.mlp_chunk:
        out = forward(layouts.residual, normed, *weights, *biases)
    else:  # all-reduced, since a chunk's tokens are not those that tp splits between blocks
        chunk = functools.partial(forward, layouts.block)
        inputs = reshard(normed, layouts.block)
        out = over_chunks(chunk, inputs, [*weights, *biases], compute.mlp_chunk)
        out = reshard(out, layouts.residual)
    if "down_bias" in w:
        out = add_bias(out, w["down_bias"].astype(out.dtype))
    return out


def _to_mlp(h: jax.Array, weight: Weight, compute: Compute) -> jax.Array:
    """[batch, length, mlp]; of a merged weight [batch, length, 2, mlp]."""
    target = compute.layouts.mlp
    if weight.ndim == 2:
        return project("ble,em->blm", h, weight, target, compute)
    batch, length, mlp_axes = target.partitions
    return project("ble,ecm->blcm", h, weight, P(batch, length, None, mlp_axes), compute)
