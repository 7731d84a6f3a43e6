"""Parts of a config.json that several architectures have."""

from collections.abc import Mapping
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.models.decoder.architecture import Fields, Part
from meshwright.models.decoder.config import DecoderConfig
from meshwright.models.decoder.hf_rope import (
    DEFAULT_THETA,
    ORIGINAL,
    ROPE_TYPES,
    rope_from_hf,
    rope_to_hf,
)
from meshwright.models.huggingface import flag, short, whole

_DEFAULT_WINDOW = 4096  # of Mistral and Qwen, where config.json does not say

_ROPE_FIELDS = frozenset(
    {
        "rope_theta", "rope_scaling", "rope_parameters", ORIGINAL,
        "partial_rotary_factor",
    }
)  # fmt: skip


def rotary(
    *,
    partial: bool = False,
    theta: float = DEFAULT_THETA,
    share: float = 1.0,
    names: tuple[str, str] = ("rope_theta", "partial_rotary_factor"),
    kinds: tuple[str, ...] = ROPE_TYPES,
    original: int | None = None,
) -> Part:
    """Rotary embedding, of a part of each head where the architecture has that.

    `theta` and `share`, which is that part, are those where a file does not say them, and `names`
    how older files call them.
    `kinds` are the rope_types that it has. `original` is the field original_max_position_embeddings
    of architectures that have it beside the scaling and without one, where a file does not say it.
    """

    def read(fields: Fields, ours: Fields, where: str) -> dict[str, Any]:
        settings = fields.get("rope_parameters") or {}
        renamed = {
            name: fields[old] if old in fields else fields.get(name)
            for old, name in zip(names, ("rope_theta", "partial_rotary_factor"), strict=True)
        }
        if renamed["partial_rotary_factor"] is None and not settings.get("partial_rotary_factor"):
            renamed["partial_rotary_factor"] = share
        sizes = ours["max_seq"], ours["head_dim"]
        rope = rope_from_hf({**fields, **renamed}, *sizes, where, theta, kinds, original)
        if rope.dims is not None and not partial:
            raise MeshwrightError(
                f"{where}: partial_rotary_factor={rope.dims / ours['head_dim']:g} is not honoured: "
                "whole heads are rotated, so it must be 1"
            )
        return {"rope": rope}

    def write(config: DecoderConfig) -> dict[str, Any]:
        fields = rope_to_hf(config.rope, config.head_dim)
        if share != 1:
            fields.setdefault("partial_rotary_factor", 1.0)
        scaling = fields.get("rope_scaling") or {}
        if original is not None and scaling.get("rope_type") == "longrope":
            fields |= _as_of_phi3(scaling, config.max_seq)
        older = dict(zip(("rope_theta", "partial_rotary_factor"), names, strict=True))
        return {older.get(name, name): value for name, value in fields.items()}

    return Part(_ROPE_FIELDS.union(names), read, write)


ROPE = rotary()


def _as_of_phi3(scaling: Mapping[str, Any], max_seq: int) -> dict[str, Any]:
    """LongRoPE in the three fields that transformers before 5 insists on."""
    kept = {name: scaling[name] for name in ("short_factor", "long_factor")}
    if scaling["factor"] != max_seq / scaling[ORIGINAL]:
        kept["factor"] = scaling["factor"]
    if "attention_factor" in scaling:
        kept["attention_factor"] = scaling["attention_factor"]
    return {"rope_scaling": {"type": scaling["rope_type"], **kept}, ORIGINAL: scaling[ORIGINAL]}


def heads(*, head_dim: int | None = None, kv_heads_may_be_absent: bool = False) -> Part:
    """Key heads and head_dim; where head_dim is not said it is this, or embed / heads."""

    def read(fields: Fields, ours: Fields, where: str) -> dict[str, Any]:
        count, embed = ours["heads"], ours["embed"]
        # transformers takes a fixed number for other families, which fits hardly any model
        optional = kv_heads_may_be_absent or "num_key_value_heads" in fields
        if fields.get("head_dim") is None and head_dim is None and embed % count:
            raise MeshwrightError(
                f"{where}: hidden_size={embed} is not a multiple of num_attention_heads={count}, "
                "and head_dim is not given"
            )
        return {
            "kv_heads": whole(fields, "num_key_value_heads", where, count if optional else None),
            "head_dim": whole(fields, "head_dim", where, head_dim or embed // count),
        }

    def write(config: DecoderConfig) -> dict[str, Any]:
        return {"num_key_value_heads": config.kv_heads, "head_dim": config.head_dim}

    return Part(frozenset({"num_key_value_heads", "head_dim"}), read, write)


def optional_bias(*, default: bool = False) -> Part:
    """attention_bias: q, k, v and output."""

    def read(fields: Fields, ours: Fields, where: str) -> dict[str, Any]:
        asked = flag(fields, "attention_bias", where, default)
        return {"qkv_bias": asked, "output_bias": asked}

    def write(config: DecoderConfig) -> dict[str, Any]:
        return {"attention_bias": config.output_bias}

    return Part(frozenset({"attention_bias"}), read, write)


OPTIONAL_BIAS = optional_bias()


def fixed_bias(architecture: str, qkv_bias: bool) -> Part:
    """attention_bias is not honoured: q, k and v always have a bias, or never."""

    def read(fields: Fields, ours: Fields, where: str) -> dict[str, Any]:
        asked = flag(fields, "attention_bias", where, qkv_bias)
        if asked != qkv_bias:
            always = "always has q, k and v biases" if qkv_bias else "has no biases"
            raise MeshwrightError(
                f"{where}: attention_bias={asked} is not honoured: {architecture} {always}"
            )
        return {"qkv_bias": qkv_bias, "output_bias": False}

    return Part(frozenset({"attention_bias"}), read, lambda config: {})


_WINDOW_FIELDS = frozenset(
    {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}
)


def no_window(architecture: str) -> Part:
    """Every token sees all before it."""

    def read(fields: Fields, ours: Fields, where: str) -> dict[str, Any]:
        asked = fields.get("sliding_window")
        if flag(fields, "use_sliding_window", where, asked is not None):
            raise MeshwrightError(
                f"{where}: sliding_window={short(asked)} is not honoured: {architecture} has none; "
                "MistralForCausalLM has"
            )
        listed = sliding_layers(fields, ours["layers"], where)
        _check_types(fields, listed in (None, 0), where)
        return {"sliding_window": None}

    return Part(_WINDOW_FIELDS, read, lambda config: {})


def window_of_all(architecture: str, default: int | None = _DEFAULT_WINDOW) -> Part:
    """sliding_window is that of all layers, or null."""

    def read(fields: Fields, ours: Fields, where: str) -> dict[str, Any]:
        layers = ours["layers"]
        is_set = fields.get("sliding_window", default) is not None
        if is_set and not flag(fields, "use_sliding_window", where, True):
            raise MeshwrightError(
                f"{where}: use_sliding_window=False is not honoured by {architecture}; set "
                "sliding_window to null"
            )
        listed = sliding_layers(fields, layers, where)
        _check_types(fields, listed in (None, layers if is_set else 0), where)
        window = whole(fields, "sliding_window", where, default) if is_set else None
        return {"sliding_window": window}

    return Part(_WINDOW_FIELDS, read, lambda config: {"sliding_window": config.sliding_window})


def _switched_window(fields: Fields, ours: Fields, where: str) -> dict[str, Any]:
    layers = ours["layers"]
    is_set = fields.get("sliding_window", _DEFAULT_WINDOW) is not None
    is_set = is_set and flag(fields, "use_sliding_window", where, False)
    first = fields.get("max_window_layers", 28)  # those below see everything
    if isinstance(first, bool) or not isinstance(first, int):
        raise MeshwrightError(f"{where}: max_window_layers={short(first)} must be a whole number")
    sliding = min(max(layers - first, 0), layers) if is_set else 0
    listed = sliding_layers(fields, layers, where)
    if listed is not None:
        _check_types(fields, is_set or not listed, where)
        sliding = listed
    if sliding not in (0, layers):
        raise MeshwrightError(
            f"{where}: {sliding} of {layers} layers have a sliding window; only the same for all "
            "layers is honoured"
        )
    window = whole(fields, "sliding_window", where, _DEFAULT_WINDOW) if sliding else None
    return {"sliding_window": window}


def _write_switched_window(config: DecoderConfig) -> dict[str, Any]:
    window = config.sliding_window
    return {
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "max_window_layers": 0 if window is not None else config.layers,
    }


# use_sliding_window, and max_window_layers that see everything
SWITCHED_WINDOW = Part(_WINDOW_FIELDS, _switched_window, _write_switched_window)


def sliding_layers(fields: Mapping[str, Any], layers: int, where: str) -> int | None:
    """How many of `layer_types` have a window; None where that is not said."""
    types = fields.get("layer_types")
    return None if types is None else layer_types(types, layers, where).count("sliding_attention")


def layer_types(types: Any, layers: int, where: str) -> list[str]:
    """full_attention or sliding_attention for each layer."""
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
    return types


def _check_types(fields: Fields, agree: bool, where: str) -> None:
    if not agree:
        raise MeshwrightError(
            f"{where}: layer_types={short(fields['layer_types'])} and sliding_window="
            f"{short(fields.get('sliding_window'))} disagree; remove layer_types"
        )


def _one_key_each(fields: Fields, ours: Fields, where: str) -> dict[str, Any]:
    count, embed = ours["heads"], ours["embed"]
    if embed % count:
        raise MeshwrightError(
            f"{where}: the model's width {embed} is not a multiple of its {count} heads"
        )
    return {"kv_heads": count, "head_dim": embed // count}


# every head has a key of its own, and the heads together are as wide as the model
ONE_KEY_EACH = Part(frozenset(), _one_key_each, lambda config: {})

_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "quick_gelu": "gelu_sigmoid",
}  # fmt: skip


def activation(name: str, default: str) -> Part:
    """The activation of the mlp, in the field of this name."""

    def read(fields: Fields, ours: Fields, where: str) -> dict[str, Any]:
        asked = fields.get(name) or default
        if not isinstance(asked, str) or asked not in _ACTIVATIONS:
            raise MeshwrightError(
                f"{where}: {name}={short(asked)} is not supported; {', '.join(_ACTIVATIONS)} are"
            )
        return {"activation": _ACTIVATIONS[asked]}

    def write(config: DecoderConfig) -> dict[str, Any]:
        names = [one for one, ours in _ACTIVATIONS.items() if ours == config.activation]
        return {name: default if default in names else names[0]}

    return Part(frozenset({name}), read, write)


def expert_count(name: str, default: int) -> Part:
    """How many experts a layer has; newer files may call it num_local_experts."""
    names = (name, "num_experts", "num_local_experts")

    def read(fields: Fields, ours: Fields, where: str) -> dict[str, Any]:
        said = next((one for one in names if fields.get(one) is not None), name)
        return {"experts": whole(fields, said, where, default)}

    return Part(frozenset(names), read, lambda config: {name: config.experts})
