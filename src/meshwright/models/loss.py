"""The loss of next tokens, fused with the LM head."""

import dataclasses
from typing import Any

import jax

from meshwright.errors import MeshwrightError
from meshwright.models.compute import Compute
from meshwright.ops import all_gather, cross_entropy, current_platform, tie_gradients


@dataclasses.dataclass(frozen=True)
class LossConfig:
    z_loss: float = 0.0
    """Weight of the squared log-normalizer, which keeps logits from drifting."""
    chunk: int = 2048
    """Tokens whose logits a device holds at a time."""

    def __post_init__(self) -> None:
        if not self.z_loss >= 0:  # nan too
            raise MeshwrightError(
                f"loss.z_loss={self.z_loss} must be at least 0; 0 means no z-loss, 1e-4 is usual"
            )
        if self.chunk < 1:
            raise MeshwrightError(f"loss.chunk={self.chunk} must be at least 1")


@dataclasses.dataclass(frozen=True)
class LmHead:
    """The weight of the LM head as it is stored, padding included."""

    weight: jax.Array  # [embed, vocab], or [vocab, embed] if it is the embedding
    tied: bool

    def gathered(self, compute: Compute) -> jax.Array:
        """The weight in the dtype of matmuls, whole over the axes that split tokens."""
        return all_gather(self.weight.astype(compute.dtype), compute.layouts.token_axes)


def next_token_loss(
    hidden: jax.Array,
    head: LmHead,
    targets: jax.Array,
    scale: jax.Array,
    vocab: int,
    compute: Compute,
    loss: LossConfig,
) -> tuple[jax.Array, jax.Array]:
    """Of hidden states [batch, length, embed]: `scale` × the summed loss, and the summed entropy.

    Targets are [batch, length], in the same order; `vocab` is the vocabulary without padding.
    """
    layouts = compute.layouts
    with jax.named_scope("loss"):
        hidden, weight = _gathered(hidden, head, compute)
        return cross_entropy(
            all_gather(hidden, layouts.axes(layouts.logits)),
            weight,
            targets,
            scale,
            z_loss=loss.z_loss,
            chunk=loss.chunk,
            tied=head.tied,
            vocab=vocab,
        )


def _gathered(hidden: jax.Array, head: LmHead, compute: Compute) -> Any:
    """The hidden states and the gathered LM head, whose gradient is made before hidden's is used.

    XLA would put the matmuls of the head's gradient off until after the backward pass of all
    layers, and keep what they multiply. An untied head has its gradient scattered first, a tied
    one after that of the embedding was added. On TPUs it is the sum in float32 that would wait:
    there this is for tied heads and for context parallelism. On one device there is nothing to
    scatter.
    """
    _, length_axes = compute.layouts.tokens.partitions
    early = current_platform() != "tpu" or head.tied or bool(length_axes)
    if not compute.layouts.token_axes or not early:
        return hidden, head.gathered(compute)
    if head.tied:
        return tie_gradients(hidden, head.gathered(compute))
    hidden, weight = tie_gradients(hidden, head.weight)
    return hidden, dataclasses.replace(head, weight=weight).gathered(compute)
