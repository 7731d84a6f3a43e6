"""DeepSeek-V3: latent attention, leading dense layers, groups of experts beside a shared one."""

import dataclasses
import math
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.models.decoder.architecture import Architecture, Field, Fields, Part
from meshwright.models.decoder.architectures.llama import FIELDS, TENSORS, WRITTEN
from meshwright.models.decoder.architectures.qwen3_moe import EXPERT_TENSORS, UNUSED
from meshwright.models.decoder.config import DecoderConfig
from meshwright.models.decoder.hf_parts import ROPE, expert_count
from meshwright.models.huggingface import flag, number, whole
from meshwright.ops import YarnScaling

_LAYER = "model.layers.{layer}."
_ATTENTION = _LAYER + "self_attn."
_SHARED = _LAYER + "mlp.shared_experts."
# heads are as wide as keys: first what is not rotated
_LATENT = {
    "attention/norm": TENSORS["layers/attention/norm"],
    "attention/wq": (_ATTENTION + "q_proj.weight", "(heads head_dim) embed"),
    "attention/wq_a": (_ATTENTION + "q_a_proj.weight", "latent embed"),
    "attention/q_norm": (_ATTENTION + "q_a_layernorm.weight", "latent"),
    "attention/wq_b": (_ATTENTION + "q_b_proj.weight", "(heads head_dim) latent_rank"),
    "attention/wkv_a": (_ATTENTION + "kv_a_proj_with_mqa.weight", "parts embed"),
    "attention/wk_rope": (_ATTENTION + "kv_a_proj_with_mqa.weight", "parts embed"),
    "attention/kv_norm": (_ATTENTION + "kv_a_layernorm.weight", "latent"),
    "attention/wk_b": (_ATTENTION + "kv_b_proj.weight", "(kv_heads parts) latent_rank"),
    "attention/wv_b": (_ATTENTION + "kv_b_proj.weight", "(kv_heads parts) latent_rank"),
    "attention/wo": (_ATTENTION + "o_proj.weight", "embed (heads head_part)"),
    "mlp/norm": TENSORS["layers/mlp/norm"],
}
_DENSE = {f"mlp/{name}": TENSORS[f"layers/mlp/{name}"] for name in ("gate", "up", "down")}


def _heads(fields: Fields, ours: Fields, where: str) -> dict[str, Any]:
    rope_dim = whole(fields, "qk_rope_head_dim", where, 64)
    if whole(fields, "num_key_value_heads", where, ours["heads"]) != ours["heads"]:
        raise MeshwrightError(
            f"{where}: num_key_value_heads={fields['num_key_value_heads']} is not honoured: latent "
            f"attention has keys for each of the {ours['heads']} heads"
        )
    plain = "q_lora_rank" in fields and fields["q_lora_rank"] is None
    return {
        "kv_heads": ours["heads"],
        "head_dim": whole(fields, "qk_nope_head_dim", where, 128) + rope_dim,
        "rope_dim": rope_dim,
        "value_dim": whole(fields, "v_head_dim", where, 128),
        "kv_rank": whole(fields, "kv_lora_rank", where, 512),
        "q_rank": None if plain else whole(fields, "q_lora_rank", where, 1536),
    }


def _write_heads(config: DecoderConfig) -> dict[str, Any]:
    if config.kv_rank is None:
        raise MeshwrightError("DeepseekV3ForCausalLM has latent attention; this model has not")
    return {
        "num_key_value_heads": config.heads,
        "qk_nope_head_dim": config.head_dim - config.rope_dim,
        "qk_rope_head_dim": config.rope_dim,
        "v_head_dim": config.value_dim,
        "kv_lora_rank": config.kv_rank,
        "q_lora_rank": config.q_rank,
    }


def _read_rope(fields: Fields, ours: Fields, where: str) -> dict[str, Any]:
    rope = ROPE.read(fields, ours, where)["rope"]
    rope = dataclasses.replace(rope, interleaved=flag(fields, "rope_interleave", where, True))
    settings = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    scale = None
    if isinstance(rope.scaling, YarnScaling) and settings.get("mscale_all_dim"):
        by = number(settings, "mscale_all_dim", where)
        scale = _scale(by, rope.scaling.factor, ours["head_dim"])
    return {"rope": rope, "score_scale": scale}


def _scale(mscale: float, factor: float, head_dim: int) -> float:
    """Of scores, for longer contexts."""
    more: float = 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0
    return head_dim**-0.5 * more * more


def _write_rope(config: DecoderConfig) -> dict[str, Any]:
    fields = ROPE.write(config) | {"rope_interleave": config.rope.interleaved}
    if config.score_scale is not None and isinstance(config.rope.scaling, YarnScaling):
        more = math.sqrt(config.score_scale * config.head_dim**0.5) - 1
        mscale = round(more / (0.1 * math.log(config.rope.scaling.factor)), 6)
        fields["rope_scaling"] |= {"mscale_all_dim": mscale}
    return fields


def _layers(fields: Fields, ours: Fields, where: str) -> dict[str, Any]:
    shared = whole(fields, "n_shared_experts", where, 1) * ours["mlp"]
    if fields.get("first_k_dense_replace") == 0:
        return {"shared_mlp": shared}
    return {
        "shared_mlp": shared,
        "leading": whole(fields, "first_k_dense_replace", where, 3),
        "leading_mlp": whole(fields, "intermediate_size", where, 18432),
    }


def _write_layers(config: DecoderConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {"first_k_dense_replace": config.leading}
    if config.leading:
        fields["intermediate_size"] = config.leading_mlp
    return fields | {"n_shared_experts": config.shared_mlp // config.mlp}


DEEPSEEK_V3 = Architecture(
    "DeepseekV3ForCausalLM",
    "deepseek_v3",
    FIELDS
    | {
        "max_seq": Field("max_position_embeddings", 4096),
        "mlp": Field("moe_intermediate_size", 2048),
        "experts_per_token": Field("num_experts_per_tok", 8),
        "router_normalized": Field("norm_topk_prob", True),
        "router_scale": Field("routed_scaling_factor", 2.5),
        "expert_groups": Field("n_group", 8),
        "expert_groups_per_token": Field("topk_group", 4),
    },
    {"embedding": TENSORS["embedding"]}
    | {f"leading_layers/{path}": theirs for path, theirs in (_LATENT | _DENSE).items()}
    | {f"layers/{path}": theirs for path, theirs in _LATENT.items()}
    | EXPERT_TENSORS
    | {
        "layers/mlp/selection_bias": (_LAYER + "mlp.gate.e_score_correction_bias", "experts"),
        "layers/mlp/shared_gate": (_SHARED + "gate_proj.weight", "shared_mlp embed"),
        "layers/mlp/shared_up": (_SHARED + "up_proj.weight", "shared_mlp embed"),
        "layers/mlp/shared_down": (_SHARED + "down_proj.weight", "embed shared_mlp"),
        "norm": TENSORS["norm"],
        "output": TENSORS["output"],
    },
    parts=(
        Part(
            frozenset(
                {
                    "num_key_value_heads", "head_dim", "qk_head_dim", "qk_nope_head_dim",
                    "qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank",
                }
            ),
            _heads,
            _write_heads,
        ),
        Part(ROPE.names | {"rope_interleave"}, _read_rope, _write_rope),
        Part(
            frozenset({"first_k_dense_replace", "intermediate_size", "n_shared_experts"}),
            _layers,
            _write_layers,
        ),
        expert_count("n_routed_experts", 256),
    ),
    fixed={"router_scores": "sigmoid", "selection_bias": True},
    written=WRITTEN,
    only={
        "hidden_act": ("silu", "swish"),
        "attention_bias": (False,),
        "moe_layer_freq": (1,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    },
    # of training, of code beside the files, and of layers that predict further tokens
    unused=UNUSED
    | {
        "aux_loss_alpha", "seq_aux", "auto_map", "ep_size", "num_mtp_layers",
        "num_nextn_predict_layers",
    },
    beyond="model.layers.{layers}.",
)  # fmt: skip
