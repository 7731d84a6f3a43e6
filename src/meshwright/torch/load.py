"""Weights for a model on the meta device: each rank reads or makes its own slices only.

with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(config)
model = mw.torch.parallelize(model, mesh)
mw.torch.load_hf(model, folder)
"""

import copy
import logging
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshwright.errors import MeshwrightError
from meshwright.models import QUANTIZED, read_folder
from meshwright.torch.lora import is_factor
from meshwright.torch.parallelize import parallelized, tie
from meshwright.torch.placement import tied

logger = logging.getLogger("meshwright")

_WHOLE = ("BF16", "F16", "F32", "F64")  # numbers that need no scale beside them
_DERIVED = ("rotary_emb.inv_freq",)  # in older files; follows from the config


def load_hf(model: nn.Module, folder: str | os.PathLike[str]) -> nn.Module:
    """Fill a parallelized model from the safetensors files of a Hugging Face folder.

    Each rank reads the bytes of its own shards. A model on the meta device is put on the mesh's
    device first, and buffers that no file has, such as those of RoPE, are computed. Factors of LoRA
    are left as they are.
    """
    own = parallelized(model)
    files = tensor_files(Path(folder))
    shared = _shared_names(model)
    stored_names = _names_in_files(model, files)
    sources = {}
    for name, placed in own.placements.by_name.items():
        if is_factor(name):
            continue
        names = [other for other in shared.get(name, [name]) if other in stored_names]
        if not names:
            raise MeshwrightError(
                f"{folder} has no tensor {name!r} of shape {placed.shape}; it holds "
                f"{', '.join(sorted(files)[:3])}, …: is it a folder of this model?"
            )
        sources[name] = stored_names[names[0]]
    materialize(model)
    with _Opened() as opened, torch.no_grad():
        for name, param in model.named_parameters():
            if is_factor(name):
                continue
            placed = own.placements.by_name[name]
            stored = opened.slice_of(files[sources[name]], sources[name])
            shape = tuple(stored.get_shape())
            if shape != placed.shape:
                raise MeshwrightError(
                    f"tensor {sources[name]!r} in {files[sources[name]]} has shape {shape}, the "
                    f"model's has {placed.shape}; is it a folder of this model?"
                )
            kind = stored.get_dtype()
            if param.is_floating_point() and param.element_size() > 1 and kind not in _WHOLE:
                raise MeshwrightError(
                    f"tensor {sources[name]!r} in {files[sources[name]]} is {kind}, the model's is "
                    f"{param.dtype}: {QUANTIZED}"
                )
            _local(param).copy_(stored[own.slices(name)])
        buffers = dict(model.named_buffers())
        for name in buffers.keys() & files.keys():
            buffers[name].copy_(opened.slice_of(files[name], name)[:])
    used = {*sources.values(), *buffers}
    unused = [name for name in files if name not in used and not name.endswith(_DERIVED)]
    if unused:
        logger.warning("%s: %d tensors are not in the model: %s", folder, len(unused), unused[:4])
    return model


def _names_in_files(model: Any, files: Iterable[str]) -> dict[str, str]:
    """By the model's name of a tensor, that in the files; transformers has renamed some modules."""
    names = {name: name for name in files}
    if hasattr(model, "save_pretrained"):
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, rename_source_key

        # fully_shard gives a model a class of its own
        kind = next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))
        changes = get_checkpoint_conversion_mapping(kind.__name__)
        if changes is None:
            changes = get_checkpoint_conversion_mapping(model.config.model_type)
        renamings = [change for change in changes or () if isinstance(change, WeightRenaming)]
        for name in files:
            names.setdefault(rename_source_key(name, renamings, [])[0], name)
    return names


def initialize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Fill a parallelized model with initial weights that do not depend on the mesh.

    Each parameter has its own random seed, from `seed` and its name, and the model's own
    initializer (`_init_weights` of Hugging Face models, else `reset_parameters`).
    """
    own = parallelized(model)
    materialize(model)
    done: set[int] = set()
    for path, module in model.named_modules():
        params = {
            name: param for name, param in module._parameters.items()
            if param is not None and id(param) not in done
        }  # fmt: skip
        if not params:
            continue
        done |= {id(param) for param in params.values()}
        names = {name: f"{path}.{name}" if path else name for name in params}
        full = _initialized(model, module, path, params, seed)
        with torch.no_grad():
            for name, param in params.items():
                _local(param).copy_(full[name][own.slices(names[name])])
    return model


def _initialized(
    model: nn.Module, module: nn.Module, path: str, params: Mapping[str, torch.Tensor], seed: int
) -> dict[str, torch.Tensor]:
    """Initial values of a module's own parameters, whole, on the CPU."""
    full = {
        name: nn.Parameter(torch.zeros(param.shape, dtype=param.dtype), requires_grad=False)
        for name, param in params.items()
    }
    twin = copy.copy(module)
    twin._parameters = {**module._parameters, **full}
    twin._modules = {}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        # not torch.manual_seed, which also sets the seeds of GPUs
        torch.default_generator.manual_seed(zlib.crc32(f"{seed}/{path}".encode()))
        if hasattr(model, "_init_weights"):
            model._init_weights(twin)
        elif hasattr(twin, "reset_parameters"):
            twin.reset_parameters()
        else:
            raise MeshwrightError(
                f"{path!r} ({type(module).__name__}) has no reset_parameters, so its initial "
                "weights are not known; load them, or parallelize a model that has weights"
            )
    return {name: param.detach() for name, param in full.items()}


def materialize(model: nn.Module) -> None:
    """Put a model on the meta device onto the mesh's, tied weights tied, buffers computed."""
    own = parallelized(model)
    if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return
    shared = tied(dict(model.named_parameters(remove_duplicate=False)))
    model.to_empty(device=own.device)
    tie(model, shared)
    _compute_buffers(model)


def _compute_buffers(model: nn.Module) -> None:
    """Buffers that are not saved (RoPE, masks), as the model's own initializer computes them."""
    for path, module in model.named_modules():
        names = [name for name in module._non_persistent_buffers_set if name in module._buffers]
        buffers = {
            name: module._buffers[name] for name in names if module._buffers[name] is not None
        }
        if not buffers:
            continue
        with torch.no_grad():
            for buffer in buffers.values():
                assert buffer is not None
                buffer.fill_(_unset(buffer.dtype))
            if hasattr(model, "_init_weights"):
                twin = copy.copy(module)  # its buffers, and weights that nothing is written to
                twin._parameters = {
                    own: None if param is None else torch.empty(param.shape, device="meta")
                    for own, param in module._parameters.items()
                }
                model._init_weights(twin)
        for name, buffer in buffers.items():
            assert buffer is not None
            unset = buffer.isnan() if buffer.is_floating_point() else buffer == _unset(buffer.dtype)
            if buffer.numel() and bool(unset.all()):
                raise MeshwrightError(
                    f"buffer {f'{path}.{name}'!r} is in no file, and the model's _init_weights "
                    "does not compute it; build the model on the CPU instead of the meta device"
                )


def _unset(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).min


def _local(param: torch.Tensor) -> torch.Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


def _shared_names(model: nn.Module) -> dict[str, list[str]]:
    named = dict(model.named_parameters(remove_duplicate=False))
    return {name: names for names in tied(named) for name in names}


def tensor_files(folder: Path) -> dict[str, Path]:
    """The file of every tensor."""
    return {name: tensor.file for name, tensor in read_folder(folder).items()}


class _Opened:
    """Safetensors files, opened once each."""

    def __enter__(self) -> "_Opened":
        self._files: dict[Path, Any] = {}
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()

    def slice_of(self, file: Path, name: str) -> Any:
        """A tensor that is read where it is sliced."""
        return self._open(file).get_slice(name)

    def _open(self, file: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        if file not in self._files:
            try:
                self._files[file] = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise MeshwrightError(f"{file} cannot be read: {error}; get it again") from None
        return self._files[file]
