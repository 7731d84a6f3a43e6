"""Qwen 3: each head's query and key through a norm."""

from meshwright.models.decoder.architecture import Architecture, Field
from meshwright.models.decoder.architectures.llama import FIELDS, ONLY, TENSORS, WRITTEN
from meshwright.models.decoder.hf_parts import OPTIONAL_BIAS, ROPE, SWITCHED_WINDOW, heads

QWEN3 = Architecture(
    "Qwen3ForCausalLM",
    "qwen3",
    FIELDS | {"max_seq": Field("max_position_embeddings", 32768)},
    TENSORS,
    parts=(heads(head_dim=128), ROPE, OPTIONAL_BIAS, SWITCHED_WINDOW),
    fixed={"qk_norm": True},
    written=WRITTEN,
    only=ONLY,
)
