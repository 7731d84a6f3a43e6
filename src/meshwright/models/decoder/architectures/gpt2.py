"""GPT-2: learned positions, LayerNorm, biases; matrices with their input dim first."""

from typing import Any

from meshwright.models.decoder.architecture import Architecture, Field, Fields, Part
from meshwright.models.decoder.config import DecoderConfig
from meshwright.models.decoder.hf_parts import ONE_KEY_EACH, activation
from meshwright.models.huggingface import whole


def _inner(fields: Fields, ours: Fields, where: str) -> dict[str, Any]:
    return {"mlp": whole(fields, "n_inner", where, 4 * ours["embed"])}


def _write_inner(config: DecoderConfig) -> dict[str, Any]:
    return {"n_inner": config.mlp, "n_ctx": config.max_seq}


# the width of the mlp; n_ctx, of older files, is the length
INNER = Part(frozenset({"n_inner", "n_ctx"}), _inner, _write_inner)

_LAYER = "transformer.h.{layer}."
_QKV = (_LAYER + "attn.c_attn.weight", "embed (parts head_dim)")
_QKV_BIAS = (_LAYER + "attn.c_attn.bias", "(parts head_dim)")

GPT2 = Architecture(
    "GPT2LMHeadModel",
    "gpt2",
    fields={
        "vocab": Field("vocab_size"),
        "embed": Field("n_embd"),
        "layers": Field("n_layer"),
        "heads": Field("n_head"),
        "max_seq": Field("n_positions", 1024),
        "norm_eps": Field("layer_norm_epsilon", 1e-5),
        "tied_embeddings": Field("tie_word_embeddings", True),
    },
    tensors={
        "embedding": ("transformer.wte.weight", "vocab embed"),
        "positions": ("transformer.wpe.weight", "positions embed"),
        "layers/attention/norm": (_LAYER + "ln_1.weight", "norm"),
        "layers/attention/norm_bias": (_LAYER + "ln_1.bias", "norm"),
        "layers/attention/wq": _QKV,
        "layers/attention/wk": _QKV,
        "layers/attention/wv": _QKV,
        "layers/attention/bq": _QKV_BIAS,
        "layers/attention/bk": _QKV_BIAS,
        "layers/attention/bv": _QKV_BIAS,
        "layers/attention/wo": (_LAYER + "attn.c_proj.weight", "(heads head_dim) embed"),
        "layers/attention/bo": (_LAYER + "attn.c_proj.bias", "norm"),
        "layers/mlp/norm": (_LAYER + "ln_2.weight", "norm"),
        "layers/mlp/norm_bias": (_LAYER + "ln_2.bias", "norm"),
        "layers/mlp/up": (_LAYER + "mlp.c_fc.weight", "embed mlp"),
        "layers/mlp/up_bias": (_LAYER + "mlp.c_fc.bias", "mlp"),
        "layers/mlp/down": (_LAYER + "mlp.c_proj.weight", "mlp embed"),
        "layers/mlp/down_bias": (_LAYER + "mlp.c_proj.bias", "norm"),
        "norm": ("transformer.ln_f.weight", "norm"),
        "norm_bias": ("transformer.ln_f.bias", "norm"),
        "output": ("lm_head.weight", "vocab embed"),
    },
    parts=(
        INNER,
        ONE_KEY_EACH,
        activation("activation_function", "gelu_new"),
    ),
    fixed={
        "learned_positions": True,
        "rope": None,
        "norm": "layer",
        "norm_bias": True,
        "qkv_bias": True,
        "output_bias": True,
        "gated": False,
        "mlp_bias": True,
    },
    only={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),  # the order of roundings alone
    },
    unused=frozenset(
        {
            "attn_pdrop",
            "embd_pdrop",
            "resid_pdrop",
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
        }
    ),
    prefix="transformer.",
    ignored=(".attn.bias", ".attn.masked_bias"),
)
