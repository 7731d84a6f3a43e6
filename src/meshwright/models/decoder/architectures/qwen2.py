"""Qwen 2 and 2.5: biases of q, k and v."""

from meshwright.models.decoder.architecture import Architecture, Field
from meshwright.models.decoder.architectures.llama import FIELDS, ONLY, TENSORS, WRITTEN
from meshwright.models.decoder.hf_parts import ROPE, SWITCHED_WINDOW, fixed_bias, heads

QWEN2 = Architecture(
    "Qwen2ForCausalLM",
    "qwen2",
    FIELDS | {"max_seq": Field("max_position_embeddings", 32768)},
    TENSORS,
    parts=(heads(), ROPE, fixed_bias("Qwen2ForCausalLM", True), SWITCHED_WINDOW),
    written=WRITTEN,
    only=ONLY,
)
