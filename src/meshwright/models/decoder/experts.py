"""A mixture of experts in place of the mlp: a router, and the experts that it chooses for a token.

The router is computed in float32, whatever the dtype of matmuls: a rounded score chooses another
expert. Its sums over tokens leave the layer, and are reduced once for all layers.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from meshwright.layouts import axes_of
from meshwright.models.blocks import Params, activate, feed_forward, gather_weight
from meshwright.models.compute import Compute, choose_exchange
from meshwright.models.decoder.kinds import ExpertsKind, MlpKind
from meshwright.models.lora import Adapted
from meshwright.models.loss import ExtraLoss, LossSums, Metric
from meshwright.models.settings import LossConfig
from meshwright.ops import (
    FEW_TOKENS,
    Fp8Groups,
    Fp8Weight,
    Mlp,
    Quantized,
    Rows,
    all_gather,
    expert_capacity,
    few_tokens_mlp,
    few_tokens_unavailable,
    float32_matmul,
    fp8_groups,
    group_alignment,
    grouped_low_rank,
    grouped_matmul,
    over_capacity,
    reduce_part,
    spec_of,
    split_axes,
    through_experts,
    top_experts,
    varying_like,
)

_MATRICES = ("gate", "up", "down")
_BIASES = ("gate_bias", "up_bias", "down_bias")
_ROUTER_BIASES = ("router_bias", "selection_bias")
_ROUTER = ("router", *_ROUTER_BIASES)
_OF_TOKENS = ("padding", "uncounted")
# what logits meet varies as they do: not over axes that they are summed over
_WITH_LOGITS = (*_ROUTER_BIASES, *_OF_TOKENS)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RouterSums:
    """What a router did with the tokens of each device, in float32."""

    chosen: jax.Array  # [devices, experts]: how often each was chosen
    scores: jax.Array  # [devices, experts]: the sum of its scores
    squares: jax.Array  # [devices]: the sum of the squared log-normalizers
    dropped: jax.Array | None = None  # [devices]: choices of experts that had no capacity left


def mixture(
    normed: jax.Array,
    w: Params,
    kind: MlpKind,
    experts: ExpertsKind,
    compute: Compute,
    padding: jax.Array | None = None,
    uncounted: jax.Array | None = None,
) -> tuple[jax.Array, RouterSums]:
    """What the experts add to the residual stream, of what `norm_before` gives.

    An engine's step gives `padding` [batch, length], the tokens that are nobody's: for them no
    expert need be read. Nothing of it is differentiated. In training those are `uncounted`: they
    are in no sum of the router.
    """
    layouts = compute.layouts
    over, target = layouts.axes(layouts.mlp), layouts.residual
    batch, length = target.partitions[:2]
    # with sequence parallelism tp splits the tokens between blocks
    along_tp = tuple(axis for axis in axes_of(length, "length") if axis in over)
    split = axes_of(spec_of(_base(w["down"]))[0], "experts")
    tokens = layouts.token_axes
    exchange = _exchange(split, tokens, experts, compute)
    summed = tuple(layouts.summed)
    left = (*over, *(split if exchange is None else ()))
    arrays = {"x": normed, **_device_weights(w, compute, split)}
    # length is whole on a device where there is a capacity
    most = expert_capacity(compute.capacity, normed.shape[1], experts.per_token, experts.count)
    if padding is not None and exchange is None and padding.size <= FEW_TOKENS:
        # of more tokens, almost all experts are read
        arrays["padding"] = reshard(padding, P(batch, length))
    if uncounted is not None:
        arrays["uncounted"] = reshard(uncounted, P(batch, length))
    # the kernels for few tokens are without factors
    is_adapted = any(isinstance(w[name], Adapted) for name in _MATRICES if name in w)
    may_be_few = "padding" in arrays and not is_adapted and not summed

    def local(arrays: Params) -> tuple[jax.Array, RouterSums]:
        x = arrays["x"]
        arrays = {
            name: array if name in _WITH_LOGITS else _varying(array, x)
            for name, array in arrays.items()
        }
        down = _base(arrays["down"])
        own, *sizes = down.shape
        count = math.prod((*x.shape[:2], *(lax.axis_size(axis) for axis in along_tp)))
        few = may_be_few and few_tokens_unavailable(count, compute.dtype, *sizes) is None
        chosen, weights, sums = _route(arrays, experts, summed, few)
        if compute.capacity:
            full = over_capacity(chosen.reshape(*x.shape[:2], -1), most).reshape(chosen.shape)
            chosen, weights = jnp.where(full, experts.count, chosen), jnp.where(full, 0, weights)
            if "uncounted" in arrays:
                full = full & ~arrays["uncounted"].reshape(-1, 1)
            dropped = jnp.sum(full, dtype=jnp.float32)[None]
            sums = dataclasses.replace(sums, dropped=dropped)
        tokens = [
            _for_block(array.reshape(*x.shape[:2], -1), along_tp, down)
            for array in (x, chosen, weights)
        ]
        flat, chosen, weights = (array.reshape(-1, array.shape[-1]) for array in tokens)
        if few:
            first = lax.axis_index(split) * own if split else 0
            y = _few_tokens(flat, chosen - first, weights, arrays, kind, over)
            return reduce_part(y.reshape(*tokens[0].shape[:2], -1), left, target), sums
        alignment, _ = group_alignment(compute.dtype)

        def run(rows: Rows) -> jax.Array:
            # an exchange has room for more rows than there are: they are computed again, not saved
            name = checkpoint_name if exchange is None else lambda y, _: y
            axes, scale = (summed, over), compute.adapter_scale
            return _expert_mlp(rows, arrays, kind, alignment, axes, name, scale)

        mlp = Mlp(run, alignment)
        room = own * most * x.shape[0] if compute.capacity else None
        if "padding" in arrays:
            room = chosen.size  # all of it may be dropped
        y = through_experts(flat, chosen, weights, mlp, own, split, exchange, room)
        out = reduce_part(y.reshape(*tokens[0].shape[:2], -1), left, target)
        return out, sums

    specs = jax.tree.map(lambda array: jax.typeof(array).sharding.spec, arrays)
    devices = split_axes((batch, length)) or None
    by_device: Any = P(devices)
    of_dropped = by_device if compute.capacity else None
    of_sums = RouterSums(by_device, by_device, by_device, of_dropped)
    out, sums = jax.shard_map(local, in_specs=(specs,), out_specs=(target, of_sums))(arrays)
    if experts.shared:
        shared = {name: w[f"shared_{name}"] for name in ("gate", "up", "down")}
        out = out + feed_forward(normed, shared, compute, kind.activation, kind.clamp)
    return out, sums


def _device_weights(w: Params, compute: Compute, split: tuple[str, ...]) -> Params:
    """What a device computes with: matrices and biases of its experts, and the router.

    A matrix is an array, Quantized or Fp8Groups.
    """
    layouts = compute.layouts
    of_router = tuple(dict.fromkeys((*layouts.weight_axes, *split)))

    def scored_with(name: str) -> jax.Array:
        if layouts.stationary and name in _ROUTER_BIASES:  # an engine's: all have the same tokens
            return reshard(w[name], P(None))
        return all_gather(w[name], of_router)

    biases = {name: w[name] for name in _BIASES if name in w}
    if "down_bias" in biases:  # stored whole, and added to what may be split along embed
        of_experts = spec_of(w["down_bias"])[0]
        along_embed = layouts.residual.partitions[2]
        biases["down_bias"] = reshard(w["down_bias"], P(of_experts, along_embed))
    matrices = {name: gather_weight(w[name], compute, split) for name in _MATRICES if name in w}
    others = tuple(axis for axis in layouts.token_axes if axis not in split)
    return {
        **{name: _device_matrix(matrix, compute, split) for name, matrix in matrices.items()},
        **_factors(matrices),
        **{name: all_gather(bias, others) for name, bias in biases.items()},
        # every device scores all experts
        **{name: scored_with(name) for name in _ROUTER if name in w},
    }


def _route(
    arrays: Params, experts: ExpertsKind, summed: tuple[str, ...], few: bool
) -> tuple[jax.Array, jax.Array, RouterSums]:
    """The experts of each token of x, their weights, and what the router's losses need."""
    x = arrays["x"]
    logits = _logits(x.reshape(-1, x.shape[-1]), arrays, summed)
    bias = arrays.get("selection_bias")
    bias = None if bias is None else varying_like(bias, logits)
    of_tokens = {
        name: varying_like(arrays[name], logits).reshape(-1)
        for name in _OF_TOKENS
        if name in arrays
    }
    padding = of_tokens.get("padding")
    if few and experts.groups == 1:
        chosen, weights, _ = top_experts(
            logits, bias, experts.per_token, softmax=experts.scores == "softmax",
            normalized=experts.normalized, scale=experts.scale, padding=padding,
        )  # fmt: skip
        scores = jnp.zeros_like(logits)  # nobody asks for them
    else:
        chosen, weights, scores = choose(logits, experts, bias)
        if padding is not None:
            chosen = jnp.where(padding[:, None], experts.count, chosen)
    is_chosen, squares = _one_hot(chosen, experts.count), jax.nn.logsumexp(logits, axis=-1) ** 2
    if "uncounted" in of_tokens:
        counted = ~of_tokens["uncounted"]
        is_chosen = is_chosen & counted[:, None, None]
        scores, squares = jnp.where(counted[:, None], scores, 0), jnp.where(counted, squares, 0)
    times = jnp.sum(is_chosen, (0, 1), dtype=jnp.float32)
    sums = RouterSums(times[None], jnp.sum(scores, 0)[None], jnp.sum(squares)[None])
    return chosen, weights, sums


def _device_matrix(matrix: Any, compute: Compute, split: tuple[str, ...]) -> Any:
    """A matrix without its update of low rank, as `grouped_matmul` takes it."""
    base = matrix.base if isinstance(matrix, Adapted) else matrix
    if isinstance(base, Quantized):  # the scale is split as the outputs are
        return Quantized(base.values, reshard(base.scale, P(*spec_of(base.values)[:2])))
    if isinstance(base, Fp8Weight):
        return fp8_groups(base, lambda array: gather_weight(array, compute, split))
    return base


def _base(matrix: Any) -> jax.Array:
    """The array of a matrix that is as large as the matrix."""
    base = matrix.base if isinstance(matrix, Adapted) else matrix
    if isinstance(base, Fp8Groups):
        return base.weights
    return base.values if isinstance(base, Quantized | Fp8Weight) else base


def _varying(arrays: Any, *like: jax.Array) -> Any:
    return jax.tree.map(lambda array: varying_like(array, *like), arrays)


def _factors(matrices: Params) -> Params:
    """Those of the matrices with an update of low rank, by the names of the matrices."""
    adapted = {name: matrix for name, matrix in matrices.items() if isinstance(matrix, Adapted)}
    return {
        f"{name}_{factor}": getattr(matrix, factor)
        for name, matrix in adapted.items()
        for factor in "ab"
        if getattr(matrix, factor) is not None
    }


def _for_block(array: jax.Array, along_tp: tuple[str, ...], weight: jax.Array) -> jax.Array:
    """Of tokens [batch, length, ..], all that a block takes; they vary as its weights do."""
    if along_tp:
        return lax.all_gather(array, along_tp, axis=1, tiled=True)
    return varying_like(array, weight)


def choose(
    logits: jax.Array, experts: ExpertsKind, selection_bias: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The experts of tokens and their weights [tokens, k], and the scores of all, from logits."""
    if experts.scores == "softmax":
        scores = jax.nn.softmax(logits, axis=-1)
    else:
        scores = jax.nn.sigmoid(logits)
    ranked = lax.stop_gradient(scores)
    if selection_bias is not None:
        ranked = ranked + lax.stop_gradient(selection_bias)[None]
    if experts.groups > 1:
        ranked = _in_best_groups(ranked, experts)
    _, chosen = lax.top_k(ranked, experts.per_token)
    # as a sum, which has no scattered gradient
    is_chosen = _one_hot(chosen, experts.count)
    weights = jnp.sum(jnp.where(is_chosen, scores[:, None], 0), axis=-1)
    if experts.normalized:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return chosen, weights * experts.scale, scores


def _one_hot(numbers: jax.Array, count: int) -> jax.Array:
    """[.., count]: whether it is that number."""
    return numbers[..., None] == lax.broadcasted_iota(jnp.int32, (*numbers.shape, count), 2)


def _in_best_groups(ranked: jax.Array, experts: ExpertsKind) -> jax.Array:
    """The scores of experts in the groups whose two best are best; of others, lower than any."""
    grouped = ranked.reshape(-1, experts.groups, experts.count // experts.groups)
    best = jnp.sum(lax.top_k(grouped, min(2, grouped.shape[-1]))[0], axis=-1)
    _, groups = lax.top_k(best, experts.groups_per_token)
    kept = jnp.any(_one_hot(groups, experts.groups), axis=1)
    return jnp.where(kept[..., None], grouped, -jnp.inf).reshape(ranked.shape)


def _logits(flat: jax.Array, arrays: Params, summed: tuple[str, ...]) -> jax.Array:
    logits = float32_matmul(flat, arrays["router"])
    logits = lax.psum(logits, summed) if summed else logits
    if "router_bias" in arrays:
        bias = varying_like(arrays["router_bias"], logits)
        logits = logits + bias.astype(jnp.float32)[None]
    return logits


def _expert_mlp(
    rows: Rows,
    arrays: Params,
    kind: MlpKind,
    alignment: int,
    axes: tuple[tuple[str, ...], tuple[str, ...]],
    named: Callable[[jax.Array, str], jax.Array],
    adapter_scale: float,
) -> jax.Array:
    """The mlp of each row's expert; of its weights a device has those along tp.

    `axes`: those that inputs are summed over, and tp. `named` names what a remat policy may save.
    """
    summed, over = axes

    def product(x: jax.Array, name: str) -> jax.Array:
        weight = _varying(arrays[name], x)
        x = varying_like(x, *jax.tree.leaves(weight))
        y = grouped_matmul(x, weight, rows.sizes, alignment)
        if f"{name}_b" not in arrays:
            return y
        of = name if f"{name}_a" in arrays else "gate"  # which `up` may share, see lora.py
        a, b = (varying_like(arrays[one], x) for one in (f"{of}_a", f"{name}_b"))
        update = grouped_low_rank(x, a, b, rows.sizes, alignment)
        return y + (adapter_scale * update).astype(y.dtype)

    def biased(y: jax.Array, name: str) -> jax.Array:
        if f"{name}_bias" not in arrays:
            return y
        return y + varying_like(arrays[f"{name}_bias"], y)[rows.experts].astype(y.dtype)

    def hidden(name: str) -> jax.Array:
        y = product(rows.values, name)
        return lax.psum(y, summed) if summed else y

    parts = {
        name: named(biased(hidden(name), name), name) for name in ("gate", "up") if name in arrays
    }
    activated = activate(parts["up"], parts.get("gate"), kind.activation, kind.clamp)
    activated = named(activated, "activated")
    if rows.weights is not None:
        activated = activated * rows.weights[:, None].astype(activated.dtype)
    y = product(activated, "down")
    if "down_bias" not in arrays:
        return y
    bias = varying_like(arrays["down_bias"], y)[rows.experts].astype(y.dtype)
    if rows.weights is not None:
        bias = bias * rows.weights[:, None].astype(bias.dtype)
    # of the devices along tp, whose results are summed, one adds it
    return y + (jnp.where(lax.axis_index(over) == 0, bias, 0) if over else bias)


def _few_tokens(
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    arrays: Params,
    kind: MlpKind,
    over: tuple[str, ...],
) -> jax.Array:
    """What the experts of a device add to tokens that are few enough for its kernel."""

    def activated(up: jax.Array, gate: jax.Array | None) -> jax.Array:
        return activate(up, gate, kind.activation, kind.clamp)

    of_mlp = {name: _varying(arrays[name], x) for name in (*_MATRICES, *_BIASES) if name in arrays}
    if over and "down_bias" in of_mlp:  # of the devices along tp, one adds it
        bias = of_mlp["down_bias"]
        of_mlp["down_bias"] = jnp.where(lax.axis_index(over) == 0, bias, jnp.zeros_like(bias))
    return few_tokens_mlp(x, chosen, weights, of_mlp, activated).total().astype(x.dtype)


def _exchange(
    split: tuple[str, ...], tokens: tuple[str, ...], experts: ExpertsKind, compute: Compute
) -> str | None:
    """How tokens reach the experts of other devices; None where all devices have all tokens."""
    if not split or not set(split) & set(tokens):
        return None
    sizes = jax.sharding.get_abstract_mesh().shape
    return choose_exchange(
        compute.experts, math.prod(sizes[axis] for axis in split), experts.per_token
    )


def with_router_losses(
    sums: LossSums,
    kept: list[Any],
    tokens: float | jax.Array,
    targets: jax.Array,
    settings: LossConfig,
    period: int = 1,
) -> LossSums:
    """The loss of a micro-batch of `tokens` with those of its routers, averaged over the layers.

    Micro-batches count by their number of `targets`, whatever the weights of these are. `kept`:
    RouterSums of layers or of stacks of layers, or nothing. A loop over periods of a pattern has a
    stack for each of its layers.
    """
    routers = [one for one in kept if one is not None]
    if not routers:
        return sums
    chosen, scores, squares = (
        _by_layer([getattr(one, name) for one in routers], ndim, period)
        for name, ndim in (("chosen", 2), ("scores", 2), ("squares", 1))
    )
    balance = chosen.shape[-1] * jnp.sum(chosen / tokens * (scores / tokens), axis=-1)
    mean = jnp.mean(chosen, axis=-1)
    load = jnp.max(chosen, axis=-1) / jnp.maximum(mean, 1e-9)  # of padding alone it is 0
    count = targets.astype(jnp.float32)  # each summed loss is divided by it
    extra = {
        "load_balance": ExtraLoss(jnp.mean(balance) * count, settings.load_balance, targets),
        "router_z": ExtraLoss(jnp.mean(squares) / tokens * count, settings.router_z, targets),
    }
    metrics = {**sums.metrics, "highest_load": Metric(jnp.mean(load) * count, targets)}
    if routers[0].dropped is not None:
        dropped = _by_layer([one.dropped for one in routers], 1, period)
        share = jnp.sum(dropped) / jnp.maximum(jnp.sum(chosen), 1)
        metrics["dropped"] = Metric(share * count, targets)
    extra = {**sums.extra, **extra}
    return dataclasses.replace(sums, metrics=metrics, extra=extra, chosen=lax.stop_gradient(chosen))


def _by_layer(arrays: list[jax.Array], ndim: int, period: int) -> jax.Array:
    """Sums [devices, ..] of layers, or those of stacks, as [layers, ..]: over all devices."""
    summed = [jnp.sum(one if one.ndim > ndim else one[None], axis=1) for one in arrays]
    if period > 1 and arrays[0].ndim > ndim:
        in_order = jnp.stack(summed[:period], axis=1)
        summed[:period] = [in_order.reshape(-1, *in_order.shape[2:])]
    return jnp.concatenate(summed)
