"""OLMoE: a mixture of experts in every layer, and norms of the queries and keys of all heads."""

from meshwright.models.decoder.architecture import Architecture, Field
from meshwright.models.decoder.architectures.llama import FIELDS, TENSORS, WRITTEN
from meshwright.models.decoder.architectures.qwen3_moe import EXPERT_TENSORS, UNUSED
from meshwright.models.decoder.hf_parts import OPTIONAL_BIAS, ROPE, expert_count, heads

_ATTENTION = "model.layers.{layer}.self_attn."

OLMOE = Architecture(
    "OlmoeForCausalLM",
    "olmoe",
    FIELDS
    | {
        "max_seq": Field("max_position_embeddings", 4096),
        "norm_eps": Field("rms_norm_eps", 1e-5),
        "experts_per_token": Field("num_experts_per_tok", 8),
        "router_normalized": Field("norm_topk_prob", False),
    },
    TENSORS
    | EXPERT_TENSORS
    | {
        "layers/attention/q_norm": (_ATTENTION + "q_norm.weight", "(heads head_dim)"),
        "layers/attention/k_norm": (_ATTENTION + "k_norm.weight", "(kv_heads head_dim)"),
    },
    parts=(
        heads(kv_heads_may_be_absent=True),
        ROPE,
        OPTIONAL_BIAS,
        expert_count("num_experts", 64),
    ),
    fixed={"qk_norm": True, "joint_qk_norm": True},
    written=WRITTEN | {"clip_qkv": None},
    only={"hidden_act": ("silu", "swish"), "clip_qkv": (None,)},
    unused=UNUSED,
    suits=lambda config: config.embed == config.heads * config.head_dim,
)
