"""Every parameter of a T5: shape, dtype, dims, initializer.

The encoder's and the decoder's layers are stacked each, dim `layers` first. Keys and values have
dim `kv_heads`, as in other families, with as many as there are heads.
"""

import math
from typing import Any

import jax.numpy as jnp

from meshwright.layouts import ArraySpec, Constant, Normal
from meshwright.models.t5.config import T5Config


def abstract_arrays(
    config: T5Config, dtype: Any = jnp.float32, vocab: int | None = None
) -> dict[str, Any]:
    """The parameter tree of ArraySpecs; matrices have input dims first, then output dims.

    `vocab` is the vocabulary in memory, if it is padded (`padded_vocab`). Initializers are T5's:
    attention is not scaled, so that of queries is smaller by head_dim^-0.5.
    """
    sizes = {
        "vocab": config.vocab,
        "embed": config.embed,
        "norm": config.embed,
        "heads": config.heads,
        "kv_heads": config.heads,
        "head_dim": config.head_dim,
        "mlp": config.mlp,
        "relpos_buckets": config.buckets,
    }
    in_memory = {} if vocab is None else {"vocab": vocab}

    def array(
        dims: str, init: Any, inputs: int = 0, layers: int = 0, *, kind: str = "matrix"
    ) -> ArraySpec:
        dims = f"layers {dims}" if layers else dims
        known = sizes | {"layers": layers}
        shape = tuple(known[dim] for dim in dims.split())
        padded = tuple((known | in_memory)[dim] for dim in dims.split())
        unpadded = None if padded == shape else shape
        activation = "residual" if kind == "norm" else ""
        return ArraySpec(padded, dims, dtype, init, unpadded, inputs, kind, activation)

    def norm(layers: int = 0) -> ArraySpec:
        return array("norm", Constant(1.0), layers=layers, kind="norm")

    by_embed, by_mlp = Normal(config.embed**-0.5), Normal(config.mlp**-0.5)
    of_queries = Normal((config.embed * config.head_dim) ** -0.5)
    of_output = Normal(1 / math.sqrt(config.heads * config.head_dim))

    def attention(layers: int) -> dict[str, ArraySpec]:
        return {
            "norm": norm(layers),
            "wq": array("embed heads head_dim", of_queries, 1, layers),
            "wk": array("embed kv_heads head_dim", by_embed, 1, layers),
            "wv": array("embed kv_heads head_dim", by_embed, 1, layers),
            "wo": array("heads head_dim embed", of_output, 2, layers),
        }

    def mlp(layers: int) -> dict[str, ArraySpec]:
        gate = {"gate": array("embed mlp", by_embed, 1, layers)} if config.gated else {}
        return {
            "norm": norm(layers),
            **gate,
            "up": array("embed mlp", by_embed, 1, layers),
            "down": array("mlp embed", by_mlp, 1, layers),
        }

    def stack(layers: int, **more: Any) -> dict[str, Any]:
        return {
            "layers": {"attention": attention(layers), **more, "mlp": mlp(layers)},
            "norm": norm(),
            "relative_bias": array("relpos_buckets heads", by_embed, kind="bias"),
        }

    arrays: dict[str, Any] = {
        "embedding": array("vocab embed", Normal(1.0), 1, kind="embedding"),
        "encoder": stack(config.encoder_layers),
        "decoder": stack(config.decoder_layers, cross_attention=attention(config.decoder_layers)),
    }
    if not config.tied_embeddings:
        arrays["output"] = array("embed vocab", by_embed, 1)
    return arrays
