"""Dense decoders as a model family."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.lazy import when_called
from meshwright.models.blocks import REMAT
from meshwright.models.decoder.architectures import ARCHITECTURES
from meshwright.models.decoder.arrays import abstract_arrays
from meshwright.models.decoder.config import DecoderConfig, own_defaults
from meshwright.models.decoder.hf_config import from_hf_config, to_hf_config
from meshwright.models.decoder.hf_folder import hf_model
from meshwright.models.decoder.kinds import FIELDS, LayerKind, field_defaults, field_of
from meshwright.models.decoder.override import longer, override
from meshwright.models.decoder.presets import PRESETS
from meshwright.models.decoder.rules import decoder_rules, serving_rules, t5x_rules
from meshwright.models.decoder.sequence import sequence_split
from meshwright.models.family import HuggingFace, ModelFamily, Serving
from meshwright.models.work import (
    Attention,
    Block,
    Experts,
    Stack,
    attention_block,
    expert_blocks,
    latent_block,
    mlp_block,
)
from meshwright.ops import LinearScaling, Llama3Scaling, LongRopeScaling, Rope, YarnScaling
from meshwright.ops.attention import Mask

_ROPE = dataclasses.fields(Rope)
_SCALINGS: dict[str, Any] = {
    kind.__name__: kind for kind in (LinearScaling, Llama3Scaling, YarnScaling, LongRopeScaling)
}
# written always; what was added later only where it is not the default, so that what earlier
# versions wrote of a model stays equal to what is written now
_ALWAYS = frozenset(
    {
        "heads", "kv_heads", "head_dim", "mlp", "rope", "norm_eps", "qkv_bias", "output_bias",
        "qk_norm", "sliding_window", "theta", "scaling", "tied_embeddings", "max_seq",
    }
)  # fmt: skip


def to_dict(config: DecoderConfig) -> dict[str, Any]:
    """A config as plain JSON data, without the config.json it was read from.

    Layers that are all alike are said by name, as in `--override`; others by a list of such.
    """
    own = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    del own["hf_config"], own["pattern"]
    data = _said(own, own_defaults())
    kinds = [_kind_to_dict(kind) for kind in config.pattern]
    return data | (kinds[0] if len(kinds) == 1 else {"pattern": kinds})


def from_dict(data: Mapping[str, Any]) -> DecoderConfig:
    """The reverse of to_dict."""
    values = dict(data)
    if "pattern" in values:
        values["pattern"] = [_kind_from_dict(kind) for kind in values["pattern"]]
        return DecoderConfig(**values)
    return DecoderConfig(**_kind_from_dict(values))


def _kind_to_dict(kind: LayerKind) -> dict[str, Any]:
    fields = _said({name: field_of(kind, name) for name in FIELDS}, field_defaults())
    if kind.attention.rope is None:
        return fields
    rope = {field.name: getattr(kind.attention.rope, field.name) for field in _ROPE}
    data = _said(rope, {field.name: field.default for field in _ROPE})
    if data["scaling"] is not None:
        later = {"truncate": True}
        scaling = dataclasses.asdict(data["scaling"])
        written = {
            name: list(value) if isinstance(value, tuple) else value  # as JSON has it
            for name, value in scaling.items()
            if name not in later or value != later[name]
        }
        data["scaling"] = written | {"kind": type(data["scaling"]).__name__}
    return fields | {"rope": data}


def _said(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in values.items()
        if name in _ALWAYS or name not in defaults or value != defaults[name]
    }


def _kind_from_dict(fields: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(fields)
    if values["rope"] is None:
        return values
    rope = dict(values.pop("rope"))
    scaling = rope.pop("scaling")
    if scaling is not None:
        scaling = dict(scaling)
        scaling = _SCALINGS[scaling.pop("kind")](**scaling)
    return values | {"rope": Rope(**rope, scaling=scaling)}


def _work(config: DecoderConfig) -> tuple[Stack, ...]:
    """Stacks of layers with the same arrays, which may differ in their masks."""
    masks: dict[Mask, int] = {}
    for kind, layers in config.kinds.items():
        mask = Mask(window=kind.attention.window)
        masks[mask] = masks.get(mask, 0) + layers
    widest = max(masks, key=lambda mask: mask.window or math.inf)
    first = config.pattern[0]
    attention = Attention(
        widest,
        masks=tuple(masks.items()) if len(masks) > 1 else (),
        value_dim=first.attention.value_dim,
    )
    if first.attention.kv_rank is None:
        attending = attention_block(attention, norm_places=first.norm_places)
    else:
        attending = latent_block(attention, first.attention.q_rank is None, first.norm_places)
    stacks = [
        Stack(
            ("layers",),
            "tokens",
            (attending, *_mlp_blocks(first, config.embed)),
            config.layers,
            len(config.pattern),
        )
    ]
    if config.leading:
        blocks = (attending, *_mlp_blocks(config.leading_kind, config.embed))
        rest = config.layers - config.leading
        stacks = [
            Stack(("leading_layers",), "tokens", blocks, config.leading),
            dataclasses.replace(stacks[0], layers=rest),
        ]
    return tuple(stacks)


def _mlp_blocks(kind: LayerKind, embed: int) -> tuple[Block, ...]:
    if not kind.experts.count:
        return (mlp_block(kind.mlp.gated, kind.norm_places),)
    experts = Experts(kind.experts.count, kind.experts.per_token, (embed, kind.mlp.size))
    return expert_blocks(kind.mlp.gated, kind.norm_places, experts, bool(kind.experts.shared))


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
    windows: dict[int | None, int] = {}
    for kind, layers in config.kinds.items():
        windows[kind.attention.window] = windows.get(kind.attention.window, 0) + layers

    def mean(window: int | None) -> jax.Array:
        seen = keys if window is None else jnp.minimum(keys, window)
        return jnp.mean(seen.astype(jnp.float32))

    means = [mean(window) for window in windows]
    if len(means) == 1:
        return means[0]
    return jnp.average(jnp.stack(means), weights=jnp.asarray([*windows.values()], jnp.float32))


def _window(config: DecoderConfig) -> int | None:
    windows = [kind.attention.window for kind in config.pattern]
    return next((window for window in windows if window is not None), None)


def _state(pools: list[jax.Array], tokens: Any, _: Any) -> Any:
    from meshwright.models.states import PagedCache

    return PagedCache(pools, tokens)


_FORWARD, _SERVING = "meshwright.models.decoder.forward", "meshwright.models.decoder.serving"
DECODER = ModelFamily(
    name="decoder",
    config=DecoderConfig,
    presets=PRESETS,
    arrays=abstract_arrays,
    rules=decoder_rules,
    t5x_rules=t5x_rules,
    batch_fields=("tokens", "targets", "segments", "positions"),
    objectives=("next-token", "dpo"),
    loss=when_called(_FORWARD, "loss"),
    log_probs=when_called(_FORWARD, "log_probs"),
    forward=when_called(_FORWARD, "forward"),
    lm_head=when_called(_FORWARD, "lm_head"),
    sequence_split=sequence_split,
    remat=REMAT,
    work=_work,
    flops=_flops,
    keys_seen=_keys_seen,
    split_dims={
        **{dim: dim for dim in ("experts", "heads", "kv_heads", "mlp", "shared_mlp", "embed")},
        "leading_mlp": "mlp",
        "q_rank": "latent_rank",
        "kv_rank": "latent_rank",
    },
    override=override,
    longer=longer,
    to_dict=to_dict,
    from_dict=from_dict,
    hugging_face=HuggingFace(
        architectures={one.name: one.model_type for one in ARCHITECTURES},
        read_config=from_hf_config,
        write_config=to_hf_config,
        model=hf_model,
    ),
    serving=Serving(
        rules=serving_rules,
        weights=when_called(_SERVING, "serving_weights"),
        layers=lambda config: config.layers,
        state=_state,
        prompt_keys=when_called(_SERVING, "prompt_keys"),
        adapter=when_called(_SERVING, "serving_adapter"),
        window=_window,
        softcapped=lambda config: any(k.attention.softcap for k in config.pattern),
        sinks=lambda config: any(k.attention.sinks for k in config.pattern),
    ),
)
