"""Context parallelism of a decoder: the order of a sequence over devices, and the strategies.

plan = sequence_plan(config, compute, length)
tokens = plan.arranged(tokens)       # in the order the devices hold them
"""

import dataclasses

import jax

from meshwright.models.activations import ActivationLayouts, attention_split
from meshwright.models.compute import Compute
from meshwright.models.decoder.config import DecoderConfig
from meshwright.models.decoder.kinds import LayerKind
from meshwright.ops.attention import (
    ContextParallel,
    Mask,
    Split,
    choose_strategy,
    from_zigzag,
    sequence_order,
    to_zigzag,
)


@dataclasses.dataclass(frozen=True)
class SequencePlan:
    order: str  # the same in all layers
    attention: tuple[tuple[Mask, ContextParallel], ...]  # of each layer kind

    def arranged(self, x: jax.Array) -> jax.Array:
        """[batch, length, ..] from the order of the text to that of the devices."""
        with jax.named_scope("order"):
            return to_zigzag(x) if self.order == "zigzag" else x

    def restored(self, x: jax.Array) -> jax.Array:
        """The reverse."""
        with jax.named_scope("order"):
            return from_zigzag(x) if self.order == "zigzag" else x


def sequence_plan(config: DecoderConfig, compute: Compute, length: int) -> SequencePlan:
    """The plan for sequences of this length on the current mesh."""
    sizes = jax.sharding.get_abstract_mesh().shape
    splits = [_split(kind, compute.layouts, sizes, length) for kind in config.pattern]
    if splits[0].ways == 1:
        return SequencePlan("contiguous", tuple((s.mask, ContextParallel()) for s in splits))
    strategies = [choose_strategy(split, compute.context_parallel) for split in splits]
    orders = set(map(sequence_order, splits, strategies))
    order = orders.pop() if len(orders) == 1 else "contiguous"
    chosen = (ContextParallel(strategy, order) for strategy in strategies)
    return SequencePlan(order, tuple(zip((s.mask for s in splits), chosen, strict=True)))


def sequence_split(
    config: DecoderConfig, layouts: ActivationLayouts, sizes: dict[str, int], length: int
) -> Split:
    """How the attention that sees most is split, from the layouts alone."""
    widest = max(config.pattern, key=lambda kind: kind.attention.keys_seen(length))
    return _split(widest, layouts, sizes, length)


def _split(
    kind: LayerKind, layouts: ActivationLayouts, sizes: dict[str, int], length: int
) -> Split:
    mask = Mask(window=kind.attention.window).within(length, length)
    split = attention_split(kind.attention, layouts, sizes, length, mask)
    return dataclasses.replace(split, softcapped=kind.attention.softcap is not None)
