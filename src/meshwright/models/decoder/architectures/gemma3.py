"""Gemma 3 (text): five layers with a window and their own rotary positions, then one without."""

from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.models.decoder.architecture import Architecture, Field, Fields, Part
from meshwright.models.decoder.architectures.gemma2 import (
    GEMMA_FIELDS,
    GEMMA_FIXED,
    GEMMA_ONLY,
    GEMMA_TENSORS,
    GEMMA_UNUSED,
    SCALES,
    alternating,
    softcap,
)
from meshwright.models.decoder.config import DecoderConfig
from meshwright.models.decoder.hf_parts import OPTIONAL_BIAS, activation, heads
from meshwright.models.decoder.hf_rope import rope_from_hf, rope_to_hf
from meshwright.models.huggingface import number, short
from meshwright.ops import Rope


def _ropes(fields: Fields, ours: Fields, where: str) -> dict[str, Any]:
    """Those of layers with a window and of the others; one field has both, or three have them.

    Beside that one, as in transformers, `rope_scaling` changes the others', and theirs are the
    thetas that it does not say.
    """
    both, sizes = fields.get("rope_parameters"), (ours["max_seq"], ours["head_dim"])
    kinds = ("sliding_attention", "full_attention")
    if both is None:
        both = dict.fromkeys(kinds)
    elif not isinstance(both, dict) or both.keys() != {*kinds}:
        raise MeshwrightError(
            f"{where}: rope_parameters={short(both)} must have sliding_attention and full_attention"
        )
    (near, full), scaling = (both[kind] for kind in kinds), fields.get("rope_scaling")
    if isinstance(full, dict) and isinstance(scaling, dict):
        full, scaling = full | scaling, None
    theta = number(fields, "rope_local_base_freq", where, 10000.0)
    local = rope_from_hf({"rope_parameters": near}, *sizes, where, theta)
    theta = number(fields, "rope_theta", where, 1000000.0)
    far = rope_from_hf({"rope_parameters": full, "rope_scaling": scaling}, *sizes, where, theta)
    return {
        "pattern": [
            kind | {"rope": far if kind.get("sliding_window") is None else local}
            for kind in ours["pattern"]
        ]
    }


def _write_ropes(config: DecoderConfig) -> dict[str, Any]:
    ropes = {kind.attention.window is None: kind.attention.rope for kind in config.pattern}
    local, far = ropes.get(False) or Rope(10000.0), ropes.get(True) or Rope(1000000.0)
    fields = rope_to_hf(far, config.head_dim)
    return fields | {"rope_local_base_freq": local.theta}


GEMMA3 = Architecture(
    "Gemma3ForCausalLM",
    "gemma3_text",
    GEMMA_FIELDS | {"max_seq": Field("max_position_embeddings", 131072)},
    GEMMA_TENSORS,
    parts=(
        heads(head_dim=256),
        OPTIONAL_BIAS,
        activation("hidden_activation", "gelu_pytorch_tanh"),
        SCALES,
        softcap("logit_softcap", "final_logit_softcapping", None),
        alternating(6),
        Part(
            frozenset({"rope_parameters", "rope_theta", "rope_scaling", "rope_local_base_freq"}),
            _ropes,
            _write_ropes,
        ),
    ),
    fixed=GEMMA_FIXED | {"qk_norm": True},
    written={"attention_dropout": 0.0, "pad_token_id": None},
    # transformers caps no scores, whatever this field says
    only=GEMMA_ONLY | {"attn_logit_softcapping": (None,)},
    unused=GEMMA_UNUSED,
)
