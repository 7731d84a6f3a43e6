"""The forward pass of every decoder: embedding, the layers of its pattern, the last norm.

One code for every mesh, and for training, prefill and decode: sharding is in the types (explicit
mesh axes), each step that sends something says so (all_gather, reduce_to, out_sharding), and the
attention state is an argument.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from meshwright.models.blocks import (
    Layer,
    Params,
    Update,
    add_update,
    by_period,
    last_norm,
    prepare_weights,
    through_layers,
)
from meshwright.models.compute import Compute
from meshwright.models.decoder.arrays import abstract_arrays
from meshwright.models.decoder.config import DecoderConfig
from meshwright.models.decoder.decode_step import DecodeStep
from meshwright.models.decoder.experts import with_router_losses
from meshwright.models.decoder.kinds import LayerKind
from meshwright.models.decoder.layer import TokenContext, run_layer
from meshwright.models.decoder.sequence import SequencePlan, sequence_plan
from meshwright.models.lora import adapted_layers, token_noise
from meshwright.models.loss import (
    LmHead,
    LossSums,
    lm_logits,
    next_token_log_probs,
    next_token_loss,
    target_count,
)
from meshwright.models.settings import LossConfig
from meshwright.models.states import KeptKeys, PagedCache
from meshwright.ops import Rope, all_gather, embed
from meshwright.ops.attention import ContextParallel, Mask, attention

Batch = Mapping[str, jax.Array]


def forward(
    params: Params,
    batch: Batch,
    config: DecoderConfig,
    compute: Compute,
    state: PagedCache | KeptKeys | None = None,
) -> tuple[jax.Array, Any]:
    """Tokens [batch, length] to [batch, length, embed] after the last norm, and the next state.

    The batch has `tokens`, and for packed documents `segments` (their numbers) and `positions`
    (which count within them). For states see models/states.py.
    """
    x, kept, sequences = _forward(params, batch, config, compute, state)
    state = None if state is None else kept
    if sequences.order == "contiguous":
        return x, state
    layouts = compute.layouts
    return reshard(sequences.restored(reshard(x, layouts.block)), layouts.residual), state


def logits(params: Params, batch: Batch, config: DecoderConfig, compute: Compute) -> jax.Array:
    """[batch, length, vocab] in float32: see forward."""
    x, _ = forward(params, batch, config, compute)
    return lm_logits(x, lm_head(params, config), config.vocab, compute)


def lm_head(params: Params, config: DecoderConfig) -> LmHead:
    """The LM head, which may be padded: entries from `config.vocab` on are no tokens."""
    tied = config.tied_embeddings
    weight = params["embedding" if tied else "output"]
    return LmHead(weight, tied, params.get("output_bias"), config.logit_softcap)


def loss(
    params: Params,
    batch: Batch,
    scale: jax.Array,
    config: DecoderConfig,
    compute: Compute,
    settings: LossConfig,
) -> LossSums:
    """Of a micro-batch [batch, length]: the loss of its targets."""
    x, kept, sequences = _forward(params, batch, config, compute)

    def arranged(field: jax.Array) -> jax.Array:
        return sequences.arranged(reshard(field, compute.layouts.tokens))

    head, targets = lm_head(params, config), arranged(batch["targets"])
    weights = arranged(batch["weights"]) if "weights" in batch else None
    sums = next_token_loss(x, head, targets, scale, config.vocab, compute, settings, weights)
    counted = target_count(targets)
    size: float | jax.Array = batch["tokens"].size
    if "segments" in batch:  # which are 0 for padding
        size = jnp.maximum(jnp.sum(batch["segments"] > 0, dtype=jnp.float32), 1)
    return with_router_losses(sums, kept, size, counted, settings, len(config.pattern))


def log_probs(
    params: Params, batch: Batch, config: DecoderConfig, compute: Compute, settings: LossConfig
) -> jax.Array:
    """Of a micro-batch: log-probabilities of its targets [batch, length], 0 where there is none."""
    x, _, sequences = _forward(params, batch, config, compute)
    layouts = compute.layouts
    targets = sequences.arranged(reshard(batch["targets"], layouts.tokens))
    head = lm_head(params, config)
    arranged = next_token_log_probs(x, head, targets, config.vocab, compute, settings)
    return sequences.restored(arranged)


def _forward(
    params: Params,
    batch: Batch,
    config: DecoderConfig,
    compute: Compute,
    state: PagedCache | KeptKeys | None = None,
) -> tuple[jax.Array, Any, SequencePlan]:
    """As forward, but the hidden states are in the order in which the devices hold sequences.

    In training, what the layers keep stands for the state.
    """
    layouts = compute.layouts
    tokens, segments = batch["tokens"], batch.get("segments")
    sequences = sequence_plan(config, compute, tokens.shape[1])
    in_order = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)

    def placed(x: jax.Array, layout: P = layouts.tokens) -> jax.Array:
        return sequences.arranged(reshard(x, layout))

    weight = params["embedding"].astype(compute.dtype)
    table = all_gather(weight, layouts.weight_axes, table=True)
    x = embed(table, placed(tokens), layouts.residual)
    if isinstance(state, PagedCache):
        positions, pools, padding = state.positions(), state.layers, state.padding()
    else:
        positions, pools, padding = batch.get("positions", in_order), None, None
    if config.embedding_scale != 1:
        x = x * config.embedding_scale
    if config.learned_positions:
        table = all_gather(params["positions"].astype(compute.dtype), layouts.weight_axes)
        x = x + embed(table, placed(positions) + config.position_offset, layouts.residual)
    by_head = P(*layouts.heads.partitions[:2])
    context = compute.context or tokens.shape[1]
    rotations = _rotations(config, placed(positions, by_head), context)
    segments = None if segments is None else placed(segments)
    uncounted = None if segments is None or state is not None else segments == 0

    def layer(kind: LayerKind, mask: Mask, context: ContextParallel) -> Layer:
        def attend(
            q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, layer: Any
        ) -> tuple[jax.Array, Any]:
            more: dict[str, Any] = {"softcap": kind.attention.softcap, "sinks": sinks}
            if isinstance(state, PagedCache):
                return state.attend(q, k, v, layer, kind.attention.window, **more)
            mixed = attention(
                q, k, v, segments, mask, context=context, kernel=compute.kernel, **more
            )
            return mixed, None if state is None else (sequences.restored(k), sequences.restored(v))

        rope, tables = rotations[kind.attention.rope, kind.attention.rotated_dim]
        step = DecodeStep.of(state.tokens, tables) if isinstance(state, PagedCache) else None
        of_tokens = TokenContext(attend, rope, padding, uncounted, step)
        return functools.partial(run_layer, kind=kind, context=of_tokens, compute=compute)

    noise = token_noise(batch, tokens)
    noise = None if noise is None else placed(noise)
    update: Update | None = None
    kept: list[Any] = []
    for stack, kinds in _stacks(params, config, compute, noise):
        pattern = [
            layer(kind, mask, context)
            for kind, (mask, context) in zip(kinds, sequences.attention, strict=True)
        ]
        own = None if pools is None else pools[len(kept) :][: len(stack)]
        x = x if update is None else add_update(x, update)
        x, update, keeps = through_layers(pattern, x, stack, own, compute)
        kept += keeps
    x = last_norm(x, update, params, config.pattern[0].norm, compute)
    if config.logit_scale != 1:
        x = x * config.logit_scale
    if isinstance(state, KeptKeys):
        return x, KeptKeys(kept), sequences
    return x, kept if state is None else state.updated(kept), sequences


def _rotations(
    config: DecoderConfig, positions: jax.Array, context: int
) -> dict[tuple[Rope | None, int], tuple[Callable[[jax.Array], jax.Array], Any]]:
    """How queries and keys at these positions [batch, length] are rotated, by rope and head_dim.

    That is a function of queries or keys, and the tables that it has.
    """
    found: dict[Any, tuple[Callable[[jax.Array], jax.Array], Any]] = {}
    for kind in config.pattern:
        rope, size = kind.attention.rope, kind.attention.rotated_dim
        if rope is None:
            found[rope, size] = (lambda x: x), None
        elif (rope, size) not in found:
            cos, sin = rope.tables(positions, size, context)
            found[rope, size] = functools.partial(rope.rotate, cos=cos, sin=sin), (cos, sin)
    return found


def _stacks(
    params: Params, config: DecoderConfig, compute: Compute, noise: jax.Array | None
) -> list[tuple[Any, tuple[LayerKind, ...]]]:
    """The weights of each stack of layers, ready for `through_layers`, and the kinds they repeat.

    An engine has those of all in one list.
    """
    specs, first = abstract_arrays(config), config.leading
    kinds = {"layers": config.pattern}
    if first:
        kinds = {"leading_layers": (config.leading_kind,), **kinds}
    layers = {
        name: adapted_layers(params[name], params, (name,), compute, lambda _: noise)
        for name in kinds
        if name in params
    }
    if isinstance(layers["layers"], list):
        merged = layers["layers"]
        layers |= {name: merged[:first] for name in kinds if name != "layers"}
        layers["layers"] = merged[first:]
    return [
        (_layer_weights(layers[name], specs[name], len(kinds[name]), compute), kinds[name])
        for name in kinds
    ]


def _layer_weights(layers: Any, specs: Params, period: int, compute: Compute) -> Any:
    """The weights of a stack of layers."""
    if isinstance(layers, list):
        return [prepare_weights(layer, specs, compute) for layer in layers]
    if period == 1 or not compute.scan:
        return prepare_weights(layers, specs, compute)
    periods, rest = by_period(layers, period)
    ready = [prepare_weights(layer, specs, compute) for layer in rest]
    return prepare_weights(periods, specs, compute), ready
