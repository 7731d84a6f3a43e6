"""gpt-oss: attention sinks, a window in every other layer, and experts with biases and a clamp."""

from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.models.decoder.architecture import Architecture, Field, Fields, Part
from meshwright.models.decoder.architectures.gemma2 import alternating
from meshwright.models.decoder.architectures.llama import FIELDS, TENSORS, WRITTEN
from meshwright.models.decoder.architectures.qwen3_moe import UNUSED
from meshwright.models.decoder.config import DecoderConfig
from meshwright.models.decoder.hf_parts import expert_count, heads, optional_bias, rotary
from meshwright.models.huggingface import short

_LAYER = "model.layers.{layer}."
_EXPERTS = _LAYER + "mlp.experts."
_ROPE = rotary(theta=150000.0)
_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def _read_rope(fields: Fields, ours: Fields, where: str) -> dict[str, Any]:
    if not fields.get("rope_scaling") and not fields.get("rope_parameters"):
        fields = {**fields, "rope_scaling": _YARN}
    return _ROPE.read(fields, ours, where)


def _write_rope(config: DecoderConfig) -> dict[str, Any]:
    fields = _ROPE.write(config)
    return fields | {"rope_scaling": fields["rope_scaling"] or {"rope_type": "default"}}


def _check_quantization(fields: Fields, ours: Fields, where: str) -> dict[str, Any]:
    settings = fields.get("quantization_config")
    method = settings.get("quant_method") if isinstance(settings, dict) else settings
    if method not in (None, "mxfp4"):
        raise MeshwrightError(
            f"{where}: quantization_config={short(settings)} is not honoured; mxfp4 is, and its "
            "weights are converted while they are read"
        )
    return {}


GPT_OSS = Architecture(
    "GptOssForCausalLM",
    "gpt_oss",
    FIELDS
    | {
        "max_seq": Field("max_position_embeddings", 131072),
        "norm_eps": Field("rms_norm_eps", 1e-5),
        "experts_per_token": Field("num_experts_per_tok", 4),
        "mlp_clamp": Field("swiglu_limit", 7.0),
    },
    {path: theirs for path, theirs in TENSORS.items() if not path.startswith("layers/mlp/")}
    | {
        "layers/attention/sinks": (_LAYER + "self_attn.sinks", "heads"),
        "layers/mlp/norm": TENSORS["layers/mlp/norm"],
        "layers/mlp/router": (_LAYER + "mlp.router.weight", "experts embed"),
        "layers/mlp/router_bias": (_LAYER + "mlp.router.bias", "experts"),
        # neighbours: one of the gate, then one of up
        "layers/mlp/gate": (_EXPERTS + "gate_up_proj", "experts embed (mlp parts)"),
        "layers/mlp/up": (_EXPERTS + "gate_up_proj", "experts embed (mlp parts)"),
        "layers/mlp/gate_bias": (_EXPERTS + "gate_up_proj_bias", "experts (mlp parts)"),
        "layers/mlp/up_bias": (_EXPERTS + "gate_up_proj_bias", "experts (mlp parts)"),
        "layers/mlp/down": (_EXPERTS + "down_proj", "experts mlp embed"),
        "layers/mlp/down_bias": (_EXPERTS + "down_proj_bias", "experts norm"),
    },
    parts=(
        heads(head_dim=64),
        Part(_ROPE.names, _read_rope, _write_rope),
        optional_bias(default=True),
        alternating(2, window=128),
        expert_count("num_local_experts", 128),
        Part(frozenset(), _check_quantization, lambda config: {}),
    ),
    fixed={
        "sinks": True,
        "mlp_bias": True,
        "router_bias": True,
        "router_normalized": True,
        "activation": "gelu_sigmoid",
    },
    written=WRITTEN,
    only={"hidden_act": ("silu",), "swiglu_alpha": (1.702,)},
    # said by other fields too, but for the last, which a part checks
    unused=UNUSED | {"experts_per_token", "initial_context_length", "quantization_config"},
)
