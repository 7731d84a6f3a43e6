"""A decoder's Hugging Face folder, read and written: their names and dims beside ours.

Both rotate pair i of a head as (x[i], x[i + head_dim / 2]): rotary embedding needs no reordering.
"""

from meshwright.models.decoder.arrays import abstract_arrays
from meshwright.models.decoder.config import DecoderConfig
from meshwright.models.decoder.hf_config import to_hf_config
from meshwright.models.huggingface import SOURCE, HfModel, hf_arrays

_LAYER = "model.layers.{layer}."
# ours: theirs, and its dims; those in brackets are one dim there
NAMES = {
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


def hf_model(config: DecoderConfig) -> HfModel:
    """What a folder of this config holds."""
    specs = abstract_arrays(config)
    tied = {"lm_head.weight": "model.embed_tokens.weight"} if config.tied_embeddings else {}
    return HfModel(
        specs=specs,
        arrays=hf_arrays(specs, NAMES),
        write_config=lambda dtype: to_hf_config(config, dtype=dtype),
        source=(config.hf_config or {}).get(SOURCE),
        copies=tied,
        ignored=("rotary_emb.inv_freq",),  # of older files; they follow from the config
    )
