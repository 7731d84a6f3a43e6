"""GPT-NeoX and Pythia: attention and mlp in parallel, q, k and v of each head side by side."""

from meshwright.models.decoder.architecture import Architecture, Field
from meshwright.models.decoder.hf_parts import ONE_KEY_EACH, activation, optional_bias, rotary

_LAYER = "gpt_neox.layers.{layer}."
_QKV = _LAYER + "attention.query_key_value."


def _norm(ours: str, theirs: str) -> dict[str, tuple[str, str]]:
    return {ours: (f"{theirs}.weight", "norm"), f"{ours}_bias": (f"{theirs}.bias", "norm")}


GPT_NEOX = Architecture(
    "GPTNeoXForCausalLM",
    "gpt_neox",
    fields={
        "vocab": Field("vocab_size"),
        "embed": Field("hidden_size"),
        "mlp": Field("intermediate_size"),
        "layers": Field("num_hidden_layers"),
        "heads": Field("num_attention_heads"),
        "max_seq": Field("max_position_embeddings", 2048),
        "norm_eps": Field("layer_norm_eps", 1e-5),
        "tied_embeddings": Field("tie_word_embeddings", False),
        "parallel": Field("use_parallel_residual", True),
    },
    tensors={
        "embedding": ("gpt_neox.embed_in.weight", "vocab embed"),
        **_norm("layers/attention/norm", _LAYER + "input_layernorm"),
        "layers/attention/wq": (_QKV + "weight", "(heads parts head_dim) embed"),
        "layers/attention/wk": (_QKV + "weight", "(kv_heads parts head_dim) embed"),
        "layers/attention/wv": (_QKV + "weight", "(kv_heads parts head_dim) embed"),
        "layers/attention/bq": (_QKV + "bias", "(heads parts head_dim)"),
        "layers/attention/bk": (_QKV + "bias", "(kv_heads parts head_dim)"),
        "layers/attention/bv": (_QKV + "bias", "(kv_heads parts head_dim)"),
        "layers/attention/wo": (_LAYER + "attention.dense.weight", "embed (heads head_dim)"),
        "layers/attention/bo": (_LAYER + "attention.dense.bias", "norm"),
        **_norm("layers/mlp/norm", _LAYER + "post_attention_layernorm"),
        "layers/mlp/up": (_LAYER + "mlp.dense_h_to_4h.weight", "mlp embed"),
        "layers/mlp/up_bias": (_LAYER + "mlp.dense_h_to_4h.bias", "mlp"),
        "layers/mlp/down": (_LAYER + "mlp.dense_4h_to_h.weight", "embed mlp"),
        "layers/mlp/down_bias": (_LAYER + "mlp.dense_4h_to_h.bias", "norm"),
        **_norm("norm", "gpt_neox.final_layer_norm"),
        "output": ("embed_out.weight", "vocab embed"),
    },
    parts=(
        ONE_KEY_EACH,
        rotary(partial=True, share=0.25, names=("rotary_emb_base", "rotary_pct")),
        optional_bias(default=True),
        activation("hidden_act", "gelu"),
    ),
    fixed={"norm": "layer", "norm_bias": True, "gated": False, "mlp_bias": True},
    unused=frozenset({"classifier_dropout", "hidden_dropout"}),
    ignored=(".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq"),
)
