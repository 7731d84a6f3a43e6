"""The forward pass of T5: an encoder, and a decoder that attends to what it gives.

Each stack has one bias of relative positions, which all of its layers add to their scores. Scores
are not scaled by head_dim. One code for every mesh, as in the decoder family. Layers of the decoder
are the same in training and in generation: where keys and values come from is an argument (Attend).
"""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from meshwright.models.blocks import (
    Params,
    along_residual,
    enter,
    mlp,
    prepare_weights,
    through_layers,
)
from meshwright.models.compute import Compute
from meshwright.models.loss import LmHead, LossConfig, next_token_loss
from meshwright.models.t5.config import T5Config
from meshwright.ops import (
    all_gather,
    embed,
    norm_alone,
    partial_sums,
    reduce_to,
    relative_bias,
)
from meshwright.ops.attention import EVERYTHING, ContextParallel, Mask, Segments, attention

Batch = Mapping[str, jax.Array]
Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # q, k, v

_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
}


class Attend(NamedTuple):
    """How a layer of the decoder attends: to its own sequence, and to the encoder's."""

    to_own: Attention
    encoded_keys: Callable[[Params], tuple[jax.Array, jax.Array]]  # from the layer's weights
    to_encoded: Attention


def logits(params: Params, batch: Batch, config: T5Config, compute: Compute) -> jax.Array:
    """[batch, length, vocab] in float32: see hidden_states."""
    layouts = compute.layouts
    head = lm_head(params, config)
    x = hidden_states(params, batch, config, compute)
    found = jnp.einsum(
        "ble,ve->blv" if head.tied else "ble,ev->blv",
        all_gather(x, layouts.axes(layouts.logits)), head.gathered(compute),
        preferred_element_type=jnp.float32, out_sharding=layouts.logits,
    )  # fmt: skip
    if found.shape[2] == config.vocab:
        return found
    # without padding the vocabulary does not divide, so every device gets all of it
    return reshard(found, P(*layouts.logits.partitions[:2], None))[..., : config.vocab]


def loss(
    params: Params,
    batch: Batch,
    scale: jax.Array,
    config: T5Config,
    compute: Compute,
    settings: LossConfig,
) -> tuple[jax.Array, jax.Array]:
    """Of a micro-batch: `scale` × its summed loss, and the summed entropy."""
    x = hidden_states(params, batch, config, compute)
    targets = reshard(batch["targets"], compute.layouts.tokens)
    head = lm_head(params, config)
    return next_token_loss(x, head, targets, scale, config.vocab, compute, settings)


def lm_head(params: Params, config: T5Config) -> LmHead:
    """The LM head, which may be padded: entries from `config.vocab` on are no tokens."""
    tied = config.tied_embeddings
    return LmHead(params["embedding" if tied else "output"], tied)


def hidden_states(params: Params, batch: Batch, config: T5Config, compute: Compute) -> jax.Array:
    """[batch, length, embed] as the LM head takes them, of the decoder's tokens.

    The batch has `encoder_tokens` [batch, encoder_length] and `tokens` [batch, length]; where
    examples are packed or padded also `encoder_segments` and `segments`, which number the examples
    of a sequence from 1, padding 0: tokens of the decoder see the encoder's of the same number.
    """
    layouts = compute.layouts
    batch = {name: reshard(x, layouts.tokens) for name, x in batch.items()}
    table = gathered_embedding(params, compute)
    encoded = encode(params, batch, config, compute, table)
    of_decoder, of_encoder = batch.get("segments"), batch.get("encoder_segments")
    if of_decoder is None and of_encoder is not None:
        of_decoder = jnp.ones_like(batch["tokens"])
    if of_encoder is None and of_decoder is not None:
        of_encoder = jnp.ones_like(batch["encoder_tokens"])
    both = None if of_decoder is None or of_encoder is None else (of_decoder, of_encoder)
    length = batch["tokens"].shape[1]
    bias = _bias(params["decoder"], length, config, compute, bidirectional=False)

    def layer(x: jax.Array, update: jax.Array | None, w: Params) -> tuple[jax.Array, jax.Array]:
        attend = Attend(
            to_own=attention_of(compute, Mask(), batch.get("segments"), bias),
            encoded_keys=lambda w: keys_and_values(encoded, w, compute),
            to_encoded=attention_of(compute, EVERYTHING, both),
        )
        return decoder_layer(x, update, w, attend, config, compute)

    x = embed(table, batch["tokens"], layouts.residual)
    weights = prepare_weights(params["decoder"]["layers"], layouts, compute)
    x, update = through_layers(layer, x, weights, config.decoder_layers, compute)
    return for_lm_head(x, update, params, config, compute)


def for_lm_head(
    x: jax.Array, update: jax.Array | None, params: Params, config: T5Config, compute: Compute
) -> jax.Array:
    """The decoder's last norm, scaled if the model is."""
    scale = along_residual(params["decoder"]["norm"], compute.layouts)
    normed = norm_alone(x, scale, config.norm_eps, update)
    return normed * config.embed**-0.5 if config.scaled_output else normed


def gathered_embedding(params: Params, compute: Compute) -> jax.Array:
    """The embedding as both stacks look it up."""
    return all_gather(params["embedding"].astype(compute.dtype), compute.layouts.token_axes)


def encode(
    params: Params, batch: Batch, config: T5Config, compute: Compute, table: jax.Array
) -> jax.Array:
    """What the decoder attends to: [batch, encoder_length, embed], whole over embed."""
    layouts = compute.layouts
    tokens = batch["encoder_tokens"]
    bias = _bias(params["encoder"], tokens.shape[1], config, compute, bidirectional=True)
    attend = attention_of(compute, EVERYTHING, batch.get("encoder_segments"), bias)

    def layer(x: jax.Array, update: jax.Array | None, w: Params) -> tuple[jax.Array, jax.Array]:
        with jax.named_scope("attention"):
            x, update = _self_attention(x, update, w["attention"], attend, config, compute)
        return _mlp(x, update, w, config, compute)

    with jax.named_scope("encoder"):
        x = embed(table, tokens, layouts.residual)
        weights = prepare_weights(params["encoder"]["layers"], layouts, compute)
        x, update = through_layers(layer, x, weights, config.encoder_layers, compute)
        scale = along_residual(params["encoder"]["norm"], layouts)
        normed = norm_alone(x, scale, config.norm_eps, update)
        return all_gather(normed, layouts.axes(layouts.heads))


def decoder_layer(
    x: jax.Array,
    update: jax.Array | None,
    w: Params,
    attend: Attend,
    config: T5Config,
    compute: Compute,
) -> tuple[jax.Array, jax.Array]:
    """The residual stream after one layer but for its last addition, and that."""
    with jax.named_scope("attention"):
        x, update = _self_attention(x, update, w["attention"], attend.to_own, config, compute)
    with jax.named_scope("cross_attention"):
        cross = w["cross_attention"]
        x, [h] = _enter_attention(x, update, cross["norm"], 1, "middle", config, compute)
        q = _queries(h, cross, config, compute)
        mixed = attend.to_encoded(q, *attend.encoded_keys(cross))
        update = _attention_output(mixed, cross, compute)
    return _mlp(x, update, w, config, compute)


def keys_and_values(source: jax.Array, w: Params, compute: Compute) -> tuple[jax.Array, jax.Array]:
    """[batch, length, kv_heads, head_dim] each, of the sequence that is attended to."""
    return _project("k", source, w, compute), _project("v", source, w, compute)


def attention_of(
    compute: Compute, mask: Mask, segments: Segments | None = None, bias: jax.Array | None = None
) -> Attention:
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
    update: jax.Array | None,
    w: Params,
    attend: Attention,
    config: T5Config,
    compute: Compute,
) -> tuple[jax.Array, jax.Array]:
    """x with the update, and what is to be added to it next."""
    x, [of_q, of_k, of_v] = _enter_attention(x, update, w["norm"], 3, "input", config, compute)
    q = _queries(of_q, w, config, compute)
    mixed = attend(q, _project("k", of_k, w, compute), _project("v", of_v, w, compute))
    return x, _attention_output(mixed, w, compute)


def _enter_attention(
    x: jax.Array,
    update: jax.Array | None,
    scale: jax.Array,
    uses: int,
    name: str,
    config: T5Config,
    compute: Compute,
) -> tuple[jax.Array, list[jax.Array]]:
    """x with the update, and its norm whole over embed for so many projections."""
    over = compute.layouts.axes(compute.layouts.heads)
    x, normed = enter(x, update, scale, 1 if over else uses, name, config.norm_eps, compute)
    # where it is gathered, once for all
    return x, normed if not over else [all_gather(normed[0], over)] * uses


def _queries(h: jax.Array, w: Params, config: T5Config, compute: Compute) -> jax.Array:
    """Queries for attention that multiplies scores with head_dim^-0.5, as T5 does not."""
    return _project("q", h, w, compute, config.head_dim**0.5)


def _project(name: str, h: jax.Array, w: Params, compute: Compute, by: float = 1.0) -> jax.Array:
    layouts = compute.layouts
    weight = all_gather(w[f"w{name}"], layouts.token_axes)
    y = jnp.einsum("ble,ehd->blhd", h, weight, out_sharding=layouts.heads)
    return checkpoint_name(y if by == 1.0 else y * by, name)


def _attention_output(mixed: jax.Array, w: Params, compute: Compute) -> jax.Array:
    layouts = compute.layouts
    over = layouts.axes(layouts.heads)
    out = jnp.einsum(
        "blhd,hde->ble", mixed, all_gather(w["wo"], layouts.token_axes),
        out_sharding=partial_sums(layouts.block, over),
    )  # fmt: skip
    return reduce_to(out, over, layouts.residual)


def _mlp(
    x: jax.Array, update: jax.Array, w: Params, config: T5Config, compute: Compute
) -> tuple[jax.Array, jax.Array]:
    with jax.named_scope("mlp"):
        activation = _ACTIVATIONS[config.activation]
        return mlp(x, update, w["mlp"], config.norm_eps, compute, activation)
