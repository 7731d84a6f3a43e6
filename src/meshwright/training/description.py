"""What a run says of itself: the lines before its first step, and the files in its folder."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import meshwright
from meshwright.models import model_to_dict
from meshwright.present import count, mesh_text
from meshwright.training.backend import Backend
from meshwright.training.config import TrainConfig, config_to_dict
from meshwright.training.optimizer_config import DEFAULT_WARMUP


def announcement(backend: Backend, config: TrainConfig, first: int) -> Iterator[str]:
    """Lines: the mesh, the placement, the data from step `first` on, and how it is computed."""
    yield (
        f"{config.model} on mesh {mesh_text(backend.mesh_shape)}: "
        f"{count(backend.num_devices, backend.device_kind + ' device')}"
        + (f", {backend.processes} processes" if backend.processes > 1 else "")
    )
    yield from backend.placement_lines()
    sequences = count(config.batch // config.accumulation, "sequence")
    yield (
        f"batch {config.batch} × {config.seq} tokens as "
        f"{count(config.accumulation, 'micro-batch')} of {sequences}; data {config.data}; "
        f"steps {first} to {config.steps}"
    )
    yield from backend.loader.remarks()
    warmup = config.optimizer.warmup(config.steps)
    if config.optimizer.warmup_steps is None and warmup < DEFAULT_WARMUP:
        yield (
            f"note: the warm-up is shortened from {DEFAULT_WARMUP} to {count(warmup, 'step')}, "
            "to suit the length of the run; --optimizer.warmup-steps sets it"
        )
    yield from backend.compute_lines()


def run_description(
    backend: Backend, config: TrainConfig, base: dict[str, Any] | None
) -> dict[str, str]:
    """The files of a run's folder, by name; `base` are the frozen weights that it needs.

    config.json has all settings but --stop-at, run.json what the page shows first.
    """
    mixture = backend.loader.mixture
    # a run's own record says how to continue it, which is to the end
    settings = config_to_dict(dataclasses.replace(config, stop_at=None)) | {
        "model_config": model_to_dict(backend.model),
        "hf_config": backend.model.hf_config,
        "base": base,
        "special_tokens": mixture.special_tokens,
    }
    about = {
        "name": config.run.name,
        "model": config.model,
        "parameters": f"{backend.num_parameters:,}",
        "mesh": mesh_text(backend.mesh_shape),
        "machine": f"{backend.num_devices} × {backend.device_kind}",
        "data": config.data,
        "FLOPs of a token": backend.work.formula,
        "version": meshwright.__version__,
    }
    files = {
        "config.json": settings,
        "run.json": about,
        "tokenizer_state.json": mixture.tokenizer.to_json(),
    }
    texts = {name: json.dumps(data, indent=2) + "\n" for name, data in files.items()}
    return texts | mixture.template_files()
