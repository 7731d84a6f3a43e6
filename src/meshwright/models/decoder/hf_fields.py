"""Which fields of a Hugging Face config.json the decoder honours, and which do not matter to it.

A field in none of these lists is an error: weights trained with it would give other logits here.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from meshwright.errors import MeshwrightError, did_you_mean

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

SPECIAL_TOKENS = frozenset({"bos_token_id", "eos_token_id", "pad_token_id"})
SOURCE = "_name_or_path"  # the folder a config.json was read from; not written again

# what a training run of ours, a tokenizer or a sampler decides, or what only says how to compute
HARMLESS = SPECIAL_TOKENS | frozenset(
    {
        "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", SOURCE,
        "attn_implementation", "cls_token_id", "decoder_start_token_id", "dtype",
        "finetuning_task", "id2label", "is_decoder", "label2id", "max_sequence_length",
        "name_or_path", "num_labels", "output_attentions", "output_hidden_states", "prefix",
        "problem_type", "return_dict", "sep_token_id", "task_specific_params", "tf_legacy_loss",
        "tokenizer_class", "torch_dtype", "torchscript", "transformers.js_config",
        "transformers_version", "unk_token_id", "unsloth_fixed", "unsloth_version",
        "use_bfloat16", "use_cache",
        # first values of weights: not needed where weights are read; ours are in arrays.py
        "initializer_range",
        # matmuls cut in pieces, with the same sum
        "pretraining_tp",
        # sampling, from before generation_config.json
        "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample",
        "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty",
        "forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length",
        "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
        "num_return_sequences", "output_scores", "remove_invalid_values", "repetition_penalty",
        "return_dict_in_generate", "suppress_tokens", "temperature", "top_k", "top_p",
        "typical_p",
    }
)  # fmt: skip

_WHAT_TO_DO = {
    "quantization_config": "the weights are quantized: take the bfloat16 or float16 model",
    "attention_dropout": "dropout is not applied to attention: set it to 0 to train without",
    "mlp_bias": "the feed-forward has no biases here",
}


def check_fields(fields: Mapping[str, Any], where: str) -> None:
    """An error for each field that is not honoured, all in one message."""
    known = HONOURED | HARMLESS | ONLY.keys()
    problems = []
    for field, value in fields.items():
        if field not in known:
            hint = did_you_mean(field, HONOURED)
            close = hint if "did you mean" in hint else ""
            problems.append(f"{field}={short(value)} is not a field this model honours{close}")
        elif field in ONLY and not any(value == allowed for allowed in ONLY[field]):
            allowed = " or ".join(repr(value) for value in ONLY[field])
            problem = f"{field}={short(value)} is not honoured, only {allowed}"
            what = _WHAT_TO_DO.get(field)
            problems.append(problem if what is None else f"{problem} ({what})")
    if problems:
        raise MeshwrightError(
            f"{where}: {'; '.join(problems)}. If the model's logits do not depend on it, remove it "
            "from config.json"
        )


def short(value: Any) -> str:
    """A value, cut to what fits in a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def whole(fields: Mapping[str, Any], name: str, where: str, default: int | None = None) -> int:
    """A whole number from 1; absent or null is the default, and without one an error."""
    value = fields.get(name)
    if value is None:
        if default is None:
            raise MeshwrightError(f"{where}: {name} is missing; it must be a whole number from 1")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise MeshwrightError(f"{where}: {name}={short(value)} must be a whole number from 1")
    return value


def number(fields: Mapping[str, Any], name: str, where: str, default: float | None = None) -> float:
    """A number above 0; absent or null is the default, and without one an error."""
    value = fields.get(name)
    if value is None:
        if default is None:
            raise MeshwrightError(f"{where}: {name} is missing; it must be a number above 0")
        return default
    # 1e30: what is larger is a mistake, and would not survive as a float32
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < 1e30:
        raise MeshwrightError(f"{where}: {name}={short(value)} must be a number above 0")
    return float(value)


def flag(fields: Mapping[str, Any], name: str, where: str, default: bool) -> bool:
    """true or false; absent or null is the default."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise MeshwrightError(f"{where}: {name}={short(value)} must be true or false")
    return value
