"""Write a parallelized model as a Hugging Face folder that transformers reads."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.errors import MeshwrightError
from meshwright.models import TENSOR_FILE, TENSOR_INDEX
from meshwright.torch.parallelize import parallelized

_FILE_BYTES = 5 * 10**9


def save_hf(
    model: nn.Module, folder: str | os.PathLike[str], dtype: torch.dtype | None = None
) -> Path:
    """Write config.json and the weights into a new folder; all ranks call this, rank 0 writes.

    One tensor at a time is all-gathered, and a file of them at most is in memory. Tied weights are
    written once. `dtype`: of the weights in the files; by default their own.
    """
    parallelized(model)
    folder = Path(folder)
    writes = dist.get_rank() == 0
    taken = [folder.exists() and any(folder.iterdir())]
    dist.broadcast_object_list(taken, 0)
    if taken[0]:
        raise MeshwrightError(f"{folder} is there already; give a folder that is new or empty")
    partial = folder.absolute().with_name(f".{folder.name}.part")
    if writes:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    tensors = [(name, param) for name, param in model.named_parameters()]
    kept = model.state_dict().keys()
    tensors += [(name, buffer) for name, buffer in model.named_buffers() if name in kept]
    files = _files(tensors, dtype)
    for file, part in files.items():
        values: dict[str, torch.Tensor] = {}
        for name, tensor in part:
            full = tensor.detach()
            full = full.full_tensor() if isinstance(full, DTensor) else full
            if writes:
                values[name] = (
                    full.to(dtype if full.is_floating_point() else None).cpu().contiguous()
                )
        if writes:
            _write(partial / file, values)
    if writes:
        _finish(model, partial, files)
        folder.parent.mkdir(parents=True, exist_ok=True)
        os.replace(partial, folder)
    dist.barrier()
    return folder


def _files(
    tensors: list[tuple[str, torch.Tensor]], dtype: torch.dtype | None
) -> dict[str, list[tuple[str, torch.Tensor]]]:
    parts: list[list[tuple[str, torch.Tensor]]] = [[]]
    filled = 0
    for name, tensor in tensors:
        size = tensor.numel() * (dtype or tensor.dtype).itemsize
        if parts[-1] and filled + size > _FILE_BYTES:
            parts.append([])
            filled = 0
        parts[-1].append((name, tensor))
        filled += size
    if len(parts) == 1:
        return {TENSOR_FILE: parts[0]}
    return {
        f"model-{i:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts, 1)
    }


def _write(file: Path, values: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(values, file, metadata={"format": "pt"})


def _finish(model: nn.Module, folder: Path, files: dict[str, Any]) -> None:
    if len(files) > 1:
        weight_map = {name: file for file, part in files.items() for name, _ in part}
        (folder / TENSOR_INDEX).write_text(
            json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2)
        )
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "save_pretrained"):
        if not config.architectures:  # fully_shard puts FSDP before the name of the class
            config.architectures = [type(model).__name__.removeprefix("FSDP")]
        config.save_pretrained(folder)
    generation = getattr(model, "generation_config", None)
    if generation is not None and hasattr(generation, "save_pretrained"):
        generation.save_pretrained(folder)
