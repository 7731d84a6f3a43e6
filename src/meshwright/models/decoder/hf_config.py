"""A Hugging Face config.json in and out.

>>> fields = to_hf_config(DecoderConfig(320, 4, 128, 8, 4, 16, 512))
>>> fields["architectures"], fields["hidden_size"]
(['LlamaForCausalLM'], 128)
>>> from_hf_config(fields).embed
128
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.models.decoder.architecture import Architecture
from meshwright.models.decoder.architectures import ARCHITECTURES
from meshwright.models.decoder.config import DecoderConfig
from meshwright.models.decoder.kinds import field_of, field_types
from meshwright.models.huggingface import (
    HARMLESS,
    SOURCE,
    check_fields,
    read_hf_config,
    remembered,
    short,
)


def from_hf_config(source: str | os.PathLike[str] | Mapping[str, Any]) -> DecoderConfig:
    """The model that a config.json (its path, its folder's or its content) describes.

    A field that would change the logits and is not honoured is an error. The result remembers the
    fields, and the folder they are from, for `to_hf_config` and `save_hf`.
    """
    fields, where = read_hf_config(source)
    architecture = named_architecture(fields, where)
    check_fields(fields, architecture.known, where)
    file = None if isinstance(source, Mapping) else Path(where)
    try:
        values = architecture.read(fields, where)
        return DecoderConfig(**values, hf_config=remembered(fields, file))
    except MeshwrightError as error:
        text = str(error)
        raise MeshwrightError(text if text.startswith(where) else f"{where}: {text}") from None


def to_hf_config(
    config: DecoderConfig,
    *,
    dtype: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The config.json of a model, with every field of the one it was read from that still holds.

    The architecture is that of the source, or else one that has the model's features. `dtype` is
    that of the weights, by default the source's. `extra` are fields to add that the model does not
    depend on: `{"bos_token_id": 1, "eos_token_id": 2}`.
    """
    extra = dict(extra or {})
    for name in extra:
        if name not in HARMLESS:
            raise MeshwrightError(
                f"extra field {name!r} could change the model, or is unknown; only fields such as "
                f"bos_token_id, eos_token_id and initializer_range can be added"
                f"{did_you_mean(name, HARMLESS)}"
            )
    # weights are written as numbers, whatever they were read from
    dropped = (SOURCE, "quantization_config")
    source = {
        name: value for name, value in (config.hf_config or {}).items() if name not in dropped
    }
    if _is_read_as(config, source):
        fields = source
    else:
        fields = architecture_of(config).write(config)
        fields |= {name: source[name] for name in source if name in HARMLESS}
    for spelling in [name for name in ("dtype", "torch_dtype") if name in fields] or [
        "torch_dtype"
    ]:
        fields[spelling] = dtype or fields.get(spelling) or "bfloat16"
    fields |= extra
    again = from_hf_config(fields)
    if again != config:
        lost = [
            f"{field.name}={getattr(config, field.name)!r}"
            for field in dataclasses.fields(config)
            if field.compare and getattr(config, field.name) != getattr(again, field.name)
        ]
        raise MeshwrightError(f"a config.json of {fields['architectures'][0]} cannot say {lost}")
    return fields


def unsaid(config: DecoderConfig, changed: DecoderConfig) -> str:
    """The architecture of a config, if it cannot say the config with changes; else empty."""
    try:
        architecture = architecture_of(config)
    except MeshwrightError:  # it has no folders to read or write
        return ""
    return "" if _can_say(architecture, changed) else architecture.name


def _can_say(architecture: Architecture, config: DecoderConfig) -> bool:
    try:
        return _is_read_as(config, architecture.write(config))
    except MeshwrightError:  # layers differ in what the architecture says once
        return False


def _is_read_as(config: DecoderConfig, fields: Mapping[str, Any]) -> bool:
    try:
        return from_hf_config(fields) == config
    except MeshwrightError:
        return False


def named_architecture(fields: Mapping[str, Any], where: str) -> Architecture:
    """The architecture by `architectures`, or by `model_type` where that is silent."""
    by_name = {one.name: one for one in ARCHITECTURES}
    by_type = {one.model_type: one for one in ARCHITECTURES}
    supported = f"supported are {', '.join(by_name)}"
    named, model_type = fields.get("architectures"), fields.get("model_type")
    if named is None or named == []:
        if model_type is None:
            raise MeshwrightError(f"{where}: architectures is missing; {supported}")
        if not isinstance(model_type, str) or model_type not in by_type:
            raise MeshwrightError(f"{where}: model_type {short(model_type)}; {supported}")
        return by_type[model_type]
    if not isinstance(named, list) or len(named) != 1 or named[0] not in list(by_name):
        raise MeshwrightError(f"{where}: architectures {short(named)}; {supported}")
    architecture = by_name[named[0]]
    if model_type is not None and model_type != architecture.model_type:
        raise MeshwrightError(
            f"{where}: architectures {short(named)} and model_type {short(model_type)} disagree; "
            f"its model_type is {architecture.model_type!r}"
        )
    return architecture


def architecture_of(config: DecoderConfig) -> Architecture:
    """The architecture that the config was read from, or the first that can say the config."""
    source = config.hf_config or {}
    first = []
    if source.get("architectures") or source.get("model_type"):
        first = [named_architecture(source, "config")]
    for architecture in (*first, *(one for one in ARCHITECTURES if one.suits(config))):
        if _can_say(architecture, config):
            return architecture
    features = ", ".join(
        f"{name}={field_of(config.pattern[0], name)}"
        for name, kind in field_types().items()
        if kind is not int and name not in ("rope", "norm_eps")
    )
    raise MeshwrightError(
        f"no Hugging Face architecture has {features}, embed={config.embed} and heads="
        f"{config.heads} together; supported are {', '.join(one.name for one in ARCHITECTURES)}"
    )
