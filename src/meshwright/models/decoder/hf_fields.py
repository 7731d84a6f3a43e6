"""Which fields of a Hugging Face config.json the decoder honours."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from meshwright.models.huggingface import KnownFields

HONOURED = frozenset(
    {
        "architectures", "attention_bias", "head_dim", "hidden_size", "intermediate_size",
        "layer_types", "max_position_embeddings", "max_window_layers", "model_type",
        "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
        "original_max_position_embeddings", "rms_norm_eps", "rope_parameters", "rope_scaling",
        "rope_theta", "sliding_window", "tie_word_embeddings", "use_sliding_window", "vocab_size",
    }
)  # fmt: skip

# honoured, but only with these values
ONLY: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "add_cross_attention": (False,),
        "attention_dropout": (0, None),
        "chunk_size_feed_forward": (0,),
        "cross_attention_hidden_size": (None,),
        "hidden_act": ("silu", "swish"),
        "is_encoder_decoder": (False,),
        "is_llama_config": (True,),
        "mlp_bias": (False,),
        "partial_rotary_factor": (1, None),
        "per_layer_config": (None, {}),
        "pruned_heads": (None, {}),
        "quantization_config": (None,),
        "rope_interleaved": (False,),
        "tie_encoder_decoder": (False,),
        "use_mrope": (False,),
    }
)

_WHAT_TO_DO = {
    "quantization_config": "the weights are quantized: take the bfloat16 or float16 model",
    "attention_dropout": "dropout is not applied to attention: set it to 0 to train without",
    "mlp_bias": "the feed-forward has no biases here",
}

KNOWN = KnownFields(HONOURED, ONLY, _WHAT_TO_DO)
