"""Every parameter of a decoder: shape, dtype, dims, initializer, and what it is.

The arrays of layers are stacked: one array holds a weight of all layers, dim `layers` first. So a
tree is short, a scan iterates over it, and names do not depend on how the forward pass is run.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from meshwright.errors import MeshwrightError
from meshwright.layouts import ArraySpec, Constant, Normal
from meshwright.models.decoder.config import DecoderConfig
from meshwright.models.decoder.kinds import LayerKind

_STD = 0.02
# sizes of latent attention, and the dim that each is: it says how they are placed
_DIMS = {
    "q_rank": "latent_rank", "kv_rank": "latent_rank", "q_latent": "latent", "kv_latent": "latent",
    "rope_dim": "latent", "key_dim": "head_part", "value_dim": "head_part",
}  # fmt: skip


def abstract_arrays(
    config: DecoderConfig, dtype: Any = jnp.float32, vocab: int | None = None
) -> dict[str, Any]:
    """The parameter tree of ArraySpecs; matrices have input dims first, then output dims.

    `vocab` is the vocabulary in memory, if it is padded (`padded_vocab`).
    """
    describe = _Describe(config, dtype, vocab)
    stacks = [describe.layers(kind, config.layers - config.leading) for kind in config.pattern]
    if any(stack != stacks[0] for stack in stacks):
        raise MeshwrightError(
            "the layers of this model have arrays of different shapes, which cannot be stacked; "
            "give all kinds of its pattern the same heads, mlp, biases and norms"
        )
    leading = describe.layers(config.leading_kind, config.leading) if config.leading else {}
    arrays: dict[str, Any] = {
        "embedding": describe("vocab embed", "embedding", Normal(_STD), 1),
        **({"leading_layers": leading} if leading else {}),
        "layers": stacks[0],
        **describe.norms("norm", "norm", config.pattern[0]),
    }
    if config.learned_positions:
        arrays["positions"] = describe("positions embed", "embedding", Normal(_STD), 1)
    if not config.tied_embeddings:
        arrays["output"] = describe("embed vocab", "matrix", Normal(_STD), 1)
    if config.head_bias:
        arrays["output_bias"] = describe("vocab", "bias", Constant(0.0))
    return arrays


class _Describe:
    """ArraySpecs from dims."""

    def __init__(self, config: DecoderConfig, dtype: Any, vocab: int | None) -> None:
        self.dtype = dtype
        # what is added to the residual stream starts smaller, so that depth does not make it grow
        self.added = Normal(_STD / math.sqrt(2 * config.layers))
        self.sizes = {
            "vocab": config.vocab, "embed": config.embed, "norm": config.embed,
            "positions": config.max_seq + config.position_offset,
        }  # fmt: skip
        self.in_memory = {} if vocab is None else {"vocab": vocab}

    def __call__(
        self, dims: str, kind: str, init: Any, inputs: int = 0, activation: str = ""
    ) -> ArraySpec:
        shape = tuple(self.sizes[dim] for dim in dims.split())
        padded = tuple((self.sizes | self.in_memory)[dim] for dim in dims.split())
        unpadded = None if padded == shape else shape
        dims = " ".join(_DIMS.get(dim, dim) for dim in dims.split())
        return ArraySpec(padded, dims, self.dtype, init, unpadded, inputs, kind, activation)

    def norm(self, dims: str, activation: str, kind: LayerKind) -> ArraySpec:
        start = Constant(0.0 if kind.norm.kind == "rms+1" else 1.0)
        return self(dims, "norm", start, activation=activation)

    def bias(self, dims: str, activation: str) -> ArraySpec:
        return self(dims, "bias", Constant(0.0), activation=activation)

    def norms(self, name: str, dims: str, kind: LayerKind) -> dict[str, ArraySpec]:
        """The arrays of a norm of the residual stream."""
        arrays = {name: self.norm(dims, "residual", kind)}
        return arrays | ({f"{name}_bias": self.bias(dims, "residual")} if kind.norm.bias else {})

    def layers(self, kind: LayerKind, count: int) -> dict[str, dict[str, ArraySpec]]:
        """The arrays of so many layers, which are of one kind."""
        attention = kind.attention
        self.sizes |= {
            "layers": count,
            "heads": attention.heads,
            "kv_heads": attention.kv_heads,
            "head_dim": attention.head_dim,
            **dict.fromkeys(("q_rank", "q_latent"), attention.q_rank or 0),
            **dict.fromkeys(("kv_rank", "kv_latent"), attention.kv_rank or 0),
            "rope_dim": attention.rope_dim or 0,
            "key_dim": attention.head_dim - (attention.rope_dim or 0),
            "value_dim": attention.values_dim,
            "mlp": kind.mlp.size,
            "experts": kind.experts.count,
            "shared_mlp": kind.experts.shared,
        }
        arrays = self._attention(kind) if attention.kv_rank is None else self._latent(kind)
        return {"attention": arrays, "mlp": self._mlp(kind)}

    def _block_norms(self, kind: LayerKind) -> dict[str, ArraySpec]:
        """Those before and after a block."""
        before = self.norms("norm", "layers norm", kind) if kind.norm_places != "after" else {}
        after = self.norms("post_norm", "layers norm", kind) if kind.norm_places != "before" else {}
        return before | after

    def _attention(self, kind: LayerKind) -> dict[str, ArraySpec]:
        matrix, attention = Normal(_STD), kind.attention
        arrays = {
            **self._block_norms(kind),
            "wq": self("layers embed heads head_dim", "matrix", matrix, 1),
            "wk": self("layers embed kv_heads head_dim", "matrix", matrix, 1),
            "wv": self("layers embed kv_heads head_dim", "matrix", matrix, 1),
            "wo": self("layers heads head_dim embed", "matrix", self.added, 2),
        }
        if attention.qkv_bias:
            arrays["bq"] = self.bias("layers heads head_dim", "heads")
            arrays["bk"] = self.bias("layers kv_heads head_dim", "kv_heads")
            arrays["bv"] = self.bias("layers kv_heads head_dim", "kv_heads")
        if attention.output_bias:
            arrays["bo"] = self.bias("layers norm", "residual")
        if attention.sinks:
            arrays["sinks"] = self.bias("layers heads", "heads")
        if attention.qk_norm:
            of_q, of_k = ("heads ", "kv_heads ") if attention.joint_qk_norm else ("", "")
            arrays["q_norm"] = self.norm(f"layers {of_q}head_dim", "heads", kind)
            arrays["k_norm"] = self.norm(f"layers {of_k}head_dim", "kv_heads", kind)
        return arrays

    def _latent(self, kind: LayerKind) -> dict[str, ArraySpec]:
        """Those of latent attention."""

        def matrix(dims: str) -> ArraySpec:
            return self(f"layers {dims}", "matrix", Normal(_STD), 1)

        arrays = self._block_norms(kind)
        if kind.attention.q_rank is None:
            arrays["wq"] = matrix("embed heads head_dim")
        else:
            arrays["wq_a"] = matrix("embed q_latent")
            arrays["q_norm"] = self.norm("layers q_latent", "", kind)
            arrays["wq_b"] = matrix("q_rank heads head_dim")
        return {
            **arrays,
            "wkv_a": matrix("embed kv_latent"),
            "wk_rope": matrix("embed rope_dim"),
            "kv_norm": self.norm("layers kv_latent", "", kind),
            "wk_b": matrix("kv_rank kv_heads key_dim"),
            "wv_b": matrix("kv_rank kv_heads value_dim"),
            "wo": self("layers heads value_dim embed", "matrix", self.added, 2),
        }

    def _mlp(self, kind: LayerKind) -> dict[str, ArraySpec]:
        first = ("gate", "up") if kind.mlp.gated else ("up",)
        if kind.experts.count:
            return self._experts(kind, first)
        arrays = {
            **({} if kind.shared_norm else self._block_norms(kind)),
            **{name: self("layers embed mlp", "matrix", Normal(_STD), 1) for name in first},
            "down": self("layers mlp embed", "matrix", self.added, 1),
        }
        if kind.mlp.bias:
            arrays |= {f"{name}_bias": self.bias("layers mlp", "mlp") for name in first}
            arrays["down_bias"] = self.bias("layers norm", "residual")
        return arrays

    def _experts(self, kind: LayerKind, first: tuple[str, ...]) -> dict[str, ArraySpec]:
        matrix, experts = Normal(_STD), kind.experts
        arrays = {
            **({} if kind.shared_norm else self._block_norms(kind)),
            "router": self("layers embed experts", "router", matrix, 1),
            **{name: self("layers experts embed mlp", "expert", matrix, 1) for name in first},
            "down": self("layers experts mlp embed", "expert", self.added, 1),
        }
        if experts.router_bias:
            arrays["router_bias"] = self.bias("layers experts", "")
        if experts.selection_bias:
            # no gradient reaches it: see LossConfig.balance_bias
            bias = self("layers experts", "balance", Constant(0.0))
            arrays["selection_bias"] = dataclasses.replace(bias, trained=False, dtype=jnp.float32)
        if kind.mlp.bias:
            arrays |= {f"{name}_bias": self.bias("layers experts mlp", "") for name in first}
            arrays["down_bias"] = self.bias("layers experts norm", "")
        if experts.shared:
            arrays |= {
                f"shared_{name}": self("layers embed shared_mlp", "matrix", matrix, 1)
                for name in first
            }
            arrays["shared_down"] = self("layers shared_mlp embed", "matrix", self.added, 1)
        return arrays
