"""The forward pass of every dense decoder here: Llama, Mistral, Qwen.

One code for every mesh, and for training, prefill and decode: sharding is in the types (explicit
mesh axes), each step that sends something says so (all_gather, reduce_to, out_sharding), and the
attention state is an argument.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from meshwright.models.blocks import (
    Params,
    along_residual,
    attention_output,
    enter_attention,
    gather_weight,
    last_norm,
    mlp,
    prepare_weights,
    project,
    through_layers,
)
from meshwright.models.compute import Compute
from meshwright.models.decoder.config import DecoderConfig
from meshwright.models.decoder.rules import decoder_rules, generation_rules
from meshwright.models.decoder.sequence import SequencePlan, sequence_plan
from meshwright.models.loss import LmHead, LossConfig, lm_logits, next_token_loss
from meshwright.models.states import AttentionState, EmptyCache, KeptKeys
from meshwright.ops import (
    add_bias,
    all_gather,
    embed,
    nontrivial_axes,
    rms_norm,
    rotate,
)
from meshwright.ops.attention import attention

Batch = Mapping[str, jax.Array]


def forward(
    params: Params,
    batch: Batch,
    config: DecoderConfig,
    compute: Compute,
    state: AttentionState | EmptyCache | KeptKeys | None = None,
) -> tuple[jax.Array, Any]:
    """Tokens [batch, length] to [batch, length, embed] after the last norm, and the next state.

    The batch has `tokens`, and for packed documents `segments` (their numbers) and `positions`
    (which count within them). For states see models/states.py.
    """
    x, state, sequences = _forward(params, batch, config, compute, state)
    if sequences.context.order == "contiguous":
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
    return LmHead(params["embedding" if tied else "output"], tied)


def loss(
    params: Params,
    batch: Batch,
    scale: jax.Array,
    config: DecoderConfig,
    compute: Compute,
    settings: LossConfig,
) -> tuple[jax.Array, jax.Array]:
    """Of a micro-batch [batch, length]: `scale` × its summed loss, and the summed entropy."""
    x, _, sequences = _forward(params, batch, config, compute)
    targets = sequences.arranged(reshard(batch["targets"], compute.layouts.tokens))
    head = lm_head(params, config)
    return next_token_loss(x, head, targets, scale, config.vocab, compute, settings)


def generation_compute(params: Params) -> Compute:
    """In the dtype of the weights, which are stationary."""
    return Compute(generation_rules(), params["embedding"].dtype, stationary=True)


def start(
    params: Params, prompts: jax.Array, lengths: jax.Array, config: DecoderConfig, room: int
) -> tuple[Batch, EmptyCache, Compute]:
    """The inputs of forward for prompts [batch, length] of these lengths [batch].

    With context parallelism the length of prompts is split, as in training: activations are larger
    than weights there.
    """
    compute = generation_compute(params)
    if "sp" in nontrivial_axes():
        compute = Compute(decoder_rules(sp=True), compute.dtype)
    return {"tokens": prompts}, EmptyCache(lengths, room), compute


def _forward(
    params: Params,
    batch: Batch,
    config: DecoderConfig,
    compute: Compute,
    state: AttentionState | EmptyCache | KeptKeys | None = None,
) -> tuple[jax.Array, Any, SequencePlan]:
    """As forward, but the hidden states are in the order in which the devices hold sequences."""
    layouts = compute.layouts
    tokens, segments = batch["tokens"], batch.get("segments")
    sequences = sequence_plan(config, compute, tokens.shape[1])
    in_order = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)

    def placed(x: jax.Array, layout: P = layouts.tokens) -> jax.Array:
        return sequences.arranged(reshard(x, layout))

    weight = params["embedding"].astype(compute.dtype)
    table = all_gather(weight, layouts.weight_axes, table=True)
    x = embed(table, placed(tokens), layouts.residual)
    if state is None or isinstance(state, EmptyCache | KeptKeys):
        positions, states = batch.get("positions", in_order), None
    else:
        positions, states = state.positions(tokens), state.layers
    by_head = P(*layouts.heads.partitions[:2])
    rope = config.rope.tables(placed(positions, by_head), config.head_dim)
    segments = None if segments is None else placed(segments)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, layer: Any) -> tuple[jax.Array, Any]:
        if state is not None and not isinstance(state, EmptyCache | KeptKeys):
            return state.attend(q, k, v, layer, config.sliding_window)
        context, mask = sequences.context, sequences.mask
        mixed = attention(q, k, v, segments, mask, context=context, kernel=compute.kernel)
        return mixed, None if state is None else (sequences.restored(k), sequences.restored(v))

    layer = functools.partial(_layer, attend=attend, rope=rope, config=config, compute=compute)
    weights = params["layers"]  # stacked; of an engine, a list
    if isinstance(weights, list):
        weights = [prepare_weights(layer_weights, layouts, compute) for layer_weights in weights]
    else:
        weights = prepare_weights(weights, layouts, compute)
    x, update, kept = through_layers(layer, x, weights, states, compute)
    scale = along_residual(params["norm"], layouts)
    x = last_norm(x, update, scale, config.norm_eps)
    if isinstance(state, EmptyCache):
        keys, values = kept
        return x, state.filled(keys, values, generation_compute(params).layouts), sequences
    if isinstance(state, KeptKeys):
        return x, KeptKeys(kept), sequences
    return x, None if state is None else state.updated(kept), sequences


def _layer(
    x: jax.Array,
    update: jax.Array | None,
    w: Params,
    state: Any,
    *,
    attend: Any,
    rope: tuple[jax.Array, jax.Array],
    config: DecoderConfig,
    compute: Compute,
) -> tuple[jax.Array, jax.Array, Any]:
    """The residual stream after one layer but for the last update, that update, the state."""
    with jax.named_scope("attention"):
        own, eps = w["attention"], config.norm_eps
        x, normed = enter_attention(x, update, own["norm"], "input", eps, compute)
        q, k, v = _heads(normed, own, rope, config, compute)
        mixed, state = attend(q, k, v, state)
        update = attention_output(mixed, own, compute)
        if config.output_bias:
            update = add_bias(update, own["bo"].astype(update.dtype))
    with jax.named_scope("mlp"):
        x, update = mlp(x, update, w["mlp"], config.norm_eps, compute)
    return x, update, state


def _heads(
    normed: jax.Array,
    w: Params,
    rope: tuple[jax.Array, jax.Array],
    config: DecoderConfig,
    compute: Compute,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values, with biases, norms and rotary positions."""
    layouts = compute.layouts

    def finish(name: str, y: jax.Array) -> jax.Array:
        if config.qkv_bias:
            y = add_bias(y, w[f"b{name}"].astype(y.dtype))
        if name == "v":
            return checkpoint_name(y, "v")
        if config.qk_norm:  # whose gradient needs its input
            y = rms_norm(checkpoint_name(y, name), w[f"{name}_norm"], config.norm_eps)
            return rotate(y, *rope)
        return checkpoint_name(rotate(y, *rope), name)

    def projected(name: str, layout: P) -> jax.Array:
        weight = gather_weight(w[f"w{name}"], compute)
        return finish(name, project("ble,ehd->blhd", normed, weight, layout, compute))

    if "wqkv" in w:  # see serving_weights
        batch, length, heads, _ = layouts.kv_heads.partitions
        target = P(batch, length, heads, None, None)
        weight = gather_weight(w["wqkv"], compute)
        merged = project("ble,ekgd->blkgd", normed, weight, target, compute)
        q = merged[:, :, :, :-2]
        shape = (*q.shape[:2], config.heads, config.head_dim)
        q = jnp.reshape(q, shape, out_sharding=layouts.heads)
        return finish("q", q), finish("k", merged[:, :, :, -2]), finish("v", merged[:, :, :, -1])
    q = projected("q", layouts.heads)
    return q, projected("k", layouts.kv_heads), projected("v", layouts.kv_heads)
