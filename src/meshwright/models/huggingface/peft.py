"""Adapters in the files of PEFT: adapter_config.json and adapter_model.safetensors.

PEFT has two tensors for each adapted linear layer, lora_A [rank, inputs] and lora_B [outputs,
rank]; here both factors are stacked over layers, input dims first.
"""

import math
import re
from pathlib import Path
from typing import Any

import jax

from meshwright.errors import MeshwrightError
from meshwright.hub import hub_name
from meshwright.layouts import ArraySpec, tree_paths
from meshwright.models.huggingface.arrays import HfArray, HfModel
from meshwright.models.huggingface.fields import read_hf_config
from meshwright.models.lora import ADAPTER, LoraConfig
from meshwright.models.safetensors_read import read_header

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# fields of adapter_config.json that are honoured with these values alone
_ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none", None), "use_dora": (False, None),
    "modules_to_save": (None, []), "rank_pattern": ({}, None), "alpha_pattern": ({}, None),
    "layers_to_transform": (None, []), "layer_replication": (None, []), "lora_bias": (False, None),
    "trainable_token_indices": (None, []), "target_parameters": (None, []),
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
    factors = {}
    for path, spec in by_path.items():
        matrix, _, factor = path.removeprefix(f"{ADAPTER}/").rpartition("/")
        factors[path] = _factor(path, factor, spec, model.arrays[matrix], of_base[matrix])

    def fields(dtype: str) -> dict[str, Any]:
        adapted = {path.removeprefix(f"{ADAPTER}/").rpartition("/")[0] for path in by_path}
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
    targets = []
    for path, array in model.arrays.items():
        if _of_first(array, _tensor(array, "a")) not in held:
            continue
        if not _is_whole(array):
            raise MeshwrightError(
                f"{folder} adapts {_of_first(array)}, which is several "
                "matrices here; merge it with PEFT (merge_and_unload) and take the merged model"
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


def _of_first(array: HfArray, name: str = "") -> str:
    """A name, by default that of its module, in the first layer."""
    return (name or _module(array)).format(layer=array.first, expert=0)


def _tensor(array: HfArray, factor: str) -> str:
    return f"{_PREFIX}{_module(array)}.lora_{factor.upper()}.weight"


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
