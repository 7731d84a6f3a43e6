"""Qwen 3 with a mixture of experts in every layer."""

from meshwright.models.decoder.architecture import Architecture, Field
from meshwright.models.decoder.architectures.llama import FIELDS, TENSORS, WRITTEN
from meshwright.models.decoder.hf_parts import (
    OPTIONAL_BIAS,
    ROPE,
    SWITCHED_WINDOW,
    expert_count,
    heads,
)

_EXPERT = "model.layers.{layer}.mlp.experts.{expert}."
EXPERT_TENSORS = {
    "layers/mlp/router": ("model.layers.{layer}.mlp.gate.weight", "experts embed"),
    "layers/mlp/gate": (_EXPERT + "gate_proj.weight", "mlp embed"),
    "layers/mlp/up": (_EXPERT + "up_proj.weight", "mlp embed"),
    "layers/mlp/down": (_EXPERT + "down_proj.weight", "embed mlp"),
}
# of training: here settings of a run
UNUSED = frozenset({"output_router_logits", "router_aux_loss_coef"})

QWEN3_MOE = Architecture(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    FIELDS
    | {
        "max_seq": Field("max_position_embeddings", 32768),
        "mlp": Field("moe_intermediate_size", 768),
        "experts_per_token": Field("num_experts_per_tok", 8),
        "router_normalized": Field("norm_topk_prob", False),
    },
    TENSORS | EXPERT_TENSORS,
    parts=(
        heads(head_dim=128),
        ROPE,
        OPTIONAL_BIAS,
        SWITCHED_WINDOW,
        expert_count("num_experts", 128),
    ),
    fixed={"qk_norm": True},
    written=WRITTEN | {"decoder_sparse_step": 1, "mlp_only_layers": []},
    only={
        "hidden_act": ("silu", "swish"),
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([], None),
    },
    unused=UNUSED | {"intermediate_size"},  # of layers without experts
)
