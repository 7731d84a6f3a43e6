"""Generation: prompts through the encoder once, then a token at a time through the decoder."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from meshwright.layouts import Rules
from meshwright.models.blocks import Params, prepare_weights
from meshwright.models.compute import Compute
from meshwright.models.decoder import rules as decoder
from meshwright.models.states import Cache
from meshwright.models.t5.config import T5Config
from meshwright.models.t5.forward import Batch, encode, keys_and_values
from meshwright.models.t5.rules import with_encoder
from meshwright.models.t5.state import T5State
from meshwright.ops import all_gather


def generation_rules() -> Rules:
    """As those of decoders: batch over all axes but tp."""
    return with_encoder(decoder.generation_rules(), ("relpos_buckets", None))


def generation_compute(params: Params) -> Compute:
    """In the dtype of the weights; a single query needs no fused attention."""
    return Compute(generation_rules(), params["embedding"].dtype, kernel="blockwise")


def start(
    params: Params, prompts: jax.Array, lengths: jax.Array, config: T5Config, room: int
) -> tuple[Batch, T5State, Compute]:
    """The inputs of forward: start tokens, and the keys of prompts [batch, length] as encoded."""
    compute = generation_compute(params)
    layouts = compute.layouts
    batch, _ = layouts.tokens.partitions
    inside = jnp.arange(prompts.shape[1])[None] < reshard(lengths, P(batch))[:, None]
    segments = inside.astype(jnp.int32)
    fields = {"encoder_tokens": reshard(prompts, layouts.tokens), "encoder_segments": segments}
    table = all_gather(params["embedding"].astype(compute.dtype), layouts.weight_axes)
    encoded = encode(params, fields, config, compute, table)
    weights = prepare_weights(params["decoder"]["layers"], layouts, compute)
    encoded_keys, encoded_values = lax.map(
        lambda w: keys_and_values(encoded, w, compute), weights["cross_attention"]
    )
    by_head = P(None, batch, layouts.kv_heads.partitions[2], None, None)
    size = (config.decoder_layers, prompts.shape[0], config.heads, room, config.head_dim)
    empty = jnp.zeros(size, compute.dtype, out_sharding=by_head)
    none = jnp.zeros(prompts.shape[0], jnp.int32, out_sharding=P(batch))
    state = T5State(
        Cache(empty, empty, none), encoded_keys, encoded_values, segments, jnp.zeros((), jnp.int32)
    )
    return {"tokens": none[:, None] + config.start_token}, state, compute
