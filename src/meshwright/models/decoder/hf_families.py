"""The Hugging Face architectures a decoder can be, and which one has a model's features."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.models.decoder.config import DecoderConfig
from meshwright.models.huggingface import short


@dataclasses.dataclass(frozen=True)
class Family:
    """What an architecture has, and what transformers takes where config.json is silent."""

    architecture: str
    model_type: str
    max_seq: int
    window: str  # "none", "all" layers, or "switched" by use_sliding_window and max_window_layers
    qkv_bias: bool = False  # always there
    optional_bias: bool = False  # attention_bias: q, k, v and output
    qk_norm: bool = False
    head_dim: int | None = None  # None: embed // heads
    kv_heads_may_be_absent: bool = False  # then as many as heads


_LLAMA = Family(
    "LlamaForCausalLM", "llama", 2048, "none", optional_bias=True, kv_heads_may_be_absent=True
)
_MISTRAL = Family("MistralForCausalLM", "mistral", 131072, "all")
_QWEN2 = Family("Qwen2ForCausalLM", "qwen2", 32768, "switched", qkv_bias=True)
_QWEN3 = Family(
    "Qwen3ForCausalLM", "qwen3", 32768, "switched", optional_bias=True, qk_norm=True, head_dim=128
)
FAMILIES = {family.architecture: family for family in (_LLAMA, _MISTRAL, _QWEN2, _QWEN3)}


def named_family(fields: Mapping[str, Any], where: str) -> Family:
    """The family by `architectures`, or by `model_type` where that is silent."""
    supported = f"supported are {', '.join(FAMILIES)}"
    by_type = {family.model_type: family for family in FAMILIES.values()}
    named, model_type = fields.get("architectures"), fields.get("model_type")
    if named is None or named == []:
        if model_type is None:
            raise MeshwrightError(f"{where}: architectures is missing; {supported}")
        if not isinstance(model_type, str) or model_type not in by_type:
            raise MeshwrightError(f"{where}: model_type {short(model_type)}; {supported}")
        return by_type[model_type]
    if not isinstance(named, list) or len(named) != 1 or named[0] not in list(FAMILIES):
        raise MeshwrightError(f"{where}: architectures {short(named)}; {supported}")
    family = FAMILIES[named[0]]
    if model_type is not None and model_type != family.model_type:
        raise MeshwrightError(
            f"{where}: architectures {short(named)} and model_type {short(model_type)} disagree; "
            f"its model_type is {family.model_type!r}"
        )
    return family


def family_of(config: DecoderConfig) -> Family:
    """The architecture that has a model's features."""
    biases = (config.qkv_bias, config.output_bias)
    windowed = config.sliding_window is not None
    if config.qk_norm and biases != (True, False) and biases != (False, True):
        return _QWEN3
    if not config.qk_norm and biases == (True, False):
        return _QWEN2
    # transformers refuses a Llama whose heads do not divide embed
    divides = config.embed % config.heads == 0
    if not config.qk_norm and biases == (True, True) and not windowed and divides:
        return _LLAMA
    if not config.qk_norm and biases == (False, False):
        return _LLAMA if divides and not windowed else _MISTRAL
    said = [
        f"{name}={getattr(config, name)}"
        for name in ("qkv_bias", "output_bias", "qk_norm", "sliding_window", "embed", "heads")
    ]
    raise MeshwrightError(
        f"no Hugging Face architecture has {', '.join(said)} together. Llama has biases on q, k, v "
        "and output, no window, and embed a multiple of heads; Mistral has no bias; Qwen 2 has "
        "biases on q, k and v; Qwen 3 has qk_norm, with all biases or none"
    )
