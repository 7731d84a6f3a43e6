"""How activations are laid out, from the same rules that place the weights.

Storage and compute: a weight is stored as the rules say and all-gathered over the axes that split
the tokens (fsdp, and sp beside it) before use: FSDP is that difference. Between blocks activations
follow `batch length embed`; inside a block, where tp splits heads or mlp, the rules for these.

A decode step has one token per sequence, so its activations are smaller than the weights. There
weights are `stationary`: each device multiplies with its shard of a matrix, and partial sums are
reduced. A model that fits only when it is split still works, and no device reads more than its
shard.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from jax.sharding import PartitionSpec as P

from meshwright.errors import MeshwrightError
from meshwright.layouts import Rules, axes_of
from meshwright.ops import drop_trivial_axes, split_axes
from meshwright.ops.attention import Mask, Split


@dataclasses.dataclass(frozen=True)
class ActivationLayouts:
    tokens: P  # [batch, length]
    residual: P  # [batch, length, embed], between blocks
    block: P  # the same inside a block: embed whole, unless weights are stationary
    heads: P  # [batch, length, heads, head_dim], in attention
    kv_heads: P
    mlp: P  # [batch, length, mlp]
    logits: P  # [batch, length, vocab]
    stationary: bool = False

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes that split the tokens."""
        return split_axes(self.tokens.partitions)

    @property
    def weight_axes(self) -> tuple[str, ...]:
        """The axes over which weights are all-gathered before use."""
        return () if self.stationary else self.token_axes

    @property
    def summed(self) -> tuple[str, ...]:
        """The axes over which a projection from embed is reduced."""
        return self.axes(self.residual) if self.stationary else ()

    def all_gathered(self, layout: P) -> tuple[str, ...]:
        """The axes over which the input of a projection to this layout is all-gathered."""
        return () if self.stationary else self.axes(layout)

    def axes(self, layout: P) -> tuple[str, ...]:
        """The axes that split the third dim: heads, mlp or vocab."""
        return axes_of(layout.partitions[2], layout)


@functools.lru_cache(maxsize=64)
def activation_layouts(
    rules: Rules, nontrivial: frozenset[str], stationary: bool = False
) -> ActivationLayouts:
    """The layout of each kind of activation on a mesh with these non-trivial axes."""

    def spec(dims: str) -> P:
        return drop_trivial_axes(P(*rules.layout(dims).axes), nontrivial)

    heads, kv_heads, mlp = (
        spec("batch length heads head_dim"),
        spec("batch length kv_heads head_dim"),
        spec("batch length mlp"),
    )
    logits, residual = spec("batch length vocab"), spec("batch length embed")
    batch, length = heads.partitions[:2]
    for name, other in (("kv_heads", kv_heads), ("mlp", mlp), ("vocab", logits)):
        if other.partitions[:2] != (batch, length):
            raise MeshwrightError(
                f"the rules split 'batch length {name}' as {other} but 'batch length heads "
                f"head_dim' as {heads}; inside a block batch and length must go the same way"
            )
    if heads.partitions[2] != kv_heads.partitions[2]:
        raise MeshwrightError(
            f"the rules split heads over {heads.partitions[2]} and kv_heads over "
            f"{kv_heads.partitions[2]}; query heads must be with their key heads: split both alike"
        )
    if heads.partitions[3] is not None or kv_heads.partitions[3] is not None:
        raise MeshwrightError(
            f"the rules split head_dim over {heads.partitions[3]}; attention needs it whole: "
            "('head_dim', None)"
        )
    if residual.partitions[0] != batch:
        raise MeshwrightError(
            f"the rules split batch over {batch} in a block and over {residual.partitions[0]} "
            "between blocks; put the rule for batch first"
        )
    return ActivationLayouts(
        tokens=P(batch, length),
        residual=residual,
        block=residual if stationary else P(batch, length, None),
        heads=heads,
        kv_heads=kv_heads,
        mlp=mlp,
        logits=logits,
        stationary=stationary,
    )


def attention_split(
    config: Any, layouts: ActivationLayouts, sizes: Mapping[str, int], length: int, mask: Mask
) -> Split:
    """How the devices of a mesh share the length and the heads of attention."""
    _, along, heads, _ = layouts.heads.partitions
    ways, tensor = (
        math.prod(sizes[axis] for axis in axes_of(entry, "heads")) for entry in (along, heads)
    )
    return Split(
        ways=ways,
        length=length,
        heads=config.heads // tensor,
        kv_heads=config.kv_heads // tensor,
        head_dim=config.head_dim,
        mask=mask,
    )
