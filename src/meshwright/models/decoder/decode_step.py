"""Blocks of a layer in a step that decodes few tokens on one NVIDIA GPU, by few kernels.

Such a step takes as long as its weights are read, and each further kernel takes a microsecond or
more. So the norm before a block is in two parts: `scale_for_norm` before the matmul, and a factor
in the kernel after it, which also does all that is done to heads, or chooses the experts. What
heads and experts add stays partial sums, which the next norm adds up.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from meshwright.files import log_once
from meshwright.models.blocks import Params, Update, activate, project
from meshwright.models.compute import Compute
from meshwright.models.decoder.kinds import LayerKind
from meshwright.ops import (
    PartialSums,
    current_platform,
    few_tokens_mlp,
    few_tokens_unavailable,
    nontrivial_axes,
    scale_for_norm,
    scale_unavailable,
    spec_of,
    top_experts,
    untyped,
)
from meshwright.ops.attention import (
    Heads,
    PagedTokens,
    decode_parts,
    not_for_triton,
    page_size_of,
    product_of_parts,
    write_heads,
)

_MOST_TOKENS = 2  # of the smallest program; more were not measured
EXPERT_MATRICES = ("gate", "up", "down")


@dataclasses.dataclass(frozen=True)
class DecodeStep:
    """A step that decodes so few tokens that their blocks may have these kernels."""

    tokens: PagedTokens
    # of rotary positions, if there are any: [1, tokens, 1, head_dim / 2]
    tables: tuple[jax.Array, jax.Array] | None

    @classmethod
    def of(cls, tokens: PagedTokens, tables: Any) -> "DecodeStep | None":
        """The step of these tokens, or None: with chunks of prompts it is another."""
        count = tokens.positions.size
        in_gpu = current_platform() in ("gpu", "cuda") and not nontrivial_axes()
        if tokens.starts.size or not 0 < count <= _MOST_TOKENS or not in_gpu:
            return None
        return cls(tokens, tables)

    def runs_attention(self, w: Params, pool: jax.Array, kind: LayerKind, compute: Compute) -> bool:
        """Whether `attention_block` supports a layer's attention; logs once why it does not."""
        of, rope = kind.attention, kind.attention.rope
        in_halves = rope is not None and not rope.interleaved and rope.dims in (None, of.head_dim)
        why = not_for_triton(of.head_dim, page_size_of(pool))
        return self._runs(
            "attention", w, ("wqkv", "wo"), kind, compute, (),
            (self.tokens.kernel in ("cudnn", "triton"), f"its kernel is {self.tokens.kernel!r}"),
            (pool.dtype == compute.dtype, f"pages are {pool.dtype.name}"),
            (why is None, why),
            (in_halves, "positions do not rotate the halves of a head"),
            (not (of.qkv_bias or of.output_bias), "it has biases"),
            (of.softcap is None and not of.sinks, "it caps scores or has sinks"),
            (of.scale in (None, of.head_dim**-0.5), f"scores are scaled by {of.scale}"),
            (not (of.qk_norm and of.joint_qk_norm), "a norm is over all heads"),
        )  # fmt: skip

    def runs_experts(self, w: Params, kind: LayerKind, compute: Compute) -> bool:
        """Whether `experts_block` supports a layer's experts; logs once why it does not."""
        of = kind.experts
        matrices = [name for name in EXPERT_MATRICES if name in w]
        return bool(of.count) and self._runs(
            "experts", w, matrices, kind, compute, (kind.mlp.size,),
            (isinstance(w.get("router"), jax.Array), "the router is adapted"),
            (not kind.mlp.bias and not of.router_bias, "they have biases"),
            (of.groups == 1 and not of.shared, "they are in groups, or share an mlp"),
            (of.count % 64 == 0, f"{of.count} are not a multiple of 64"),
        )  # fmt: skip

    def _runs(
        self, block: str, w: Params, matrices: Sequence[str], kind: LayerKind, compute: Compute,
        sizes: tuple[int, ...], *conditions: tuple[bool, str | None],
    ) -> bool:  # fmt: skip
        embed = w["norm"].shape if "norm" in w else ()
        are_plain = all(
            isinstance(w.get(name), jax.Array) and w[name].dtype == compute.dtype
            for name in matrices
        )
        why = few_tokens_unavailable(self.tokens.positions.size, compute.dtype, *sizes, *embed)
        every = (
            (why is None, why),
            (are_plain, "weights are adapted, quantized, apart or of another dtype"),
            (kind.norm.kind == "rms" and not kind.norm.bias, "its norm is not an RMS norm"),
            (kind.norm_places == "before" and not kind.parallel, "norms are not before each block"),
            (kind.residual_scale == 1, "updates are scaled"),
            ((unscaled := scale_unavailable(*embed)) is None, unscaled),
            *conditions,
        )
        why = next((why for holds, why in every if not holds), None)
        if why is not None:
            log_once(f"decode of few tokens: no kernels of their own for {block}: {why}")
        return why is None


def attention_block(
    x: jax.Array,
    update: Update | None,
    w: Params,
    pool: jax.Array,
    step: DecodeStep,
    kind: LayerKind,
    compute: Compute,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x [1, tokens, embed] with the update, what attention adds, and the pool of its pages."""

    def normed(x: jax.Array, update: Any, scale: jax.Array) -> Any:
        x, scaled, squares, _ = scale_for_norm(
            x[0], update, scale, kind.norm.eps, interpret=interpret
        )
        return x[None], scaled[None], squares

    def attend(
        products: jax.Array, squares: Any, w: Params, pool: Any, tokens: Any, at: Any
    ) -> Any:
        norms = (w["q_norm"], w["k_norm"]) if kind.attention.qk_norm else ()
        heads = Heads(products[0], squares, jax.tree.map(lambda table: table[0, :, 0], at), norms)
        pages, places = tokens.slots(page_size_of(pool))
        q, pool = write_heads(heads, pool, pages, places, interpret)

        def run(q: jax.Array, pool: jax.Array, wo: jax.Array, *of_tokens: jax.Array) -> PartialSums:
            window = kind.attention.window
            parts = decode_parts(q, pool, *of_tokens, window=window, interpret=interpret)
            return product_of_parts(parts, wo, interpret)

        return untyped(run, q, pool, w["wo"], tokens.tables, tokens.positions + 1), pool

    layouts = compute.layouts
    x, scaled, squares = _on_device(normed, x, update, w["norm"])
    target = P(*layouts.kv_heads.partitions[:3], None, None)
    products = project("ble,ekgd->blkgd", scaled, w["wqkv"], target, compute)
    added, pool = _on_device(attend, products, squares, w, pool, step.tokens, step.tables)
    return x, added, pool


def experts_block(
    x: jax.Array,
    update: Update | None,
    w: Params,
    padding: jax.Array,
    kind: LayerKind,
    interpret: bool = False,
) -> tuple[jax.Array, PartialSums]:
    """x [1, tokens, embed] with the update, and what the experts add."""
    of = kind.experts

    def activated(up: jax.Array, gate: jax.Array | None) -> jax.Array:
        return activate(up, gate, kind.mlp.activation, kind.mlp.clamp)

    def run(x: jax.Array, update: Any, w: Params, padding: jax.Array) -> Any:
        x, scaled, squares, logits = scale_for_norm(
            x[0], update, w["norm"], kind.norm.eps, w["router"], interpret
        )
        assert logits is not None
        chosen, weights, factor = top_experts(
            logits, w.get("selection_bias"), of.per_token, softmax=of.scores == "softmax",
            normalized=of.normalized, scale=of.scale, padding=padding[0], squares=squares,
            interpret=interpret,
        )  # fmt: skip
        arrays = {name: w[name] for name in EXPERT_MATRICES if name in w}
        return x[None], few_tokens_mlp(
            scaled, chosen, weights, arrays, activated, interpret, factor
        )

    found: tuple[jax.Array, PartialSums] = _on_device(run, x, update, w, padding)
    return found


def _on_device(run: Any, *arrays: Any) -> Any:
    """A function of the arrays of the only device."""
    specs = jax.tree.map(spec_of, arrays)
    return jax.shard_map(run, in_specs=specs, out_specs=P())(*arrays)
