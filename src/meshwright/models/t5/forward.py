"""The forward pass of T5: an encoder, and a decoder that attends to its output.

Each stack has one bias of relative positions, which all of its layers add to their scores. Scores
are not scaled by head_dim. One code for every mesh, and for training and generation: as in the
decoder family, the attention state is an argument.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from meshwright.models.blocks import (
    Params,
    Update,
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
from meshwright.models.lora import adapted_layers, token_noise
from meshwright.models.loss import LmHead, LossSums, lm_logits, next_token_loss
from meshwright.models.settings import LossConfig
from meshwright.models.t5.arrays import abstract_arrays
from meshwright.models.t5.config import T5Config
from meshwright.models.t5.state import T5PagedCache
from meshwright.ops import NormKind, all_gather, embed, relative_bias
from meshwright.ops.attention import EVERYTHING, ContextParallel, Mask, Segments, attention

Batch = Mapping[str, jax.Array]
Attend = Callable[[jax.Array, jax.Array, jax.Array], Any]  # q, k, v

# T5's gelu is the approximation
_ACTIVATIONS = {"relu": "relu", "gelu": "gelu_tanh", "silu": "silu"}


def logits(params: Params, batch: Batch, config: T5Config, compute: Compute) -> jax.Array:
    """[batch, length, vocab] in float32: see forward."""
    x, _ = forward(params, batch, config, compute)
    return lm_logits(x, lm_head(params, config), config.vocab, compute)


def loss(
    params: Params,
    batch: Batch,
    scale: jax.Array,
    config: T5Config,
    compute: Compute,
    settings: LossConfig,
) -> LossSums:
    """Of a micro-batch: the loss of its targets."""
    x, _ = forward(params, batch, config, compute)
    targets = reshard(batch["targets"], compute.layouts.tokens)
    head = lm_head(params, config)
    return next_token_loss(x, head, targets, scale, config.vocab, compute, settings)


def lm_head(params: Params, config: T5Config) -> LmHead:
    """The LM head, which may be padded: entries from `config.vocab` on are no tokens."""
    tied = config.tied_embeddings
    return LmHead(params["embedding" if tied else "output"], tied)


def forward(
    params: Params,
    batch: Batch,
    config: T5Config,
    compute: Compute,
    state: T5PagedCache | None = None,
) -> tuple[jax.Array, Any]:
    """[batch, length, embed] of the decoder's tokens as the LM head takes them, the next state.

    Without a state the batch has `encoder_tokens` [batch, encoder_length] and `tokens` [batch,
    length]; where examples are packed or padded also `encoder_segments` and `segments`, which
    number the examples of a sequence from 1, padding 0: tokens of the decoder see the encoder's of
    the same number. With a state, which has the encoder's keys, the batch is the next `tokens`.
    """
    layouts, stack, norm = compute.layouts, params["decoder"], NormKind(config.norm_eps)
    batch = {name: reshard(x, layouts.tokens) for name, x in batch.items()}
    weight = params["embedding"].astype(compute.dtype)
    table = all_gather(weight, layouts.weight_axes, table=True)
    if state is None:
        encoded = encode(params, batch, config, compute, table)
        segments = _segments_of_both(batch)
        bias = _bias(stack, batch["tokens"].shape[1], config, compute, bidirectional=False)
        whole = attention_of(compute, Mask(), batch.get("segments"), bias)
    else:
        own_bias = state.bias(stack["relative_bias"], config.max_distance)

    def layer(x: jax.Array, update: Update | None, w: Params, pool: Any) -> Any:
        cross = w["cross_attention"]

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
            if state is None:
                return whole(q, k, v), None
            return state.attend(q, k, v, pool, own_bias)

        with jax.named_scope("attention"):
            x, update, kept = _self_attention(x, update, w["attention"], attend, config, compute)
        with jax.named_scope("cross_attention"):
            x, h = enter_attention(x, update, cross, norm, "middle", compute)
            q = _queries(h, cross, config, compute)
            if state is None:
                keys = keys_and_values(encoded, cross, compute)
                mixed = attention_of(compute, EVERYTHING, segments)(q, *keys)
            else:
                mixed = state.attend_to_encoded(q, pool)
            update = attention_output(mixed, cross, compute)
        return *_mlp(x, update, w, config, compute), kept

    x = embed(table, batch["tokens"], layouts.residual)
    weights = layer_weights(params, "decoder", config, compute, batch)
    pools = None if state is None else state.layers
    x, update, kept = through_layers([layer], x, weights, pools, compute, encoded=True)
    x = last_norm(x, update, stack, norm, compute)
    x = x * config.embed**-0.5 if config.scaled_output else x
    return x, None if state is None else state.updated(kept)


def _segments_of_both(batch: Batch) -> Segments | None:
    """Those of the decoder's tokens and of the encoder's, None if the batch has neither."""
    own, others = batch.get("segments"), batch.get("encoder_segments")
    if own is None and others is not None:
        own = jnp.ones_like(batch["tokens"])
    if others is None and own is not None:
        others = jnp.ones_like(batch["encoder_tokens"])
    return None if own is None or others is None else (own, others)


def encode(
    params: Params, batch: Batch, config: T5Config, compute: Compute, table: jax.Array
) -> jax.Array:
    """What the decoder attends to: [batch, encoder_length, embed], not sharded over embed."""
    layouts = compute.layouts
    tokens = batch["encoder_tokens"]
    bias = _bias(params["encoder"], tokens.shape[1], config, compute, bidirectional=True)
    whole = attention_of(compute, EVERYTHING, batch.get("encoder_segments"), bias)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return whole(q, k, v), None

    def layer(x: jax.Array, update: Update | None, w: Params, _: None) -> Any:
        with jax.named_scope("attention"):
            x, update, _ = _self_attention(x, update, w["attention"], attend, config, compute)
        return *_mlp(x, update, w, config, compute), None

    with jax.named_scope("encoder"):
        x = embed(table, tokens, layouts.residual)
        weights = layer_weights(params, "encoder", config, compute, batch)
        x, update, _ = through_layers([layer], x, weights, None, compute)
        normed = last_norm(x, update, params["encoder"], NormKind(config.norm_eps), compute)
        return all_gather(normed, layouts.all_gathered(layouts.heads))


def layer_weights(
    params: Params, stack: str, config: T5Config, compute: Compute, batch: Batch | None = None
) -> Any:
    """The weights of a stack's layers, ready for `through_layers`; an engine has them in a list."""
    layers, specs = params[stack]["layers"], abstract_arrays(config)[stack]["layers"]
    if isinstance(layers, list):
        return [prepare_weights(layer, specs, compute) for layer in layers]

    def noise(matrix: str) -> jax.Array | None:
        encoder = stack == "encoder" or matrix in ("cross_attention/wk", "cross_attention/wv")
        name = "encoder_tokens" if encoder else "tokens"
        return None if batch is None else token_noise(batch, batch[name])

    layers = adapted_layers(layers, params, (stack, "layers"), compute, noise)
    return prepare_weights(layers, specs, compute)


def keys_and_values(source: jax.Array, w: Params, compute: Compute) -> tuple[jax.Array, jax.Array]:
    """[batch, length, kv_heads, head_dim] each, of the sequence that is attended to."""
    if "wkv" in w:  # see serving.py
        merged = _project_merged(source, w["wkv"], compute)
        return merged[:, :, :, 0], merged[:, :, :, 1]
    return _project("k", source, w, compute), _project("v", source, w, compute)


def attention_of(
    compute: Compute, mask: Mask, segments: Segments | None = None, bias: jax.Array | None = None
) -> Attend:
    """Attention of queries to keys by a mask, with a bias."""
    context = ContextParallel(compute.context_parallel)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attention(q, k, v, segments, mask, bias=bias, context=context, kernel=compute.kernel)

    return attend


def _bias(
    stack: Params, length: int, config: T5Config, compute: Compute, *, bidirectional: bool
) -> jax.Array:
    return relative_bias(
        stack["relative_bias"], length, length, max_distance=config.max_distance,
        bidirectional=bidirectional, token_axes=compute.layouts.token_axes,
    )  # fmt: skip


def _self_attention(
    x: jax.Array,
    update: Update | None,
    w: Params,
    attend: Attend,
    config: T5Config,
    compute: Compute,
) -> tuple[jax.Array, jax.Array, Any]:
    """x with the update, the next update, and what the state keeps."""
    x, normed = enter_attention(x, update, w, NormKind(config.norm_eps), "input", compute)
    if "wqkv" in w:
        merged = _project_merged(normed, w["wqkv"], compute)
        q, k, v = (merged[:, :, :, i] for i in range(3))
        q = q * config.head_dim**0.5
    else:
        q = _queries(normed, w, config, compute)
        k, v = _project("k", normed, w, compute), _project("v", normed, w, compute)
    mixed, kept = attend(q, k, v)
    return x, attention_output(mixed, w, compute), kept


def _queries(h: jax.Array, w: Params, config: T5Config, compute: Compute) -> jax.Array:
    """Queries for attention that multiplies scores with head_dim^-0.5, as T5 does not."""
    return _project("q", h, w, compute, config.head_dim**0.5)


def _project(name: str, h: jax.Array, w: Params, compute: Compute, by: float = 1.0) -> jax.Array:
    layouts = compute.layouts
    weight = gather_weight(w[f"w{name}"], compute)
    y = project("ble,ehd->blhd", h, weight, layouts.heads, compute)
    return checkpoint_name(y if by == 1.0 else y * by, name)


def _project_merged(h: jax.Array, weight: Any, compute: Compute) -> jax.Array:
    """[batch, length, heads, parts, head_dim] of a weight [embed, heads, parts, head_dim]."""
    batch, length, heads, _ = compute.layouts.heads.partitions
    target = P(batch, length, heads, None, None)
    return project("ble,ehpd->blhpd", h, gather_weight(weight, compute), target, compute)


def _mlp(
    x: jax.Array, update: jax.Array, w: Params, config: T5Config, compute: Compute
) -> tuple[jax.Array, jax.Array]:
    with jax.named_scope("mlp"):
        activation = _ACTIVATIONS[config.activation]
        return mlp(x, update, w["mlp"], NormKind(config.norm_eps), compute, activation)
