"""What a loss returns; the LM head: logits, and the loss of next tokens fused with it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from meshwright.models.blocks import project
from meshwright.models.compute import Compute
from meshwright.models.settings import LossConfig
from meshwright.ops import (
    IGNORED,
    Quantized,
    add_bias,
    all_gather,
    cross_entropy,
    current_platform,
    target_log_probs,
    tie_gradients,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Metric:
    """A sum over a micro-batch and what it is divided by; over micro-batches both are added."""

    sum: jax.Array
    count: jax.Array | None = None  # None: the number of targets, or the sum of their weights


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExtraLoss:
    """A loss beside that of the targets, summed over a micro-batch, and its weight."""

    sum: jax.Array
    weight: float | jax.Array
    count: jax.Array | None = None  # as of a Metric


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossSums:
    """What `loss` of a family returns for a micro-batch; every array but `chosen` is a scalar.

    What is differentiated is `scaled` plus, of each extra loss, weight × scale × sum.
    """

    scaled: jax.Array  # `scale` × the summed loss of the targets
    count: jax.Array  # number of targets, or the sum of their weights
    metrics: Mapping[str, Metric]
    extra: Mapping[str, ExtraLoss] = dataclasses.field(default_factory=dict)
    chosen: jax.Array | None = None  # how often experts were: [layers with experts, experts]

    def total(self, scale: jax.Array) -> jax.Array:
        """What is differentiated."""
        weighted = (one.weight * scale * one.sum for one in self.extra.values())
        return sum(weighted, start=self.scaled)

    @property
    def reported(self) -> dict[str, Metric]:
        """The metrics, and each extra loss per target and without its weight."""
        extra = {name: Metric(one.sum, one.count) for name, one in self.extra.items()}
        return {**self.metrics, **extra}


def target_count(targets: jax.Array) -> jax.Array:
    """How many targets count in the loss."""
    return jnp.sum((targets != IGNORED).astype(jnp.int32))


def target_weight(targets: jax.Array, weights: jax.Array | None) -> jax.Array:
    """What a summed loss is divided by: the number of targets, or the sum of their weights."""
    if weights is None:
        return target_count(targets)
    return jnp.sum(jnp.where(targets == IGNORED, 0.0, weights))


@dataclasses.dataclass(frozen=True)
class LmHead:
    """The weight of the LM head as it is stored, padding included."""

    weight: Any  # [embed, vocab], or [vocab, embed] if it is the embedding
    tied: bool
    bias: jax.Array | None = None  # [vocab]
    softcap: float | None = None  # logits x become softcap · tanh(x / softcap)

    def all_gathered(self, compute: Compute) -> Any:
        """The weight in the dtype of matmuls, as a matmul takes it."""
        if isinstance(self.weight, Quantized):
            return self.weight
        weight = self.weight.astype(compute.dtype)
        return all_gather(weight, compute.layouts.weight_axes, table=True)

    def all_gathered_bias(self, compute: Compute) -> jax.Array | None:
        """The bias, replicated over the axes that split tokens."""
        return None if self.bias is None else all_gather(self.bias, compute.layouts.token_axes)


def lm_logits(x: jax.Array, head: LmHead, vocab: int, compute: Compute) -> jax.Array:
    """Hidden states [batch, length, embed] to logits [batch, length, vocab], in float32."""
    layouts = compute.layouts
    logits = project(
        "ble,ve->blv" if head.tied else "ble,ev->blv",
        all_gather(x, layouts.all_gathered(layouts.logits)), head.all_gathered(compute),
        layouts.logits, compute, preferred_element_type=jnp.float32,
    )  # fmt: skip
    if head.bias is not None:
        logits = add_bias(logits, head.bias.astype(logits.dtype))
    if head.softcap is not None:
        logits = head.softcap * jnp.tanh(logits / head.softcap)
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
    weights: jax.Array | None = None,
) -> LossSums:
    """The loss of hidden states [batch, length, embed]; the metric `loss` is their entropy.

    Targets and weights are [batch, length], in the same order; `vocab` is the vocabulary without
    padding.
    """
    layouts = compute.layouts
    with jax.named_scope("loss"):
        hidden, weight = _all_gathered(hidden, head, compute)
        scaled, entropy = cross_entropy(
            all_gather(hidden, layouts.axes(layouts.logits)),
            weight,
            targets,
            scale,
            z_loss=loss.z_loss,
            chunk=loss.chunk,
            tied=head.tied,
            vocab=vocab,
            bias=head.all_gathered_bias(compute),
            softcap=head.softcap,
            weights=weights,
        )
    return LossSums(scaled, target_weight(targets, weights), {"loss": Metric(entropy)})


def next_token_log_probs(
    hidden: jax.Array,
    head: LmHead,
    targets: jax.Array,
    vocab: int,
    compute: Compute,
    loss: LossConfig,
) -> jax.Array:
    """Log-probabilities of the targets [batch, length] in float32: see next_token_loss."""
    layouts = compute.layouts
    with jax.named_scope("loss"):
        hidden, weight = _all_gathered(hidden, head, compute)
        return target_log_probs(
            all_gather(hidden, layouts.axes(layouts.logits)),
            weight,
            targets,
            chunk=loss.chunk,
            tied=head.tied,
            vocab=vocab,
            bias=head.all_gathered_bias(compute),
            softcap=head.softcap,
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
