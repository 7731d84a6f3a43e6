"""A Hugging Face config.json in and out.

>>> fields = to_hf_config(DecoderConfig(320, 4, 128, 8, 4, 16, 512))
>>> fields["architectures"], fields["hidden_size"]
(['LlamaForCausalLM'], 128)
>>> from_hf_config(fields).embed
128
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.models.decoder.config import DecoderConfig
from meshwright.models.decoder.hf_families import Family, family_of, named_family
from meshwright.models.decoder.hf_fields import KNOWN
from meshwright.models.decoder.hf_rope import rope_from_hf, rope_to_hf
from meshwright.models.huggingface import (
    HARMLESS,
    SOURCE,
    check_fields,
    flag,
    number,
    read_hf_config,
    remembered,
    short,
    whole,
)

_DEFAULT_WINDOW = 4096  # of Mistral and Qwen, where config.json does not say


def from_hf_config(source: str | os.PathLike[str] | Mapping[str, Any]) -> DecoderConfig:
    """The model that a config.json (its path, its folder's or its content) describes.

    A field that would change the logits and is not honoured is an error. The result remembers the
    fields, and the folder they are from, for `to_hf_config` and `save_hf`.
    """
    fields, where = read_hf_config(source)
    family = named_family(fields, where)
    check_fields(fields, KNOWN, where)
    layers = whole(fields, "num_hidden_layers", where)
    max_seq = whole(fields, "max_position_embeddings", where, family.max_seq)
    heads = whole(fields, "num_attention_heads", where)
    embed = whole(fields, "hidden_size", where)
    kv_heads = _kv_heads(fields, family, heads, where)
    qkv_bias, output_bias = _biases(fields, family, where)
    try:
        return DecoderConfig(
            vocab=whole(fields, "vocab_size", where),
            layers=layers,
            embed=embed,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=_head_dim(fields, family, embed, heads, where),
            mlp=whole(fields, "intermediate_size", where),
            tied_embeddings=flag(fields, "tie_word_embeddings", where, False),
            max_seq=max_seq,
            rope=rope_from_hf(fields, max_seq, where),
            norm_eps=number(fields, "rms_norm_eps", where, 1e-6),
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            qk_norm=family.qk_norm,
            sliding_window=_sliding_window(fields, family, layers, where),
            hf_config=remembered(fields, None if isinstance(source, Mapping) else Path(where)),
        )
    except MeshwrightError as error:
        text = str(error)
        raise MeshwrightError(text if text.startswith(where) else f"{where}: {text}") from None


def to_hf_config(
    config: DecoderConfig,
    *,
    dtype: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The config.json of a model, with every field of the one it was read from that still holds.

    The architecture is that of the source, or else one that has the model's features. `dtype` is
    that of the weights, by default the source's. `extra` are fields to add that the model does not
    depend on: `{"bos_token_id": 1, "eos_token_id": 2}`.
    """
    extra = dict(extra or {})
    for name in extra:
        if name not in HARMLESS:
            raise MeshwrightError(
                f"extra field {name!r} could change the model, or is unknown; only fields such as "
                f"bos_token_id, eos_token_id and initializer_range can be added"
                f"{did_you_mean(name, HARMLESS)}"
            )
    source = {name: value for name, value in (config.hf_config or {}).items() if name != SOURCE}
    if _is_read_as(config, source):
        fields = source
    else:
        fields = _fields_of_source_family(config, source) or _fields(config, family_of(config))
        fields |= {name: source[name] for name in source if name in HARMLESS}
    for spelling in [name for name in ("dtype", "torch_dtype") if name in fields] or [
        "torch_dtype"
    ]:
        fields[spelling] = dtype or fields.get(spelling) or "bfloat16"
    fields |= extra
    again = from_hf_config(fields)
    if again != config:
        lost = [
            f"{field.name}={getattr(config, field.name)!r}"
            for field in dataclasses.fields(config)
            if field.compare and getattr(config, field.name) != getattr(again, field.name)
        ]
        raise MeshwrightError(f"a config.json of {fields['architectures'][0]} cannot say {lost}")
    return fields


def _is_read_as(config: DecoderConfig, fields: Mapping[str, Any]) -> bool:
    try:
        return from_hf_config(fields) == config
    except MeshwrightError:
        return False


def _fields_of_source_family(
    config: DecoderConfig, source: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The fields in the source's architecture; None without a source, or if it cannot say them."""
    if not source.get("architectures") and not source.get("model_type"):
        return None
    fields = _fields(config, named_family(source, "config"))
    return fields if _is_read_as(config, fields) else None


def _fields(config: DecoderConfig, family: Family) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": config.vocab,
        "hidden_size": config.embed,
        "intermediate_size": config.mlp,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "attention_dropout": 0.0,
        **rope_to_hf(config.rope),
        # null: else transformers takes Llama 2's 1 and 2
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if family.optional_bias:
        fields["attention_bias"] = config.output_bias
    if family.window == "all":
        fields["sliding_window"] = config.sliding_window
    if family.window == "switched":
        fields["sliding_window"] = config.sliding_window
        fields["use_sliding_window"] = config.sliding_window is not None
        fields["max_window_layers"] = 0 if config.sliding_window is not None else config.layers
    return fields


def _kv_heads(fields: Mapping[str, Any], family: Family, heads: int, where: str) -> int:
    # transformers takes a fixed number for the other families, which fits hardly any model
    may_be_absent = family.kv_heads_may_be_absent or "num_key_value_heads" in fields
    return whole(fields, "num_key_value_heads", where, heads if may_be_absent else None)


def _head_dim(fields: Mapping[str, Any], family: Family, embed: int, heads: int, where: str) -> int:
    default = family.head_dim or embed // heads
    if fields.get("head_dim") is None and family.head_dim is None and embed % heads:
        raise MeshwrightError(
            f"{where}: hidden_size={embed} is not a multiple of num_attention_heads={heads}, and "
            "head_dim is not given"
        )
    return whole(fields, "head_dim", where, default)


def _biases(fields: Mapping[str, Any], family: Family, where: str) -> tuple[bool, bool]:
    """Whether q, k and v have a bias, and whether the output has."""
    asked = flag(fields, "attention_bias", where, family.qkv_bias)
    if family.optional_bias:
        return asked, asked
    if asked != family.qkv_bias:
        always = "always has q, k and v biases" if family.qkv_bias else "has no biases"
        raise MeshwrightError(
            f"{where}: attention_bias={asked} is not honoured: {family.architecture} {always}"
        )
    return family.qkv_bias, False


def _sliding_window(
    fields: Mapping[str, Any], family: Family, layers: int, where: str
) -> int | None:
    """The window all layers have, or None; layers that differ are an error."""
    is_set = fields.get("sliding_window", _DEFAULT_WINDOW) is not None
    if family.window == "none":
        sliding = 0
        if fields.get("sliding_window") is not None or flag(
            fields, "use_sliding_window", where, False
        ):
            raise MeshwrightError(
                f"{where}: sliding_window={short(fields.get('sliding_window'))} is not honoured: "
                f"{family.architecture} has none; MistralForCausalLM has"
            )
    elif family.window == "all":
        sliding = layers if is_set else 0
        if is_set and not flag(fields, "use_sliding_window", where, True):
            raise MeshwrightError(
                f"{where}: use_sliding_window=False is not honoured by {family.architecture}; set "
                "sliding_window to null"
            )
    else:
        is_set = is_set and flag(fields, "use_sliding_window", where, False)
        first = fields.get("max_window_layers", 28)  # those below see everything
        if isinstance(first, bool) or not isinstance(first, int):
            raise MeshwrightError(
                f"{where}: max_window_layers={short(first)} must be a whole number"
            )
        sliding = min(max(layers - first, 0), layers) if is_set else 0
    types = fields.get("layer_types")
    if types is not None:
        listed = _sliding_layers(types, layers, where)
        if (family.window != "switched" and listed != sliding) or (listed and not is_set):
            raise MeshwrightError(
                f"{where}: layer_types={short(types)} and sliding_window="
                f"{short(fields.get('sliding_window'))} disagree; remove layer_types"
            )
        sliding = listed
    if sliding not in (0, layers):
        raise MeshwrightError(
            f"{where}: {sliding} of {layers} layers have a sliding window; only the same for all "
            "layers is honoured"
        )
    return whole(fields, "sliding_window", where, _DEFAULT_WINDOW) if sliding else None


def _sliding_layers(types: Any, layers: int, where: str) -> int:
    kinds = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != layers:
        raise MeshwrightError(
            f"{where}: layer_types={short(types)} must be a list with a text for each of the "
            f"{layers} layers"
        )
    for kind in types:
        if kind not in kinds:
            raise MeshwrightError(
                f"{where}: layer type {short(kind)} is not supported; {' and '.join(kinds)} are"
            )
    return types.count("sliding_attention")
