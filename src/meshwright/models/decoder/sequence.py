"""Context parallelism of a decoder: the order of a sequence over devices, and the strategy.

plan = sequence_plan(config, compute, length)
tokens = plan.arranged(tokens)       # in the order the devices hold them
"""

import dataclasses

import jax

from meshwright.models.activations import ActivationLayouts, attention_split
from meshwright.models.compute import Compute
from meshwright.models.decoder.config import DecoderConfig
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
    mask: Mask
    context: ContextParallel

    def arranged(self, x: jax.Array) -> jax.Array:
        """[batch, length, ..] from the order of the text to that of the devices."""
        with jax.named_scope("order"):
            return to_zigzag(x) if self.context.order == "zigzag" else x

    def restored(self, x: jax.Array) -> jax.Array:
        """The reverse."""
        with jax.named_scope("order"):
            return from_zigzag(x) if self.context.order == "zigzag" else x


def sequence_plan(config: DecoderConfig, compute: Compute, length: int) -> SequencePlan:
    """The plan for sequences of this length on the current mesh."""
    split = sequence_split(config, compute.layouts, jax.sharding.get_abstract_mesh().shape, length)
    if split.ways == 1:
        return SequencePlan(split.mask, ContextParallel())
    strategy = choose_strategy(split, compute.context_parallel)
    return SequencePlan(split.mask, ContextParallel(strategy, sequence_order(split, strategy)))


def sequence_split(
    config: DecoderConfig, layouts: ActivationLayouts, sizes: dict[str, int], length: int
) -> Split:
    """How attention is split, from the layouts alone."""
    mask = Mask(window=config.sliding_window).within(length, length)
    return attention_split(config, layouts, sizes, length, mask)
