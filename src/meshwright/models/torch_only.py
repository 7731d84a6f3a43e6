"""Decoders whose network the PyTorch backend takes from transformers: a config, nothing of JAX."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError, UnsupportedModelError
from meshwright.models.family import HuggingFace, ModelFamily
from meshwright.models.huggingface import (
    QUANTIZED,
    SOURCE,
    KnownFields,
    check_fields,
    read_hf_config,
    remembered,
    whole,
)

# by model_type: those that JAX lacks
MODEL_TYPES = ("cohere", "gemma", "glm4", "phi", "starcoder2")
# and those that JAX has too, but that make their masks themselves in PyTorch; the losses of all are
# compared with transformers' own in the tests
BY_TRANSFORMERS = (
    *MODEL_TYPES, "gemma2", "gemma3_text", "gpt_neox", "granite", "olmo2", "phi3", "smollm3",
)  # fmt: skip
# fields that say nothing of the network
_OTHER = {"architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", SOURCE}


@dataclasses.dataclass(frozen=True)
class TransformersConfig:
    """A model by the fields of its config.json, which transformers interprets."""

    model_type: str
    fields: Mapping[str, Any]
    vocab: int
    max_seq: int
    heads: int
    kv_heads: int
    head_dim: int
    hf_config: Mapping[str, Any] | None = dataclasses.field(default=None, compare=False)
    sliding_window: None = None  # transformers makes the masks of its windows itself


def read_config(source: str | os.PathLike[str] | Mapping[str, Any]) -> TransformersConfig:
    """The model that a config.json (its path, its folder's or its content) describes."""
    fields, where = read_hf_config(source)
    kind = fields.get("model_type")
    if kind not in BY_TRANSFORMERS:
        raise UnsupportedModelError(
            f"{where}: model_type {kind!r}; of transformers' networks --backend torch trains "
            f"{', '.join(BY_TRANSFORMERS)}"
        )
    known = KnownFields(
        frozenset(fields), {"quantization_config": (None,)}, {"quantization_config": QUANTIZED}
    )
    check_fields(fields, known, where)
    heads = whole(fields, "num_attention_heads", where)
    width = whole(fields, "hidden_size", where) // heads
    return TransformersConfig(
        model_type=kind,
        fields={name: value for name, value in fields.items() if name not in _OTHER},
        vocab=whole(fields, "vocab_size", where),
        max_seq=whole(fields, "max_position_embeddings", where),
        heads=heads,
        kv_heads=fields.get("num_key_value_heads") or heads,
        head_dim=fields.get("head_dim") or width,
        hf_config=remembered(fields, None if isinstance(source, Mapping) else Path(where)),
    )


def _override(config: TransformersConfig, changes: Mapping[str, str], seq: int) -> Any:
    if changes:
        raise MeshwrightError(
            f"--override {next(iter(changes))}=… is for models that JAX has; for "
            f"{config.model_type} models change config.json"
        )
    return config


def _to_dict(config: TransformersConfig) -> dict[str, Any]:
    return {f"config.{name}": value for name, value in sorted(config.fields.items())}


def _from_dict(data: Mapping[str, Any]) -> TransformersConfig:
    return read_config({name.removeprefix("config."): value for name, value in data.items()})


def _refuse(*_: Any, **__: Any) -> Any:
    raise MeshwrightError(
        f"JAX has no forward pass for {', '.join(MODEL_TYPES)} models: train them with --backend "
        "torch, and read the weights of a run with mw.torch.Checkpoints and mw.torch.save_hf"
    )


def is_torch_only(config: Any) -> bool:
    """Whether transformers computes a model, with its own masks, and PyTorch alone trains it."""
    return isinstance(config, TransformersConfig)


TORCH_ONLY = ModelFamily(
    name="transformers",
    config=TransformersConfig,
    presets={},
    arrays=_refuse,
    rules=_refuse,
    t5x_rules=_refuse,
    batch_fields=("tokens", "targets", "segments", "positions"),
    objectives=("next-token",),
    loss=_refuse,
    forward=_refuse,
    lm_head=_refuse,
    sequence_split=_refuse,
    remat={},
    work=_refuse,
    flops=_refuse,
    split_dims={},
    override=_override,
    to_dict=_to_dict,
    from_dict=_from_dict,
    hugging_face=HuggingFace(
        architectures={},
        read_config=read_config,
        write_config=lambda config: dict(config.fields),
        model=_refuse,
    ),
)
