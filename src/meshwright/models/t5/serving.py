"""A T5 in an engine: merged weights, and the encoder, whose keys go into pages."""

from typing import Any

import jax
import jax.numpy as jnp

from meshwright.models.blocks import Params
from meshwright.models.compute import Compute
from meshwright.models.serving import (
    merge_gate_up,
    merge_kv,
    merge_qkv,
    quantized_head,
    unstacked,
)
from meshwright.models.t5.arrays import abstract_arrays
from meshwright.models.t5.config import T5Config
from meshwright.models.t5.forward import encode, keys_and_values, layer_weights
from meshwright.ops import all_gather


def serving_weights(
    params: Params, config: T5Config, dtype: str | None = None, release: bool = False
) -> Params:
    """Parameters whose stacks have their `layers` in a list; with `release`, copied arrays go.

    `dtype` is that of quantized weights (int8 or fp8); the embedding and a tied LM head stay.
    """
    merged: dict[str, Any] = {
        "attention": {"wqkv": (("wq", "wk", "wv"), merge_qkv)},
        "cross_attention": {"wkv": (("wk", "wv"), merge_kv)},
        "mlp": {"gate_up": (("gate", "up"), merge_gate_up)},
    }
    specs = abstract_arrays(config)

    def layers(stack: str) -> list[Params]:
        arrays, of_arrays = params[stack]["layers"], specs[stack]["layers"]
        return unstacked(arrays, of_arrays, merged, dtype, release)

    stacks = {name: params[name] | {"layers": layers(name)} for name in ("encoder", "decoder")}
    return {**params, **stacks, **quantized_head(params, dtype, release)}


def prompt_keys(
    weights: Params, prompts: jax.Array, lengths: jax.Array, config: T5Config, compute: Compute
) -> list[Any]:
    """What the decoder's layers attend to: keys and values of the encoder's output."""
    inside = jnp.arange(prompts.shape[1])[None] < lengths[:, None]
    batch = {"encoder_tokens": prompts, "encoder_segments": inside.astype(jnp.int32)}
    table = all_gather(weights["embedding"].astype(compute.dtype), compute.layouts.weight_axes)
    encoded = encode(weights, batch, config, compute, table)
    return [
        keys_and_values(encoded, layer["cross_attention"], compute)
        for layer in layer_weights(weights, "decoder", config, compute)
    ]
