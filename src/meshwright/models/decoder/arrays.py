"""Every parameter of a dense decoder, described: shape, dtype, dims."""

from typing import Any

import jax.numpy as jnp

from meshwright.layout import ArraySpec
from meshwright.models.decoder.config import DecoderConfig


def abstract_arrays(config: DecoderConfig, dtype: Any = jnp.float32) -> dict[str, Any]:
    """The parameter tree of ArraySpecs; matrices read input dims first, then output dims."""
    sizes = {
        "vocab": config.vocab,
        "embed": config.embed,
        "norm": config.embed,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "mlp": config.mlp,
    }

    def array(dims: str) -> ArraySpec:
        return ArraySpec(tuple(sizes[dim] for dim in dims.split()), dims, dtype)

    def layer() -> dict[str, Any]:
        return {
            "attention": {
                "norm": array("norm"),
                "wq": array("embed heads head_dim"),
                "wk": array("embed kv_heads head_dim"),
                "wv": array("embed kv_heads head_dim"),
                "wo": array("heads head_dim embed"),
            },
            "mlp": {
                "norm": array("norm"),
                "gate": array("embed mlp"),
                "up": array("embed mlp"),
                "down": array("mlp embed"),
            },
        }

    arrays: dict[str, Any] = {
        "embedding": array("vocab embed"),
        "layers": [layer() for _ in range(config.layers)],
        "norm": array("norm"),
    }
    if not config.tied_embeddings:
        arrays["output"] = array("embed vocab")
    return arrays
