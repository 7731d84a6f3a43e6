"""Phi-3, 3.5 and 4: q, k and v in one tensor, gate and up in another; LongRoPE."""

from meshwright.models.decoder.architecture import Architecture, Field
from meshwright.models.decoder.architectures.llama import FIELDS, ONLY, TENSORS, WRITTEN
from meshwright.models.decoder.hf_parts import heads, rotary, window_of_all

_QKV = ("model.layers.{layer}.self_attn.qkv_proj.weight", "(parts head_dim) embed")
_GATE_UP = ("model.layers.{layer}.mlp.gate_up_proj.weight", "parts embed")

PHI3 = Architecture(
    "Phi3ForCausalLM",
    "phi3",
    FIELDS
    | {
        "max_seq": Field("max_position_embeddings", 4096),
        "norm_eps": Field("rms_norm_eps", 1e-5),
    },
    TENSORS
    | {f"layers/attention/w{one}": _QKV for one in "qkv"}
    | {f"layers/mlp/{one}": _GATE_UP for one in ("gate", "up")},
    parts=(
        heads(kv_heads_may_be_absent=True),
        rotary(partial=True, kinds=("default", "longrope"), original=4096),
        window_of_all("Phi3ForCausalLM", default=None),
    ),
    written=WRITTEN | {"pad_token_id": None},
    only=ONLY | {"attention_bias": (False,), "lm_head_bias": (False,)},
    unused=frozenset(
        {"auto_map", "embd_pdrop", "resid_pdrop", "full_attn_mod", "interpolate_factor"}
    ),
)
