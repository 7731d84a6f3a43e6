"""Llama, and the tables that the architectures after it share."""

from meshwright.models.decoder.architecture import Architecture, Field
from meshwright.models.decoder.hf_parts import OPTIONAL_BIAS, ROPE, heads, no_window

FIELDS = {
    "vocab": Field("vocab_size"),
    "embed": Field("hidden_size"),
    "mlp": Field("intermediate_size"),
    "layers": Field("num_hidden_layers"),
    "heads": Field("num_attention_heads"),
    "max_seq": Field("max_position_embeddings", 2048),
    "norm_eps": Field("rms_norm_eps", 1e-6),
    "tied_embeddings": Field("tie_word_embeddings", False),
}
WRITTEN = {"hidden_act": "silu", "attention_dropout": 0.0}
ONLY = {"hidden_act": ("silu", "swish"), "mlp_bias": (False,)}

_LAYER = "model.layers.{layer}."
TENSORS = {
    "embedding": ("model.embed_tokens.weight", "vocab embed"),
    "layers/attention/norm": (_LAYER + "input_layernorm.weight", "norm"),
    "layers/attention/wq": (_LAYER + "self_attn.q_proj.weight", "(heads head_dim) embed"),
    "layers/attention/wk": (_LAYER + "self_attn.k_proj.weight", "(kv_heads head_dim) embed"),
    "layers/attention/wv": (_LAYER + "self_attn.v_proj.weight", "(kv_heads head_dim) embed"),
    "layers/attention/wo": (_LAYER + "self_attn.o_proj.weight", "embed (heads head_dim)"),
    "layers/attention/bq": (_LAYER + "self_attn.q_proj.bias", "(heads head_dim)"),
    "layers/attention/bk": (_LAYER + "self_attn.k_proj.bias", "(kv_heads head_dim)"),
    "layers/attention/bv": (_LAYER + "self_attn.v_proj.bias", "(kv_heads head_dim)"),
    "layers/attention/bo": (_LAYER + "self_attn.o_proj.bias", "norm"),
    "layers/attention/q_norm": (_LAYER + "self_attn.q_norm.weight", "head_dim"),
    "layers/attention/k_norm": (_LAYER + "self_attn.k_norm.weight", "head_dim"),
    "layers/mlp/norm": (_LAYER + "post_attention_layernorm.weight", "norm"),
    "layers/mlp/gate": (_LAYER + "mlp.gate_proj.weight", "mlp embed"),
    "layers/mlp/up": (_LAYER + "mlp.up_proj.weight", "mlp embed"),
    "layers/mlp/down": (_LAYER + "mlp.down_proj.weight", "embed mlp"),
    "norm": ("model.norm.weight", "norm"),
    "output": ("lm_head.weight", "vocab embed"),
}

LLAMA = Architecture(
    "LlamaForCausalLM",
    "llama",
    FIELDS,
    TENSORS,
    parts=(
        heads(kv_heads_may_be_absent=True),
        ROPE,
        OPTIONAL_BIAS,
        no_window("LlamaForCausalLM"),
    ),
    written=WRITTEN,
    only=ONLY,
    suits=lambda config: config.embed % config.heads == 0,
)
