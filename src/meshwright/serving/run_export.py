"""Export a run as a folder that transformers or PEFT reads."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import jax.numpy as jnp

from meshwright.data import tokenizer_files
from meshwright.errors import MeshwrightError, explained
from meshwright.hub import MODEL, local_folder, name_of_snapshot
from meshwright.models import SOURCE, is_adapter, save_adapter, save_hf, tokenizer_files_of
from meshwright.serving.abstract_weights import adapter_targets
from meshwright.serving.source import Source, generation_mesh, load_weights, model_source

CHAT_TEMPLATE = "chat_template.jinja"


@explained("mw.export('runs/first', 'exported')")
def export(
    run: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    step: int | None = None,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    merge: bool = False,
    adapter: str | os.PathLike[str] | None = None,
    mesh: str = "dp=1,fsdp=1,tp=1,sp=1",
) -> Path:
    """Write the model of a run as a new Hugging Face folder, with its tokenizer's files.

    Of a run with LoRA it is the adapter, as PEFT reads it; with `merge` the model with the adapter
    merged. With `adapter` it is the model with that one merged. `mesh` is for models that one
    device cannot hold.
    """
    path = local_folder(run, MODEL)
    source = model_source(path, step=step, adapter=adapter)
    if merge and source.adapter is None:
        raise MeshwrightError(f"{source.name} has no adapter to merge; leave --merge out")
    if not merge and is_adapter(path):
        raise MeshwrightError(f"{run} is an adapter of PEFT already; --merge exports the model")
    if not merge and adapter is not None:
        raise MeshwrightError(f"--adapter {adapter} is exported merged into the model: add --merge")
    out = Path(folder)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):  # before weights are read
        raise MeshwrightError(f"{out} is there already; give a folder that is new or empty")
    kind, placed = jnp.dtype(dtype), generation_mesh(mesh)
    with _tokenizer_folder(source, path) as tokenizer:
        if source.adapter is None or merge:
            params = load_weights(source, placed, kind).params
            return save_hf(out, params, source.config, dtype=kind, tokenizer=tokenizer)
        own = source.adapter
        factors = own.read(adapter_targets(source.config, own.lora, placed))
        on_hub = name_of_snapshot(own.base)
        base = str(own.base.resolve() if on_hub is None else on_hub)
        return save_adapter(
            out, factors, source.config, own.lora, base, dtype=kind, tokenizer=tokenizer
        )


@contextlib.contextmanager
def _tokenizer_folder(source: Source, run: Path) -> Iterator[Path]:
    """A folder of the tokenizer's files: those of the model's own folder, else the run's.

    The chat template is the one that the run's data was packed with, if there is one.
    """
    own = Path((source.config.hf_config or {}).get(SOURCE) or "")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if (own / "tokenizer.json").is_file():
            for file in (own / "config.json", *tokenizer_files_of(own)):  # with special tokens
                target = folder / file.relative_to(own)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, target)
        else:
            for name, content in tokenizer_files(source.tokenizer).items():
                text = json.dumps(content, ensure_ascii=False)
                (folder / name).write_text(text, encoding="utf-8")
        if (run / CHAT_TEMPLATE).is_file():
            shutil.copyfile(run / CHAT_TEMPLATE, folder / CHAT_TEMPLATE)
        yield folder
