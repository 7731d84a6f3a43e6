"""A T5's Hugging Face folder, read and written: their names and dims beside ours."""

import functools
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from meshwright.models.huggingface import (
    SOURCE,
    HfModel,
    OnRead,
    hf_arrays,
    load_folder,
    save_folder,
)
from meshwright.models.t5.arrays import abstract_arrays
from meshwright.models.t5.config import T5Config
from meshwright.models.t5.hf_config import HEAD, from_hf_config, to_hf_config

_EMBEDDING = "shared.weight"


def _names(config: T5Config) -> dict[str, tuple[str, str]]:
    """Ours to theirs, and its dims; those in brackets are one dim there."""
    names = {"embedding": (_EMBEDDING, "vocab embed")}
    for stack, blocks in (
        ("encoder", {"attention": "SelfAttention"}),
        ("decoder", {"attention": "SelfAttention", "cross_attention": "EncDecAttention"}),
    ):
        names[f"{stack}/relative_bias"] = (
            f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            "relpos_buckets heads",
        )
        for number, (ours, theirs) in enumerate((blocks | {"mlp": "DenseReluDense"}).items()):
            path, block = f"{stack}/layers/{ours}", f"{stack}.block.{{layer}}.layer.{number}."
            names[f"{path}/norm"] = (block + "layer_norm.weight", "norm")
            names |= {
                f"{path}/{name}": (f"{block}{theirs}.{letter}.weight", dims)
                for name, letter, dims in (_mlp(config) if ours == "mlp" else _ATTENTION)
            }
        names[f"{stack}/norm"] = (f"{stack}.final_layer_norm.weight", "norm")
    names["output"] = (HEAD, "vocab embed")
    return names


_ATTENTION = (
    ("wq", "q", "(heads head_dim) embed"),
    ("wk", "k", "(kv_heads head_dim) embed"),
    ("wv", "v", "(kv_heads head_dim) embed"),
    ("wo", "o", "embed (heads head_dim)"),
)


def _mlp(config: T5Config) -> tuple[tuple[str, str, str], ...]:
    first = (
        (("gate", "wi_0", "mlp embed"), ("up", "wi_1", "mlp embed"))
        if config.gated
        else (("up", "wi", "mlp embed"),)
    )
    return (*first, ("down", "wo", "embed mlp"))


def hf_model(config: T5Config) -> HfModel:
    """What a folder of this config holds."""
    specs = abstract_arrays(config)
    tied = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
    tied += [HEAD] if config.tied_embeddings else []
    return HfModel(
        specs=specs,
        arrays=hf_arrays(specs, _names(config)),
        write_config=functools.partial(_write_config, config),
        source=(config.hf_config or {}).get(SOURCE),
        copies=dict.fromkeys(tied, _EMBEDDING),
        # of the first files that were published; no model uses it
        ignored=("EncDecAttention.relative_attention_bias.weight",),
    )


def _write_config(config: T5Config, dtype: str) -> dict[str, Any]:
    return to_hf_config(config, dtype=dtype)


def load_hf(
    folder: str | os.PathLike[str],
    config: T5Config | None = None,
    shardings: Any = None,
    dtype: Any = jnp.float32,
    on_read: OnRead | None = None,
) -> dict[str, Any]:
    """The parameter tree of a Hugging Face folder: see load_folder.

    `config` is what config.json says if not given.
    """
    config = from_hf_config(folder) if config is None else config
    return load_folder(folder, hf_model(config), shardings, dtype, on_read)


def save_hf(folder: str | os.PathLike[str], params: Any, config: T5Config, **options: Any) -> Path:
    """Write config.json and the weights into a new folder: see save_folder."""
    return save_folder(folder, params, hf_model(config), **options)
