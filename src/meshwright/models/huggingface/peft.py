"""Adapters in the files of PEFT: adapter_config.json and adapter_model.safetensors.

PEFT has two tensors for each adapted linear layer, lora_A [rank, inputs] and lora_B [outputs,
rank]; here both factors are stacked over layers, input dims first. Of experts, which transformers
has in two parameters of a layer (`target_parameters`), it has lora_A [experts · rank, inputs] and
lora_B [outputs, rank · experts].
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from meshwright.errors import MeshwrightError
from meshwright.hub import hub_name
from meshwright.layouts import ArraySpec, tree_paths
from meshwright.models.huggingface.arrays import HfArray, HfModel
from meshwright.models.huggingface.fields import read_hf_config
from meshwright.models.lora import ADAPTER, is_layer_matrix
from meshwright.models.safetensors_read import read_header
from meshwright.models.settings import LoraConfig

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FACTORS = {"a": ".lora_A.weight", "b": ".lora_B.weight"}
_EXPERTS = "mlp.experts"  # the module in a layer, whatever files call it
# the parameters of experts, and what of ours they hold; PEFT wraps the first, then the second
_EXPERT_PARAMETERS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
# fields of adapter_config.json that are honoured with these values alone
_ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none", None), "use_dora": (False, None),
    "modules_to_save": (None, []), "rank_pattern": ({}, None), "alpha_pattern": ({}, None),
    "layers_to_transform": (None, []), "layer_replication": (None, []), "lora_bias": (False, None),
    "trainable_token_indices": (None, []),
    "init_lora_weights": (True, False, None, "gaussian"), "use_qalora": (False, None),
    "alora_invocation_tokens": (None, []), "corda_config": (None,), "eva_config": (None,),
}  # fmt: skip


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter of PEFT."""
    return (folder / CONFIG).is_file()


def adapter_model(model: HfModel, arrays: Any, lora: LoraConfig, base: str) -> HfModel:
    """The files of an adapter; `arrays` are the model's, with it, and `base` the model's folder.

    `base` may also be a name on the Hub, with its revision.
    """
    on_hub = hub_name(base)
    specs = {ADAPTER: arrays[ADAPTER]}
    by_path = dict(zip(tree_paths(specs), jax.tree.leaves(specs), strict=True))
    of_base = dict(zip(tree_paths(model.specs), jax.tree.leaves(model.specs), strict=True))
    adapted = {path.removeprefix(f"{ADAPTER}/").rpartition("/")[0] for path in by_path}
    of_experts = {path for path in adapted if of_base[path].kind == "expert"}
    parameters = _expert_parameters(of_experts)
    adapted -= of_experts
    factors = {}
    for path, spec in by_path.items():
        matrix, _, factor = path.removeprefix(f"{ADAPTER}/").rpartition("/")
        of = model.arrays[matrix]
        if matrix in of_experts:
            factors[path] = _expert_factor(path, spec, of, parameters)
        else:
            factors[path] = _factor(path, factor, spec, of, of_base[matrix])

    def fields(dtype: str) -> dict[str, Any]:
        first = [_inputs_first(model.arrays[path], of_base[path]) for path in adapted]
        encoder = model.write_config(dtype).get("is_encoder_decoder")
        return {
            "peft_type": "LORA",
            "task_type": "SEQ_2_SEQ_LM" if encoder else "CAUSAL_LM",
            "base_model_name_or_path": base if on_hub is None else on_hub.repo,
            "revision": None if on_hub is None else on_hub.revision,
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "use_rslora": lora.rslora,
            "lora_dropout": lora.dropout,
            "target_modules": _target_modules(model, adapted),
            "target_parameters": [f"{_EXPERTS}.{name}" for name in parameters] or None,
            "fan_in_fan_out": any(first),
            "bias": "none",
            "inference_mode": True,
            "use_dora": False,
            "modules_to_save": None,
        }

    return HfModel(specs, factors, fields, model.source, config_file=CONFIG, weights_file=WEIGHTS)


def read_adapter_config(folder: Path, model: HfModel) -> LoraConfig:
    """The settings of an adapter; its targets are the matrices that its file has tensors for."""
    fields, where = read_hf_config(folder / CONFIG)
    for name, values in _ONLY.items():
        if name in fields and fields[name] not in values:
            raise MeshwrightError(
                f"{where}: {name}={fields[name]!r} is not supported here; plain LoRA adapters are"
            )
    try:
        rank, alpha = int(fields["r"]), float(fields["lora_alpha"])
        dropout = float(fields.get("lora_dropout") or 0)
        if rank < 1:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise MeshwrightError(
            f"{where}: r and lora_alpha must be numbers above 0, lora_dropout a number from 0"
        ) from None
    held = read_header(folder / WEIGHTS)
    targets = [f"^{re.escape(path)}$" for path in _adapted_experts(fields, model, where)]
    specs = dict(zip(tree_paths(model.specs), jax.tree.leaves(model.specs), strict=True))
    for path, array in model.arrays.items():
        names = dataclasses.replace(array, name=_tensor(array, "a")).names
        modules = {name: name.removeprefix(_PREFIX).removesuffix(_FACTORS["a"]) for name in names}
        there = [module for name, module in modules.items() if name in held]
        lacking = [module for name, module in modules.items() if name not in held]
        if not there:
            continue
        why = ""
        if not _is_whole(array):
            why = "which is several matrices here"
        elif not (is_layer_matrix(specs[path]) or specs[path].kind == "expert"):
            why = "and here adapters are of matrices of the layers alone"
        elif lacking:
            why = f"and not {lacking[0]}: here adapters are of all layers"
        if why:
            raise MeshwrightError(
                f"{folder} adapts {there[0]}, {why}; merge it with PEFT (merge_and_unload) and "
                "take the merged model"
            )
        targets.append(f"^{re.escape(path)}$")
    if not targets:
        raise MeshwrightError(
            f"{folder / WEIGHTS} holds no factors of this model's matrices; its first tensor is "
            f"{next(iter(held), 'missing')}"
        )
    return LoraConfig(rank, alpha, bool(fields.get("use_rslora")), dropout, tuple(targets))


def _module(array: HfArray) -> str:
    return array.name.removesuffix(".weight")


def _of_first(array: HfArray) -> str:
    """Its module in the first layer."""
    return _module(array).format(layer=array.first, expert=0)


def _tensor(array: HfArray, factor: str) -> str:
    return f"{_PREFIX}{_module(array)}{_FACTORS[factor]}"


def _is_whole(array: HfArray) -> bool:
    """Whether it is all of a tensor of theirs, not one of several parts."""
    return all(part == slice(None) for part in array.window)


def _factor(path: str, factor: str, spec: ArraySpec, of: HfArray, matrix: ArraySpec) -> HfArray:
    """A factor beside the tensors of PEFT."""
    if not _is_whole(of):
        raise MeshwrightError(
            f"PEFT has one adapter for all of {_of_first(of)}, of which "
            f"{of.path} is a part; export the merged model instead (--merge)"
        )
    inputs = matrix.inputs
    # our dims of the matrix, without layers, in their order
    ours = range(inputs) if factor == "a" else range(inputs, len(of.order))
    theirs = sorted(ours, key=lambda dim: of.order[dim])
    sizes = [matrix.shape[1:][dim] for dim in theirs]
    rank = spec.shape[-1] if factor == "a" else spec.shape[1]
    folded = math.prod(sizes)
    if factor == "a":  # ours [inputs ..., rank], theirs [rank, inputs]
        unfolded, shape = (rank, *sizes), (rank, folded)
        order = (*(1 + theirs.index(dim) for dim in ours), 0)
    else:  # ours [rank, outputs ...], theirs [outputs, rank]
        unfolded, shape = (*sizes, rank), (folded, rank)
        order = (len(sizes), *(theirs.index(dim) for dim in ours))
    window = (slice(None),) * len(unfolded)
    name = _tensor(of, factor)
    return HfArray(path, name, shape, unfolded, window, order, of.layers, first=of.first)


def _expert_parameters(paths: set[str]) -> list[str]:
    """The parameters of transformers that hold these matrices of experts, in PEFT's order."""
    names = {path.rpartition("/")[2] for path in paths}
    found = [one for one, parts in _EXPERT_PARAMETERS.items() if names & {*parts}]
    missing = {part for one in found for part in _EXPERT_PARAMETERS[one]} - names
    if missing:
        raise MeshwrightError(
            f"PEFT has one adapter for gate and up of experts, and {min(missing)} has none here; "
            "adapt both, or export the merged model instead (--merge)"
        )
    return found


def _expert_factor(path: str, spec: ArraySpec, of: HfArray, parameters: list[str]) -> HfArray:
    """A factor of experts, ours [experts, inputs, rank] or [experts, rank, outputs]."""
    *_, matrix, factor = path.split("/")
    name = next(one for one, parts in _EXPERT_PARAMETERS.items() if matrix in parts)
    inner = "" if name == parameters[-1] else ".base_layer"
    tensor = f"{_PREFIX}{of.stack[0]}{{layer}}.{_EXPERTS}{inner}{_FACTORS[factor]}"
    _, experts, inputs, outputs = spec.shape  # of this factor
    window: tuple[slice | int, ...] = (slice(None),) * 3
    if factor == "a":
        shape, unfolded, order = (experts * outputs, inputs), (experts, outputs, inputs), (0, 2, 1)
    else:
        unfolded, order = (outputs, inputs, experts), (2, 1, 0)
        parts = _EXPERT_PARAMETERS[name]
        shape = (len(parts) * outputs, inputs * experts)
        if len(parts) > 1:
            # the parts lie one after the other, or interleaved where a tensor of theirs has them so
            at = 0 if _is_whole(of) else 1
            sizes, part = [*unfolded], parts.index(matrix)
            sizes.insert(at, len(parts))
            unfolded = tuple(sizes)  # type: ignore[assignment]
            window = (*window[:at], part, *window[at:])
    return HfArray(path, tensor, shape, unfolded, window, order, of.layers, first=of.first)


def _adapted_experts(fields: Mapping[str, Any], model: HfModel, where: str) -> list[str]:
    """The paths of matrices of experts that `target_parameters` names."""
    targets = fields.get("target_parameters") or []
    specs = dict(zip(tree_paths(model.specs), jax.tree.leaves(model.specs), strict=True))
    ours = [path for path, spec in specs.items() if spec.kind == "expert"]
    names = [str(target).rpartition("experts.")[2] for target in targets]
    for target, name in zip(targets, names, strict=True):
        if name not in _EXPERT_PARAMETERS or not ours:
            raise MeshwrightError(
                f"{where}: target_parameters={target!r} is not supported here; those of experts, "
                f"{' and '.join(_EXPERT_PARAMETERS)}, are"
            )
    parts = {part for name in names for part in _EXPERT_PARAMETERS[name]}
    return [path for path in ours if path.rpartition("/")[2] in parts]


def _inputs_first(array: HfArray, spec: ArraySpec) -> bool:
    """Whether their tensor is [inputs, outputs], as GPT-2's are."""
    return min(array.order[: spec.inputs]) == 0


def _target_modules(model: HfModel, adapted: set[str]) -> list[str]:
    """The last parts of the names of modules, or whole names where these would say too much."""

    def last(array: HfArray) -> str:
        return _module(array).rpartition(".")[2]

    names = {last(model.arrays[path]) for path in adapted}
    meant = {path for path, array in model.arrays.items() if last(array) in names}
    matrices = {path for path in meant if model.arrays[path].name.endswith(".weight")}
    if matrices == adapted:
        return sorted(names)
    return sorted(
        name.removesuffix(".weight") for path in adapted for name in model.arrays[path].names
    )
