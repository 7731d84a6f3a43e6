"""Qwen 3 with a mixture of experts in every layer."""

from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.models.decoder.architecture import Architecture, Field, Fields, Part
from meshwright.models.decoder.architectures.llama import FIELDS, TENSORS, WRITTEN
from meshwright.models.decoder.hf_parts import (
    OPTIONAL_BIAS,
    ROPE,
    SWITCHED_WINDOW,
    expert_count,
    heads,
    window_of_all,
)
from meshwright.models.huggingface import flag, short

_EXPERT = "model.layers.{layer}.mlp.experts.{expert}."
EXPERT_TENSORS = {
    "layers/mlp/router": ("model.layers.{layer}.mlp.gate.weight", "experts embed"),
    "layers/mlp/gate": (_EXPERT + "gate_proj.weight", "mlp embed"),
    "layers/mlp/up": (_EXPERT + "up_proj.weight", "mlp embed"),
    "layers/mlp/down": (_EXPERT + "down_proj.weight", "embed mlp"),
}
# of training: here settings of a run
UNUSED = frozenset({"output_router_logits", "router_aux_loss_coef"})
_NAME = "Qwen3MoeForCausalLM"
_WINDOW = window_of_all(_NAME)


def _read_window(fields: Fields, ours: Fields, where: str) -> dict[str, Any]:
    """Switched on, it is that of all layers: transformers looks at no max_window_layers."""
    if not flag(fields, "use_sliding_window", where, False):
        fields = {**fields, "use_sliding_window": None, "sliding_window": None}
    elif fields.get("sliding_window", 0) is not None and fields.get("max_window_layers"):
        raise MeshwrightError(
            f"{where}: max_window_layers={short(fields['max_window_layers'])} is not honoured: in "
            f"{_NAME} every layer has the sliding window; set it to 0, or use_sliding_window to "
            "false"
        )
    return _WINDOW.read(fields, ours, where)


QWEN3_MOE = Architecture(
    _NAME,
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
        Part(SWITCHED_WINDOW.names, _read_window, SWITCHED_WINDOW.write),
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
