"""Mixtral: Mistral with a mixture of experts in every layer."""

from meshwright.models.decoder.architecture import Architecture, Field
from meshwright.models.decoder.architectures.llama import FIELDS, TENSORS, WRITTEN
from meshwright.models.decoder.architectures.qwen3_moe import UNUSED
from meshwright.models.decoder.hf_parts import (
    expert_count,
    fixed_bias,
    heads,
    rotary,
    window_of_all,
)

_MLP = "model.layers.{layer}.block_sparse_moe."

MIXTRAL = Architecture(
    "MixtralForCausalLM",
    "mixtral",
    FIELDS
    | {
        "max_seq": Field("max_position_embeddings", 131072),
        "norm_eps": Field("rms_norm_eps", 1e-5),
        "experts_per_token": Field("num_experts_per_tok", 2),
    },
    TENSORS
    | {
        "layers/mlp/router": (_MLP + "gate.weight", "experts embed"),
        "layers/mlp/gate": (_MLP + "experts.{expert}.w1.weight", "mlp embed"),
        "layers/mlp/down": (_MLP + "experts.{expert}.w2.weight", "embed mlp"),
        "layers/mlp/up": (_MLP + "experts.{expert}.w3.weight", "mlp embed"),
    },
    parts=(
        heads(),
        rotary(theta=1e6),
        fixed_bias("MixtralForCausalLM", False),
        window_of_all("MixtralForCausalLM", default=None),
        expert_count("num_local_experts", 8),
    ),
    fixed={"router_normalized": True},
    written=WRITTEN,
    only={"hidden_act": ("silu", "swish")},
    unused=UNUSED | {"router_jitter_noise"},
)
