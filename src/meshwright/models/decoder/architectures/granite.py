"""Granite: Llama with multipliers of embedding, scores, residual additions and logits."""

from typing import Any

from meshwright.models.decoder.architecture import Architecture, Field, Fields, Part
from meshwright.models.decoder.architectures.llama import FIELDS, ONLY, TENSORS, WRITTEN
from meshwright.models.decoder.hf_parts import OPTIONAL_BIAS, ROPE, heads
from meshwright.models.huggingface import number


def _logits(fields: Fields, ours: Fields, where: str) -> dict[str, Any]:
    return {"logit_scale": 1 / number(fields, "logits_scaling", where, 1.0)}


GRANITE = Architecture(
    "GraniteForCausalLM",
    "granite",
    FIELDS
    | {
        "embedding_scale": Field("embedding_multiplier", 1.0),
        "residual_scale": Field("residual_multiplier", 1.0),
        "score_scale": Field("attention_multiplier", 1.0),
    },
    TENSORS,
    parts=(
        heads(kv_heads_may_be_absent=True),
        ROPE,
        OPTIONAL_BIAS,
        Part(
            frozenset({"logits_scaling"}),
            _logits,
            lambda config: {"logits_scaling": 1 / config.logit_scale},
        ),
    ),
    written=WRITTEN,
    only=ONLY,
    unused=frozenset({"attention_dropout"}),  # 0.1 in what is published
)
