"""The model families, and models by name, by file and by config."""

import contextlib
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from meshwright.arithmetic import first_repeated
from meshwright.errors import MeshwrightError, UnsupportedModelError, did_you_mean
from meshwright.hub import CONFIG, MODEL, local_folder
from meshwright.models.decoder import DECODER
from meshwright.models.family import ModelFamily, Serving
from meshwright.models.huggingface import HfModel, read_hf_config, short
from meshwright.models.lora import ADAPTER, with_adapter
from meshwright.models.safetensors_read import MappedFiles, read_header
from meshwright.models.settings import LoraConfig
from meshwright.models.t5.family import T5
from meshwright.models.torch_only import TORCH_ONLY
from meshwright.models.work import Experts

if TYPE_CHECKING:
    from meshwright.models.huggingface import OnLayer, OnRead

FAMILIES: tuple[ModelFamily, ...] = (DECODER, T5)
PRESETS: dict[str, Any] = {
    name: config for family in FAMILIES for name, config in family.presets.items()
}


def layer_counts(config: Any) -> tuple[int, ...]:
    """Layers of each stack of a model."""
    return tuple(stack.layers for stack in family_of(config).work(config))


def experts_of(model: Any) -> Experts | None:
    """Those of its layers, if they have some."""
    blocks = [block for stack in family_of(model).work(model) for block in stack.blocks]
    return next((block.experts for block in blocks if block.experts), None)


def parameter_counts(config: Any) -> tuple[int, int]:
    """Parameters of a model, and those that a token meets: of experts, its own."""
    arrays = jax.tree.leaves(abstract_arrays(config))
    total = sum(math.prod(spec.shape) for spec in arrays)
    experts = experts_of(config)
    if experts is None:
        return total, total
    of_experts = sum(math.prod(spec.shape) for spec in arrays if spec.kind == "expert")
    return total, total - of_experts * (experts.count - experts.per_token) // experts.count


def layer_count(config: Any) -> int:
    """Layers of all stacks of a model."""
    return sum(layer_counts(config))


def family_of(config: Any) -> ModelFamily:
    """The family whose config this is."""
    for family in (*FAMILIES, TORCH_ONLY):
        if isinstance(config, family.config):
            return family
    names = ", ".join(family.config.__name__ for family in FAMILIES)
    raise MeshwrightError(f"{config!r} is not the config of a model; give one of {names}")


def serving_of(config: Any) -> Serving:
    """What an engine needs to know of a model; an error for one that cannot generate yet."""
    family = family_of(config)
    if family.serving is None:
        raise MeshwrightError(f"models of the family {family.name!r} cannot generate text yet")
    return family.serving


def encodes_prompts(config: Any) -> bool:
    """Whether prompts are read by an encoder, so that the output does not continue them."""
    return "encoder_tokens" in family_of(config).batch_fields


def preset(name: str) -> Any:
    """A published model's config."""
    if name not in PRESETS:
        raise MeshwrightError(_unknown(name))
    return PRESETS[name]


# published models whose architecture is in no family, by how their names are written
_OTHERS = re.compile(
    r"gemma-[0-9]+b|gemma-3n|phi-[12]|falcon|bloom|bert|mamba|jamba|rwkv|olmo-1|cohere|command-r"
    r"|starcoder|stablelm|smollm|glm|mpt|yi-|internlm|baichuan|palm|bart|pegasus|byt5|mt5|ul2"
    r"|nemotron|dbrx|grok|arctic|ernie-4|llama-4|switch-|deepseek-v2|deepseek-moe|kimi"
    r"|qwen[12].*-(moe|a[0-9])|phi-3.5-moe|granite-.*-a[0-9]+m"
)
# of an architecture that is supported, without a preset
_WITHOUT_PRESET = re.compile(
    r"gpt2|gpt-j|gpt-neox|pythia|opt-|phi-[34](?!.*moe)|olmo-2|granite-[23](?!.*-a[0-9])|smollm3|gemma-[23]-"
)


def _unknown(name: str) -> str:
    """Why a name is not a model here, and what would be."""
    last = str(name).rstrip("/").rpartition("/")[2].lower()
    if last in PRESETS:
        return f"model {name!r} is not a preset; did you mean {last!r}?"
    if f"lwm-{last}" in PRESETS:
        return f"model {name!r} is lwm-{last} here: the size that LWM and EasyLM call {last}"
    if _WITHOUT_PRESET.match(last):
        return (
            f"model {name!r} has no preset; its architecture is supported: give its Hugging Face "
            "config.json, or a folder that holds one"
        )
    if _OTHERS.match(last):
        known = ", ".join(arch for family in FAMILIES for arch in family.hugging_face.architectures)
        return f"model {name!r} is of no architecture that is supported; these are {known}"
    if not name or re.search(r"[/\\]|^[.~]|\.[a-z]{2,}$", str(name)):
        return (
            f"model {name!r} is not a folder, and no config.json is there; give a preset, such as "
            "llama-3.1-8b, a Hugging Face config.json, or a "
            "folder that holds one"
        )
    return f"model {name!r} is not a preset{did_you_mean(name, PRESETS)}"


def abstract_arrays(config: Any, dtype: Any = jnp.float32, vocab: int | None = None) -> Any:
    """The model's parameters as a tree of ArraySpecs; `vocab`: padded, in memory."""
    return family_of(config).arrays(config, dtype, vocab)


def override(config: Any, changes: Sequence[str], seq: int) -> Any:
    """The config with changes such as `rope.theta=5e7`, for sequences of `seq` tokens."""
    pairs = [change.partition("=") for change in changes]
    for change, (name, equals, value) in zip(changes, pairs, strict=True):
        if not (name and equals and value):
            raise MeshwrightError(f"override {change!r} is not NAME=VALUE, such as rope.theta=5e7")
    twice = first_repeated([name for name, _, _ in pairs])
    if twice is not None:
        raise MeshwrightError(f"override names {twice!r} twice; give it once")
    return family_of(config).override(config, {name: value for name, _, value in pairs}, seq)


def model_config(model: str) -> Any:
    """The config of a preset, of a Hugging Face config.json, of a folder that holds one, or of a
    model on the Hub (org/name), of which config.json alone is read."""
    if model in PRESETS:
        return PRESETS[model]
    try:
        path = local_folder(model, CONFIG)
    except MeshwrightError as mistake:
        last = model.partition("@")[0].rpartition("/")[2].lower()
        hint = f"; the preset {last!r} needs no download" if last in PRESETS else ""
        raise MeshwrightError(f"{mistake}{hint}") from None
    is_run = is_folder = False
    with contextlib.suppress(OSError):  # what cannot be the name of a file
        is_run, is_folder = (path / "checkpoints").is_dir(), path.is_dir()
    if is_run:
        raise MeshwrightError(
            f"{model!r} is a run, not a model; to resume it: --config {path / 'config.json'}; to "
            f"start from its weights: meshwright export {path} FOLDER, and give that folder"
        )
    if model and (is_folder or path.suffix == ".json"):
        return from_hf_config(path)
    return preset(model)  # raises, with the nearest names


def from_hf_config(source: str | os.PathLike[str] | Mapping[str, Any]) -> Any:
    """The model that a config.json (its path, its folder's or its content) describes."""
    fields, where = read_hf_config(source)
    named, model_type = fields.get("architectures"), fields.get("model_type")
    for family in FAMILIES:
        known = family.hugging_face.architectures
        if named in ([], None) and model_type in known.values():
            return family.hugging_face.read_config(source)
        if isinstance(named, list) and len(named) == 1 and named[0] in known:
            return family.hugging_face.read_config(source)
    supported = ", ".join(name for family in FAMILIES for name in family.hugging_face.architectures)
    if named in ([], None):
        said = (
            "architectures is missing" if model_type is None else f"model_type {short(model_type)}"
        )
    else:
        said = f"architectures {short(named)}"
    raise UnsupportedModelError(f"{where}: {said}; supported are {supported}")


def to_hf_config(config: Any) -> dict[str, Any]:
    """The config.json of a model."""
    return family_of(config).hugging_face.write_config(config)


def load_hf(
    folder: str | os.PathLike[str],
    config: Any = None,
    shardings: Any = None,
    dtype: Any = jnp.float32,
    on_read: "OnRead | None" = None,
    on_layer: "OnLayer | None" = None,
) -> Any:
    """The weights of a Hugging Face folder, every array placed as `shardings` says.

    The folder may be the name of a model on the Hub. `config` is what config.json says if not
    given. `shardings` is a tree like the model's arrays, or one sharding for all; without it, the
    first device. `on_read`, if given, is called with (path of the array, bytes) after each read. A
    stack of layers whose path is in `on_layer` is read a layer at a time, and becomes what that
    function makes of each, [1, ..].
    """
    from meshwright.models.huggingface import load_folder

    if not isinstance(folder, str | os.PathLike):
        raise MeshwrightError(f"{folder!r} is not the path of a folder")
    folder = local_folder(folder, MODEL)
    config = from_hf_config(folder) if config is None else config
    model = family_of(config).hugging_face.model(config)
    return load_folder(folder, model, shardings, dtype, on_read, on_layer)


def save_hf(folder: str | os.PathLike[str], params: Any, config: Any, **options: Any) -> Path:
    """Write a model as a Hugging Face folder that transformers reads.

    Options are `dtype`, `max_file_bytes` and `tokenizer`: see models/huggingface/save.py.
    """
    from meshwright.models.huggingface import save_folder

    return save_folder(folder, params, family_of(config).hugging_face.model(config), **options)


def save_adapter(
    folder: str | os.PathLike[str],
    params: Any,
    config: Any,
    lora: LoraConfig,
    base: str = "",
    **options: Any,
) -> Path:
    """Write the adapter among `params` as a folder that PEFT reads; options are as in `save_hf`.

    `base` is the folder, or the name, of the model that it adapts.
    """
    from meshwright.models.huggingface import save_folder

    files = adapter_files(config, lora, base)
    return save_folder(folder, {ADAPTER: params[ADAPTER]}, files, **options)


def adapter_files(config: Any, lora: LoraConfig, base: str = "") -> HfModel:
    """What PEFT's files of an adapter hold: its tensors beside our arrays."""
    from meshwright.models.huggingface import adapter_model

    model = family_of(config).hugging_face.model(config)
    arrays = with_adapter(model.specs, lora, jnp.float32, hf_names(config))
    return adapter_model(model, arrays, lora, base)


def load_adapter(
    folder: str | os.PathLike[str], config: Any, shardings: Any = None, dtype: Any = jnp.float32
) -> tuple[Any, LoraConfig]:
    """The adapter of a folder of PEFT, as `{"adapter": …}`, and its settings.

    `shardings` are as in `load_hf`.
    """
    from meshwright.models.huggingface import (
        WEIGHTS,
        adapter_model,
        load_tensors,
        read_adapter_config,
    )

    model = family_of(config).hugging_face.model(config)
    lora = read_adapter_config(Path(folder), model)
    files = adapter_model(model, with_adapter(model.specs, lora, jnp.float32), lora, "")
    tensors = MappedFiles(read_header(Path(folder) / WEIGHTS))
    return load_tensors(tensors, Path(folder), files, shardings, dtype), lora


def hf_names(config: Any) -> dict[str, str]:
    """Hugging Face's names of the model's arrays, by path."""
    arrays = family_of(config).hugging_face.model(config).arrays
    return {path: array.name for path, array in arrays.items()}


def model_to_dict(config: Any) -> dict[str, Any]:
    """A model's config as plain JSON data, without the config.json it was read from."""
    family = family_of(config)
    return {"family": family.name} | family.to_dict(config)


def model_from_dict(data: Mapping[str, Any]) -> Any:
    """The reverse of model_to_dict; data without a family is a decoder's."""
    values = dict(data)
    name = values.pop("family", DECODER.name)
    for family in (*FAMILIES, TORCH_ONLY):
        if family.name == name:
            return family.from_dict(values)
    raise MeshwrightError(f"no model family is called {name!r}")
