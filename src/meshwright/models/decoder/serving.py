"""A decoder in an engine: merged weights, and prompts with context parallelism."""

from collections.abc import Mapping
from typing import Any

import jax

from meshwright.layouts import Rules
from meshwright.models.blocks import Params
from meshwright.models.compute import Compute
from meshwright.models.decoder.arrays import abstract_arrays
from meshwright.models.decoder.config import DecoderConfig
from meshwright.models.decoder.forward import forward
from meshwright.models.decoder.rules import LATENT, OPTIONAL
from meshwright.models.serving import (
    Merged,
    merge_gate_up,
    merge_qkv,
    quantized_head,
    unstacked,
    unstacked_factors,
)
from meshwright.models.states import KeptKeys

_STACKS = ("leading_layers", "layers")
_MERGED: Mapping[str, Merged] = {
    "attention": {"wqkv": (("wq", "wk", "wv"), merge_qkv)},
    "mlp": {"gate_up": (("gate", "up"), merge_gate_up)},
}


def serving_weights(
    params: Params, config: DecoderConfig, dtype: str | None = None, release: bool = False
) -> Params:
    """Parameters whose `layers` are a list; with `release`, arrays that were copied are deleted.

    `dtype` is that of quantized weights (int8 or fp8); the embedding and a tied LM head stay.
    """
    specs = abstract_arrays(config)
    stacks = [name for name in _STACKS if name in specs]
    layers = [
        layer
        for name in stacks
        for layer in unstacked(params[name], specs[name], _MERGED, dtype, release)
    ]
    rest = {name: value for name, value in params.items() if name not in stacks}
    return {**rest, "layers": layers, **quantized_head(params, dtype, release)}


def serving_adapter(adapter: Params) -> list[Params]:
    """The factors of an adapter of all matrices, as the weights of `serving_weights` are."""
    stacks = [adapter[name] for name in _STACKS if name in adapter]
    return [layer for stack in stacks for layer in unstacked_factors(stack, _MERGED)]


def prompt_keys(
    weights: Params, prompts: jax.Array, lengths: jax.Array, config: DecoderConfig, compute: Compute
) -> list[Any]:
    """Keys and values of prompts whose length all devices but those of tp share, as in training.

    Weights are all-gathered layer by layer: the activations of long prompts are larger.
    """
    compute = Compute(_context_rules(), compute.dtype, scan=False, context=compute.context)
    _, state = forward(weights, {"tokens": prompts}, config, compute, KeptKeys())
    kept: list[Any] = state.layers
    return kept


def _context_rules() -> Rules:
    along = ("fsdp", "sp")
    return Rules(
        [
            *((dim, "tp") for dim in ("vocab", "heads", "kv_heads", "mlp", "shared_mlp")),
            ("experts", None),
            ("length", along),
            ("embed", along),
            *((dim, None) for dim in ("batch", "head_dim", "layers", "norm", "positions")),
            *((dim, None) for dim in LATENT),
        ],
        optional=OPTIONAL,
    )
