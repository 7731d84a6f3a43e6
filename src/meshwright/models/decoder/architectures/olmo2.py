"""OLMo 2: norms after each block, and of the queries and keys of all heads together."""

from meshwright.models.decoder.architecture import Architecture, Field
from meshwright.models.decoder.architectures.llama import FIELDS, ONLY, TENSORS, WRITTEN
from meshwright.models.decoder.hf_parts import OPTIONAL_BIAS, ROPE, heads

_LAYER = "model.layers.{layer}."

OLMO2 = Architecture(
    "Olmo2ForCausalLM",
    "olmo2",
    FIELDS | {"norm_eps": Field("rms_norm_eps", 1e-5)},
    TENSORS
    | {
        "layers/attention/post_norm": (_LAYER + "post_attention_layernorm.weight", "norm"),
        "layers/attention/q_norm": (_LAYER + "self_attn.q_norm.weight", "(heads head_dim)"),
        "layers/attention/k_norm": (_LAYER + "self_attn.k_norm.weight", "(kv_heads head_dim)"),
        "layers/mlp/post_norm": (_LAYER + "post_feedforward_layernorm.weight", "norm"),
    },
    parts=(heads(kv_heads_may_be_absent=True), ROPE, OPTIONAL_BIAS),
    fixed={"qk_norm": True, "joint_qk_norm": True, "norm_places": "after"},
    written=WRITTEN,
    only=ONLY,
)
