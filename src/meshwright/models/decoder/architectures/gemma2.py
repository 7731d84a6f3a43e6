"""Gemma 2: every other layer has a window; softcaps, norms on both sides, an embedding scale."""

from typing import Any

from meshwright.models.decoder.architecture import Architecture, Field, Fields, Part
from meshwright.models.decoder.architectures.llama import FIELDS, TENSORS
from meshwright.models.decoder.config import DecoderConfig
from meshwright.models.decoder.hf_parts import (
    OPTIONAL_BIAS,
    ROPE,
    activation,
    heads,
    layer_types,
)
from meshwright.models.huggingface import number, whole

_LAYER = "model.layers.{layer}."
GEMMA_FIELDS = FIELDS | {
    "max_seq": Field("max_position_embeddings", 8192),
    "tied_embeddings": Field("tie_word_embeddings", True),
}
GEMMA_TENSORS = TENSORS | {
    "layers/attention/post_norm": (_LAYER + "post_attention_layernorm.weight", "norm"),
    "layers/mlp/norm": (_LAYER + "pre_feedforward_layernorm.weight", "norm"),
    "layers/mlp/post_norm": (_LAYER + "post_feedforward_layernorm.weight", "norm"),
}
GEMMA_FIXED = {"norm": "rms+1", "norm_places": "both"}
GEMMA_ONLY = {
    "hidden_act": ("gelu_pytorch_tanh",),
    "use_bidirectional_attention": (None, False),
}
GEMMA_UNUSED = frozenset({"cache_implementation"})


def _scales(fields: Fields, ours: Fields, where: str) -> dict[str, Any]:
    scalar = number(fields, "query_pre_attn_scalar", where, 256.0)
    usual = scalar == ours["head_dim"]
    return {
        "embedding_scale": ours["embed"] ** 0.5,
        "score_scale": None if usual else scalar**-0.5,
    }


def _write_scales(config: DecoderConfig) -> dict[str, Any]:
    scale = config.score_scale
    scalar = config.head_dim if scale is None else round(scale**-2, 6)
    return {"query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar}


# the embedding is scaled by the root of its width, scores by that of a field
SCALES = Part(frozenset({"query_pre_attn_scalar"}), _scales, _write_scales)


def softcap(ours: str, name: str, default: float | None) -> Part:
    """A cap of scores or logits; none where the field is null."""

    def read(fields: Fields, values: Fields, where: str) -> dict[str, Any]:
        asked = fields.get(name, default)
        return {ours: None if asked is None else number({name: asked}, name, where)}

    return Part(frozenset({name}), read, lambda config: {name: getattr(config, ours)})


def alternating(every: int, *, window: int = 4096) -> Part:
    """Layers with a window, but for one of every so many; `layer_types` says it otherwise."""

    def read(fields: Fields, ours: Fields, where: str) -> dict[str, Any]:
        layers, types = ours["layers"], fields.get("layer_types")
        period = whole(fields, "_sliding_window_pattern", where, every)
        period = whole(fields, "sliding_window_pattern", where, period)
        if types is None:
            types = ["sliding" * bool((i + 1) % period) or "full" for i in range(layers)]
            types = [f"{one}_attention" for one in types]
        size = whole(fields, "sliding_window", where, window)
        kinds = {"sliding_attention": {"sliding_window": size}, "full_attention": {}}
        return {"pattern": [kinds[one] for one in layer_types(types, layers, where)]}

    def write(config: DecoderConfig) -> dict[str, Any]:
        windows = [kind.attention.window for kind in config.pattern]
        listed = [windows[i % len(windows)] for i in range(config.layers)]
        sizes = [size for size in windows if size is not None]
        return {
            "sliding_window": sizes[0] if sizes else window,
            "layer_types": [
                "full_attention" if one is None else "sliding_attention" for one in listed
            ],
        }

    return Part(
        frozenset(
            {"sliding_window", "layer_types", "sliding_window_pattern", "_sliding_window_pattern"}
        ),
        read,
        write,
    )


GEMMA2 = Architecture(
    "Gemma2ForCausalLM",
    "gemma2",
    GEMMA_FIELDS,
    GEMMA_TENSORS,
    parts=(
        heads(head_dim=256),
        ROPE,
        OPTIONAL_BIAS,
        activation("hidden_activation", "gelu_pytorch_tanh"),
        SCALES,
        softcap("score_softcap", "attn_logit_softcapping", 50.0),
        softcap("logit_softcap", "final_logit_softcapping", 30.0),
        alternating(2),
    ),
    fixed=GEMMA_FIXED,
    written={"attention_dropout": 0.0, "pad_token_id": None},
    only=GEMMA_ONLY,
    unused=GEMMA_UNUSED,
)
