"""Generation: prompts through the encoder once, then a token at a time through the decoder.

    logits, cache = prefill(params, prompts, lengths, config, room)
    logits, cache = step(params, cache, tokens, config)

The layers are those of training. Keys and values of the decoder's tokens are kept in a cache, those
of the encoder's are made once.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from meshwright.layouts import Rules
from meshwright.models.blocks import Params, prepare_weights
from meshwright.models.compute import Compute
from meshwright.models.decoder import decode
from meshwright.models.t5.config import T5Config
from meshwright.models.t5.forward import (
    Attend,
    attention_of,
    decoder_layer,
    encode,
    for_lm_head,
    gathered_embedding,
    keys_and_values,
    lm_head,
)
from meshwright.models.t5.rules import with_encoder
from meshwright.ops import all_gather, embed, relative_bias_at
from meshwright.ops.attention import EVERYTHING


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    keys: jax.Array  # [layers, batch, room, kv_heads, head_dim], of the decoder's tokens
    values: jax.Array
    encoded_keys: jax.Array  # [layers, batch, encoder_length, kv_heads, head_dim]
    encoded_values: jax.Array
    encoder_segments: jax.Array  # [batch, encoder_length]: 1, padding 0
    lengths: jax.Array  # [batch]: tokens of the decoder that are in the cache, of each the same
    position: jax.Array  # the same number


def generation_rules() -> Rules:
    """As those of decoders: batch over all axes but tp."""
    return with_encoder(decode.generation_rules(), ("relpos_buckets", None))


def prefill(
    params: Params, prompts: jax.Array, lengths: jax.Array, config: T5Config, room: int
) -> tuple[jax.Array, Cache]:
    """Prompts [batch, length] of these lengths [batch] through the encoder.

    Gives the logits [batch, vocab] of the first token, and a cache for `room` tokens.
    """
    compute = _compute(params)
    layouts = compute.layouts
    batch, _ = layouts.tokens.partitions
    inside = jnp.arange(prompts.shape[1])[None] < reshard(lengths, P(batch))[:, None]
    segments = inside.astype(jnp.int32)
    fields = {"encoder_tokens": reshard(prompts, layouts.tokens), "encoder_segments": segments}
    encoded = encode(params, fields, config, compute, gathered_embedding(params, compute))
    weights = prepare_weights(params["decoder"]["layers"], layouts, compute)
    encoded_keys, encoded_values = lax.map(
        lambda w: keys_and_values(encoded, w, compute), weights["cross_attention"]
    )
    size = (config.decoder_layers, prompts.shape[0], room, config.heads, config.head_dim)
    empty = jnp.zeros(size, compute.dtype, out_sharding=P(None, *layouts.heads.partitions))
    none = jnp.zeros(prompts.shape[0], jnp.int32, out_sharding=P(batch))
    cache = Cache(
        empty, empty, encoded_keys, encoded_values, segments, none, jnp.zeros((), jnp.int32)
    )
    return step(params, cache, none + config.start_token, config)


def step(
    params: Params, cache: Cache, tokens: jax.Array, config: T5Config
) -> tuple[jax.Array, Cache]:
    """The next token [batch] of each sequence: logits [batch, vocab] of those after, the cache."""
    compute = _compute(params)
    layouts = compute.layouts
    at, room = cache.position, cache.keys.shape[2]
    tokens = reshard(tokens[:, None], layouts.tokens)
    one = jnp.ones_like(tokens)
    behind = jnp.broadcast_to((jnp.arange(room) <= at).astype(jnp.int32)[None], (len(tokens), room))
    behind = reshard(behind, layouts.tokens)
    bias = relative_bias_at(
        params["decoder"]["relative_bias"], at, room, max_distance=config.max_distance
    )
    to_all = attention_of(compute, EVERYTHING, (one, behind), bias)

    def layer(carry: Any, part: Any) -> Any:
        x, keys, values = carry
        w, number, encoded_keys, encoded_values = part

        def to_own(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            nonlocal keys, values
            keys, values = (
                lax.dynamic_update_slice(held, new[None], (number, 0, at, 0, 0))
                for held, new in ((keys, k), (values, v))
            )
            own = (lax.dynamic_index_in_dim(held, number, 0, False) for held in (keys, values))
            return to_all(q, *own)

        attend = Attend(
            to_own=to_own,
            encoded_keys=lambda _: (encoded_keys, encoded_values),
            to_encoded=attention_of(compute, EVERYTHING, (one, cache.encoder_segments)),
        )
        x, update = decoder_layer(x, None, w, attend, config, compute)
        return (x + update, keys, values), None

    x = embed(gathered_embedding(params, compute), tokens, layouts.residual)
    weights = prepare_weights(params["decoder"]["layers"], layouts, compute)
    parts = weights, jnp.arange(config.decoder_layers), cache.encoded_keys, cache.encoded_values
    (x, keys, values), _ = lax.scan(layer, (x, cache.keys, cache.values), parts)
    x = for_lm_head(x, None, params, config, compute)
    cache = dataclasses.replace(
        cache, keys=keys, values=values, lengths=cache.lengths + 1, position=at + 1
    )
    return _next_logits(x, params, config, compute), cache


def _next_logits(x: jax.Array, params: Params, config: T5Config, compute: Compute) -> jax.Array:
    """Hidden states [batch, 1, embed] to logits [batch, vocab] in float32, without padding."""
    layouts = compute.layouts
    head = lm_head(params, config)
    batch, _, vocab = layouts.logits.partitions
    x = all_gather(x, layouts.axes(layouts.logits))
    logits = jnp.einsum(
        "be,ve->bv" if head.tied else "be,ev->bv", x[:, 0], head.gathered(compute),
        preferred_element_type=jnp.float32, out_sharding=P(batch, vocab),
    )  # fmt: skip
    return reshard(logits, P(batch, None))[:, : config.vocab]


def _compute(params: Params) -> Compute:
    """In the dtype of the weights; a query at a time needs no fused attention."""
    return Compute(generation_rules(), params["embedding"].dtype, kernel="blockwise")
