"""A T5's Hugging Face config.json in and out.

Whether the LM head is the embedding, and whether hidden states are scaled before it, was one field
until transformers 5: `tie_word_embeddings`. From then on that is always true, the scaling is
`scale_decoder_outputs`, and a head of its own is one that the files hold.

>>> fields = to_hf_config(T5Config(384, 2, 2, 128, 8, 16, 256))
>>> fields["architectures"], fields["feed_forward_proj"], fields["tie_word_embeddings"]
(['T5ForConditionalGeneration'], 'relu', True)
>>> from_hf_config(fields).embed
128
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.models.huggingface import (
    HARMLESS,
    SOURCE,
    KnownFields,
    check_fields,
    flag,
    has_tensor,
    number,
    read_hf_config,
    remembered,
    short,
    whole,
)
from meshwright.models.t5.config import T5Config

ARCHITECTURE, MODEL_TYPE = "T5ForConditionalGeneration", "t5"
HEAD = "lm_head.weight"
# theirs to the activation and whether it is gated; gelu is computed with tanh
_PROJECTIONS = {
    "relu": ("relu", False),
    "gated-gelu": ("gelu", True),
    "gated-silu": ("silu", True),
    "gated-relu": ("relu", True),
    "silu": ("silu", False),
    "gelu_new": ("gelu", False),
    "gated-gelu_new": ("gelu", True),
}
_KNOWN = KnownFields(
    honoured=frozenset({
        "architectures", "d_ff", "d_kv", "d_model", "decoder_start_token_id", "feed_forward_proj",
        "layer_norm_epsilon", "model_type", "n_positions", "num_decoder_layers", "num_heads",
        "num_layers", "pad_token_id", "relative_attention_max_distance",
        "relative_attention_num_buckets", "scale_decoder_outputs", "tie_word_embeddings",
        "vocab_size",
    }),
    only=MappingProxyType({
        "add_cross_attention": (False,),
        "chunk_size_feed_forward": (0,),
        "cross_attention_hidden_size": (None,),
        "is_decoder": (False,),
        "is_encoder_decoder": (True,),
        "pruned_heads": (None, {}),
        "quantization_config": (None,),
        "tie_encoder_decoder": (False,),
    }),
    what_to_do=MappingProxyType({
        "quantization_config": "the weights are quantized: take the bfloat16 or float32 model",
    }),
    # dropout: of training, which has none here; the next two follow from feed_forward_proj
    harmless=(HARMLESS - {"decoder_start_token_id", "is_decoder", "pad_token_id"}) | {
        "classifier_dropout", "dropout_rate", "dense_act_fn", "is_gated_act", "initializer_factor",
        "output_past", "gradient_checkpointing",
    },
)  # fmt: skip


def from_hf_config(source: str | os.PathLike[str] | Mapping[str, Any]) -> T5Config:
    """The model that a config.json (its path, its folder's or its content) describes.

    A field that would change the logits and is not honoured is an error. The result remembers the
    fields, and the folder they are from, for `to_hf_config` and `save_hf`.
    """
    fields, where = read_hf_config(source)
    if isinstance(source, Mapping):
        return _read(fields, where)
    folder = Path(where).parent
    config = _read(fields, where, has_tensor(folder, HEAD))
    return dataclasses.replace(config, hf_config=remembered(fields, Path(where)))


def to_hf_config(config: T5Config, *, dtype: str | None = None) -> dict[str, Any]:
    """The config.json of a model, with every field of the one it was read from that still holds.

    `dtype` is that of the weights, by default the source's.
    """
    source = {name: value for name, value in (config.hf_config or {}).items() if name != SOURCE}
    if not _is_read_as(config, source):
        source = _fields(config) | {
            name: value for name, value in source.items() if name in _KNOWN.harmless
        }
    spellings = [name for name in ("dtype", "torch_dtype") if name in source] or ["torch_dtype"]
    for spelling in spellings:
        source[spelling] = dtype or source.get(spelling) or "bfloat16"
    if not _is_read_as(config, source):
        raise MeshwrightError(f"a config.json of {ARCHITECTURE} cannot say {config}")
    return source


def _read(fields: Mapping[str, Any], where: str, has_head: bool | None = None) -> T5Config:
    """`has_head`: whether the files hold an LM head; None where there are no files."""
    named, model_type = fields.get("architectures") or [ARCHITECTURE], fields.get("model_type")
    if named != [ARCHITECTURE] or model_type not in (None, MODEL_TYPE):
        raise MeshwrightError(
            f"{where}: architectures {short(named)} and model_type {short(model_type)}; supported "
            f"are {ARCHITECTURE} and {MODEL_TYPE}"
        )
    check_fields(fields, _KNOWN, where)
    tied = flag(fields, "tie_word_embeddings", where, True)
    scaled = tied
    if fields.get("scale_decoder_outputs") is not None:  # written by transformers 5
        scaled = flag(fields, "scale_decoder_outputs", where, True)
        tied = scaled if has_head is None else not has_head
    projection = fields.get("feed_forward_proj", "relu")
    if not isinstance(projection, str) or projection not in _PROJECTIONS:
        raise MeshwrightError(
            f"{where}: feed_forward_proj={short(projection)} is not supported; "
            f"{', '.join(_PROJECTIONS)} are"
        )
    activation, gated = _PROJECTIONS[projection]
    layers = whole(fields, "num_layers", where)
    try:
        return T5Config(
            vocab=whole(fields, "vocab_size", where),
            encoder_layers=layers,
            decoder_layers=whole(fields, "num_decoder_layers", where, layers),
            embed=whole(fields, "d_model", where),
            heads=whole(fields, "num_heads", where),
            head_dim=whole(fields, "d_kv", where),
            mlp=whole(fields, "d_ff", where),
            activation=activation,
            gated=gated,
            tied_embeddings=tied,
            scaled_output=scaled,
            buckets=whole(fields, "relative_attention_num_buckets", where, 32),
            max_distance=whole(fields, "relative_attention_max_distance", where, 128),
            norm_eps=number(fields, "layer_norm_epsilon", where, 1e-6),
            max_seq=whole(fields, "n_positions", where, 512),
            start_token=_start_token(fields, where),
            hf_config=remembered(fields, None),
        )
    except MeshwrightError as error:
        text = str(error)
        raise MeshwrightError(text if text.startswith(where) else f"{where}: {text}") from None


def _start_token(fields: Mapping[str, Any], where: str) -> int:
    """The token the decoder begins with: T5's is that of padding."""
    for name in ("decoder_start_token_id", "pad_token_id"):
        token = fields.get(name)
        if token is None:
            continue
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise MeshwrightError(f"{where}: {name}={short(token)} must be a token's number")
        return token
    return 0


def _is_read_as(config: T5Config, fields: Mapping[str, Any]) -> bool:
    try:
        return _read(fields, "config", not config.tied_embeddings) == config
    except MeshwrightError:
        return False


def _fields(config: T5Config) -> dict[str, Any]:
    projections = {value: name for name, value in reversed(_PROJECTIONS.items())}
    tied, scaled = config.tied_embeddings, config.scaled_output
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "is_encoder_decoder": True,
        "vocab_size": config.vocab,
        "d_model": config.embed,
        "d_kv": config.head_dim,
        "d_ff": config.mlp,
        "num_layers": config.encoder_layers,
        "num_decoder_layers": config.decoder_layers,
        "num_heads": config.heads,
        "feed_forward_proj": projections[config.activation, config.gated],
        "relative_attention_num_buckets": config.buckets,
        "relative_attention_max_distance": config.max_distance,
        "layer_norm_epsilon": config.norm_eps,
        "n_positions": config.max_seq,
        "dropout_rate": 0.0,
        "decoder_start_token_id": config.start_token,
        "pad_token_id": config.start_token,
        "eos_token_id": 1,
        # all versions of transformers read the one field; only 5 knows the two apart
        **(
            {"tie_word_embeddings": tied}
            if tied == scaled
            else {"tie_word_embeddings": True, "scale_decoder_outputs": scaled}
        ),
    }
