"""What a Hugging Face architecture is: a table of fields of config.json and of tensor names.

Most fields are one of ours under another name (`Field`). A `Part` is of several fields that say one
thing together, such as rotary embedding. Both are read and written.
"""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from meshwright.models.decoder.config import DecoderConfig
from meshwright.models.decoder.kinds import field_types
from meshwright.models.huggingface import HARMLESS, QUANTIZED, KnownFields, flag, number, whole
from meshwright.models.overrides import plain_type

Fields = Mapping[str, Any]
_TYPES = field_types() | {field.name: field.type for field in dataclasses.fields(DecoderConfig)}
_READ: Mapping[Any, Callable[..., Any]] = {int: whole, float: number, bool: flag}

# honoured, but only with these values, by every architecture
ONLY: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "add_cross_attention": (False,),
        "attention_dropout": (0, None),
        "chunk_size_feed_forward": (0,),
        "cross_attention_hidden_size": (None,),
        "is_encoder_decoder": (False,),
        "is_llama_config": (True,),
        "per_layer_config": (None, {}),
        "pruned_heads": (None, {}),
        "quantization_config": (None,),
        "rope_interleaved": (False,),
        "tie_encoder_decoder": (False,),
        "use_mrope": (False,),
    }
)
_WHAT_TO_DO = {
    "quantization_config": QUANTIZED,
    "attention_dropout": "dropout is not applied to attention: set it to 0 to train without",
    "mlp_bias": "the feed-forward has no biases here",
}


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of config.json, and what transformers takes where it is not said; None: required."""

    name: str
    default: Any = None

    def read(self, ours: str, fields: Fields, where: str) -> Any:
        """The value; of a type that our field of that name has."""
        return _READ[plain_type(_TYPES[ours])](fields, self.name, where, self.default)


@dataclasses.dataclass(frozen=True)
class Part:
    """Fields of config.json that say one thing together."""

    names: frozenset[str]
    read: Callable[[Fields, Fields, str], dict[str, Any]]
    """(fields, our values so far, the file) → values by our names."""
    write: Callable[[DecoderConfig], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Architecture:
    name: str
    model_type: str
    fields: Mapping[str, Field]  # by our names
    tensors: Mapping[str, tuple[str, str]]
    """By our paths: their name, with {layer}, and its dims; those in brackets are one dim there."""
    parts: tuple[Part, ...] = ()
    fixed: Fields = dataclasses.field(default_factory=dict)
    """What every model of it has, by our names."""
    written: Fields = dataclasses.field(default_factory=dict)
    """Fields of config.json that every model of it has."""
    only: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    """Fields that are honoured with these values alone, beside ONLY."""
    suits: Callable[[DecoderConfig], bool] = lambda config: True
    """Whether transformers accepts such a model of this architecture."""
    unused: frozenset[str] = frozenset()
    """Fields that say nothing of the logits, such as dropout in training."""
    prefix: str = ""
    """Of all tensor names but the LM head's, which some published files leave out."""
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    """Endings of names of tensors that say nothing, in older files."""
    beyond: str = ""
    """How names of tensors of layers after the last begin, which predict further tokens."""

    @property
    def known(self) -> KnownFields:
        named = {field.name for field in self.fields.values()}
        honoured = named.union(
            {"architectures", "model_type"}, *(part.names for part in self.parts)
        )
        only = {name: ONLY[name] for name in ONLY.keys() - self.unused} | dict(self.only)
        return KnownFields(frozenset(honoured), only, _WHAT_TO_DO, HARMLESS | self.unused)

    def read(self, fields: Fields, where: str) -> dict[str, Any]:
        """The values of a config, by our names."""
        values = {ours: field.read(ours, fields, where) for ours, field in self.fields.items()}
        values |= self.fixed
        for part in self.parts:
            values |= part.read(fields, values, where)
        return values

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        """The fields of config.json; read again, they may say less than the config."""
        fields: dict[str, Any] = {"architectures": [self.name], "model_type": self.model_type}
        fields |= {field.name: getattr(config, ours) for ours, field in self.fields.items()}
        fields |= self.written
        for part in self.parts:
            fields |= part.write(config)
        # null: else transformers takes Llama 2's 1 and 2
        return fields | {"bos_token_id": None, "eos_token_id": None}
