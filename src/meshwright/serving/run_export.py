"""Export a run as a folder that transformers or PEFT reads."""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import jax.numpy as jnp

from meshwright.data import Tokenizer, tokenizer_files
from meshwright.errors import MeshwrightError
from meshwright.models import SOURCE, save_adapter, save_hf
from meshwright.serving.source import (
    Source,
    adapter_targets,
    generation_mesh,
    load_weights,
    model_source,
)


def export(
    run: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    step: int | None = None,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    merge: bool = False,
    mesh: str = "dp=1,fsdp=1,tp=1,sp=1",
) -> Path:
    """Write the model of a run as a new Hugging Face folder, with its tokenizer's files.

    Of a run with LoRA it is the adapter, as PEFT reads it; with `merge` the model with the adapter
    merged. `mesh` is for models that one device cannot hold.
    """
    source = model_source(run, step=step)
    if merge and source.adapter is None:
        raise MeshwrightError(f"{source.name} has no adapter to merge; leave --merge out")
    kind, placed = jnp.dtype(dtype), generation_mesh(mesh)
    if source.adapter is not None and not merge:
        adapter = source.adapter
        factors = adapter.read(adapter_targets(source.config, adapter.lora, placed))
        base = str(adapter.base.resolve())
        return save_adapter(folder, factors, source.config, adapter.lora, base, dtype=kind)
    with _tokenizer_folder(source) as tokenizer:
        params = load_weights(source, placed, kind).params
        return save_hf(folder, params, source.config, dtype=kind, tokenizer=tokenizer)


@contextlib.contextmanager
def _tokenizer_folder(source: Source) -> Iterator[Path | None]:
    """A folder of the tokenizer's files; None where they are those of the model's own folder."""
    own = (source.config.hf_config or {}).get(SOURCE)
    if own is not None and (Path(own) / "tokenizer.json").is_file():
        yield None
        return
    with tempfile.TemporaryDirectory() as made:
        _write(Path(made), source.tokenizer)
        yield Path(made)


def _write(folder: Path, tokenizer: Tokenizer) -> None:
    for name, content in tokenizer_files(tokenizer).items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
