"""Dense decoders as a model family."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.models.blocks import REMAT
from meshwright.models.decoder.arrays import abstract_arrays
from meshwright.models.decoder.config import DecoderConfig
from meshwright.models.decoder.forward import forward, generation_compute, lm_head, loss, start
from meshwright.models.decoder.hf_config import from_hf_config, to_hf_config
from meshwright.models.decoder.hf_families import FAMILIES
from meshwright.models.decoder.hf_folder import hf_model
from meshwright.models.decoder.override import override
from meshwright.models.decoder.presets import PRESETS
from meshwright.models.decoder.rules import decoder_rules, generation_rules, t5x_rules
from meshwright.models.decoder.sequence import sequence_split
from meshwright.models.decoder.serving import prompt_keys, serving_weights
from meshwright.models.family import Generation, HuggingFace, ModelFamily, Serving
from meshwright.models.states import PagedCache
from meshwright.models.work import Attention, Stack, attention_block, mlp_block
from meshwright.ops import LinearScaling, Llama3Scaling, Rope, YarnScaling
from meshwright.ops.attention import Mask

_SCALINGS: dict[str, Any] = {
    kind.__name__: kind for kind in (LinearScaling, Llama3Scaling, YarnScaling)
}


def to_dict(config: DecoderConfig) -> dict[str, Any]:
    """A config as plain JSON data, without the config.json it was read from."""
    data = dataclasses.asdict(config)
    del data["hf_config"]
    if config.rope.scaling is not None:
        data["rope"]["scaling"]["kind"] = type(config.rope.scaling).__name__
    return data


def from_dict(data: Mapping[str, Any]) -> DecoderConfig:
    """The reverse of to_dict."""
    values = dict(data)
    rope = dict(values.pop("rope"))
    scaling = rope.pop("scaling")
    if scaling is not None:
        scaling = dict(scaling)
        scaling = _SCALINGS[scaling.pop("kind")](**scaling)
    return DecoderConfig(**values, rope=Rope(**rope, scaling=scaling))


def _work(config: DecoderConfig) -> tuple[Stack, ...]:
    attention = Attention(Mask(window=config.sliding_window))
    return (Stack(("layers",), "tokens", (attention_block(attention), mlp_block())),)


def _flops(
    config: DecoderConfig, lengths: Mapping[str, int], keys_seen: float | None = None
) -> float:
    seq = lengths["tokens"]
    return seq * config.flops_per_token(seq, keys_seen)


def _keys_seen(config: DecoderConfig, batch: Mapping[str, jax.Array]) -> jax.Array | None:
    """A token sees itself and those before it in its document, at most a window of them."""
    if "positions" not in batch:
        return None
    keys = batch["positions"] + 1
    if config.sliding_window is not None:
        keys = jnp.minimum(keys, config.sliding_window)
    return jnp.mean(keys.astype(jnp.float32))


DECODER = ModelFamily(
    name="decoder",
    config=DecoderConfig,
    presets=PRESETS,
    arrays=abstract_arrays,
    rules=decoder_rules,
    t5x_rules=t5x_rules,
    batch_fields=("tokens", "targets", "segments", "positions"),
    objectives=("next-token",),
    loss=loss,
    forward=forward,
    lm_head=lm_head,
    sequence_split=sequence_split,
    remat=REMAT,
    work=_work,
    flops=_flops,
    keys_seen=_keys_seen,
    split_dims=("heads", "kv_heads", "mlp", "embed"),
    override=override,
    to_dict=to_dict,
    from_dict=from_dict,
    hugging_face=HuggingFace(
        architectures={family.architecture: family.model_type for family in FAMILIES.values()},
        read_config=from_hf_config,
        write_config=to_hf_config,
        model=hf_model,
    ),
    generation=Generation(
        rules=generation_rules,
        compute=generation_compute,
        start=start,
        cached_numbers=lambda config: 2 * config.layers * config.kv_heads * config.head_dim,
        serving=Serving(
            weights=serving_weights,
            layers=lambda config: config.layers,
            state=lambda pools, tokens, _: PagedCache(pools, tokens),
            prompt_keys=prompt_keys,
        ),
    ),
)
