"""OPT: as GPT-2, with ReLU and two unused entries before its learned positions."""

from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.models.decoder.architecture import Architecture, Field, Fields, Part
from meshwright.models.decoder.hf_parts import ONE_KEY_EACH, activation
from meshwright.models.huggingface import short

_LAYER = "model.decoder.layers.{layer}."


def _linear(ours: str, theirs: str, weight: str, bias: str) -> dict[str, tuple[str, str]]:
    """A matrix and its bias."""
    block, name = ours.rsplit("/", 1)
    ours_bias = f"{block}/b{name[1]}" if block.endswith("attention") else f"{ours}_bias"
    return {
        f"layers/{ours}": (f"{_LAYER}{theirs}.weight", weight),
        f"layers/{ours_bias}": (f"{_LAYER}{theirs}.bias", bias),
    }


def _norm(ours: str, theirs: str) -> dict[str, tuple[str, str]]:
    return {ours: (f"{theirs}.weight", "norm"), f"{ours}_bias": (f"{theirs}.bias", "norm")}


def _check_width(fields: Fields, ours: Fields, where: str) -> dict[str, Any]:
    width = fields.get("word_embed_proj_dim")
    if width not in (None, ours["embed"]):
        raise MeshwrightError(
            f"{where}: word_embed_proj_dim={short(width)} is not honoured: the embedding is as "
            f"wide as the model, {ours['embed']}"
        )
    return {}


_WIDTH = Part(
    frozenset({"word_embed_proj_dim"}),
    _check_width,
    lambda config: {"word_embed_proj_dim": config.embed},
)

OPT = Architecture(
    "OPTForCausalLM",
    "opt",
    fields={
        "vocab": Field("vocab_size"),
        "embed": Field("hidden_size"),
        "mlp": Field("ffn_dim"),
        "layers": Field("num_hidden_layers"),
        "heads": Field("num_attention_heads"),
        "max_seq": Field("max_position_embeddings", 2048),
        "tied_embeddings": Field("tie_word_embeddings", True),
    },
    tensors={
        "embedding": ("model.decoder.embed_tokens.weight", "vocab embed"),
        "positions": ("model.decoder.embed_positions.weight", "positions embed"),
        **_norm("layers/attention/norm", _LAYER + "self_attn_layer_norm"),
        **_linear("attention/wq", "self_attn.q_proj", "(heads head_dim) embed", "(heads head_dim)"),
        **_linear(
            "attention/wk", "self_attn.k_proj", "(kv_heads head_dim) embed", "(kv_heads head_dim)"
        ),
        **_linear(
            "attention/wv", "self_attn.v_proj", "(kv_heads head_dim) embed", "(kv_heads head_dim)"
        ),
        **_linear("attention/wo", "self_attn.out_proj", "embed (heads head_dim)", "norm"),
        **_norm("layers/mlp/norm", _LAYER + "final_layer_norm"),
        **_linear("mlp/up", "fc1", "mlp embed", "mlp"),
        **_linear("mlp/down", "fc2", "embed mlp", "norm"),
        **_norm("norm", "model.decoder.final_layer_norm"),
        "output": ("lm_head.weight", "vocab embed"),
    },
    parts=(ONE_KEY_EACH, activation("activation_function", "relu"), _WIDTH),
    fixed={
        "learned_positions": True,
        "position_offset": 2,
        "rope": None,
        "norm": "layer",
        "norm_bias": True,
        "norm_eps": 1e-5,
        "qkv_bias": True,
        "output_bias": True,
        "gated": False,
        "mlp_bias": True,
    },
    only={
        "do_layer_norm_before": (True,),
        "enable_bias": (True,),
        "layer_norm_elementwise_affine": (True,),
        "_remove_final_layer_norm": (False,),
    },
    unused=frozenset({"activation_dropout", "dropout", "layerdrop", "init_std"}),
    prefix="model.",
)
