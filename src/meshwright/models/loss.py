"""The LM head: logits, and the loss of next tokens fused with it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from meshwright.errors import MeshwrightError
from meshwright.models.blocks import project
from meshwright.models.compute import Compute
from meshwright.ops import Quantized, all_gather, cross_entropy, current_platform, tie_gradients


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

    weight: Any  # [embed, vocab], or [vocab, embed] if it is the embedding
    tied: bool

    def all_gathered(self, compute: Compute) -> Any:
        """The weight in the dtype of matmuls, as a matmul takes it."""
        if isinstance(self.weight, Quantized):
            return self.weight
        weight = self.weight.astype(compute.dtype)
        return all_gather(weight, compute.layouts.weight_axes, table=True)


def lm_logits(x: jax.Array, head: LmHead, vocab: int, compute: Compute) -> jax.Array:
    """Hidden states [batch, length, embed] to logits [batch, length, vocab], in float32."""
    layouts = compute.layouts
    logits = project(
        "ble,ve->blv" if head.tied else "ble,ev->blv",
        all_gather(x, layouts.all_gathered(layouts.logits)), head.all_gathered(compute),
        layouts.logits, compute, preferred_element_type=jnp.float32,
    )  # fmt: skip
    if logits.shape[2] == vocab:
        return logits
    # without padding the vocabulary is not divisible, so every device gets all of it
    return reshard(logits, P(*layouts.logits.partitions[:2], None))[..., :vocab]


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
        hidden, weight = _all_gathered(hidden, head, compute)
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


def _all_gathered(hidden: jax.Array, head: LmHead, compute: Compute) -> Any:
    """The hidden states and the all-gathered LM head; hidden's gradient waits for the head's.

    XLA would delay the matmuls of the head's gradient until after the backward pass of all layers,
    and keep their inputs. An untied head has its gradient reduce-scattered first, a tied one after
    that of the embedding was added. On TPUs it is the sum in float32 that would wait: there this is
    for tied heads and for context parallelism. On one device there is nothing to reduce.
    """
    _, length_axes = compute.layouts.tokens.partitions
    early = current_platform() != "tpu" or head.tied or bool(length_axes)
    if not compute.layouts.token_axes or not early:
        return hidden, head.all_gathered(compute)
    if head.tied:
        return tie_gradients(hidden, head.all_gathered(compute))
    hidden, weight = tie_gradients(hidden, head.weight)
    return hidden, dataclasses.replace(head, weight=weight).all_gathered(compute)
