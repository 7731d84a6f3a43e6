"""Mistral: a sliding window in all layers, or in none."""

from meshwright.models.decoder.architecture import Architecture, Field
from meshwright.models.decoder.architectures.llama import FIELDS, ONLY, TENSORS, WRITTEN
from meshwright.models.decoder.hf_parts import ROPE, fixed_bias, heads, window_of_all

MISTRAL = Architecture(
    "MistralForCausalLM",
    "mistral",
    FIELDS | {"max_seq": Field("max_position_embeddings", 131072)},
    TENSORS,
    parts=(
        heads(),
        ROPE,
        fixed_bias("MistralForCausalLM", False),
        window_of_all("MistralForCausalLM"),
    ),
    written=WRITTEN,
    only=ONLY,
)
