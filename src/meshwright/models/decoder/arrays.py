"""Every parameter of a dense decoder: shape, dtype, dims, initializer.

The arrays of layers are stacked: one array holds a weight of all layers, dim `layers` first. So a
tree is short, a scan iterates over it, and names do not depend on how the forward pass is run.
"""

import math
from typing import Any

import jax.numpy as jnp

from meshwright.layouts import ArraySpec, Constant, Normal
from meshwright.models.decoder.config import DecoderConfig

_STD = 0.02


def abstract_arrays(
    config: DecoderConfig, dtype: Any = jnp.float32, vocab: int | None = None
) -> dict[str, Any]:
    """The parameter tree of ArraySpecs; matrices have input dims first, then output dims.

    `vocab` is the vocabulary in memory, if it is padded (`padded_vocab`).
    """
    sizes = {
        "layers": config.layers,
        "vocab": config.vocab,
        "embed": config.embed,
        "norm": config.embed,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "mlp": config.mlp,
    }

    in_memory = {} if vocab is None else {"vocab": vocab}

    def array(dims: str, init: Any, inputs: int = 0) -> ArraySpec:
        shape = tuple(sizes[dim] for dim in dims.split())
        padded = tuple((sizes | in_memory)[dim] for dim in dims.split())
        return ArraySpec(padded, dims, dtype, init, None if padded == shape else shape, inputs)

    matrix, ones, zeros = Normal(_STD), Constant(1.0), Constant(0.0)
    # what is added to the residual stream starts smaller, so that depth does not make it grow
    added = Normal(_STD / math.sqrt(2 * config.layers))
    attention = {
        "norm": array("layers norm", ones),
        "wq": array("layers embed heads head_dim", matrix, 1),
        "wk": array("layers embed kv_heads head_dim", matrix, 1),
        "wv": array("layers embed kv_heads head_dim", matrix, 1),
        "wo": array("layers heads head_dim embed", added, 2),
    }
    if config.qkv_bias:
        attention["bq"] = array("layers heads head_dim", zeros)
        attention["bk"] = array("layers kv_heads head_dim", zeros)
        attention["bv"] = array("layers kv_heads head_dim", zeros)
    if config.output_bias:
        attention["bo"] = array("layers norm", zeros)
    if config.qk_norm:
        attention["q_norm"] = array("layers head_dim", ones)
        attention["k_norm"] = array("layers head_dim", ones)
    mlp = {
        "norm": array("layers norm", ones),
        "gate": array("layers embed mlp", matrix, 1),
        "up": array("layers embed mlp", matrix, 1),
        "down": array("layers mlp embed", added, 1),
    }
    arrays: dict[str, Any] = {
        "embedding": array("vocab embed", matrix, 1),
        "layers": {"attention": attention, "mlp": mlp},
        "norm": array("norm", ones),
    }
    if not config.tied_embeddings:
        arrays["output"] = array("embed vocab", matrix, 1)
    return arrays
