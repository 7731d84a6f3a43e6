"""Direct preference optimization (DPO): a loss of pairs of answers, against a frozen reference.

The loss of a pair is -log σ(β · (r_chosen - r_rejected)), where r is the log-probability of an
answer less that by the reference: the weights that the run starts from. The reference holds a copy
of what is trained; of a model with an adapter it is the model without it, and no copy is needed.

A sequence holds pairs: its documents 2i - 1 and 2i are the chosen and the rejected one.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.layouts import ArraySpec
from meshwright.models import ADAPTER, LossSums, Metric
from meshwright.ops import IGNORED, drop_trivial_axes, nontrivial_axes, spec_of
from meshwright.training.config import DpoConfig
from meshwright.training.trainable import unfrozen, with_unfrozen

ANSWERS = "answers"  # the field that a batch has in the step


def dpo_loss(
    log_probs: jax.Array,
    reference_log_probs: jax.Array,
    batch: dict[str, jax.Array],
    scale: jax.Array,
    settings: DpoConfig,
) -> LossSums:
    """The loss of the pairs of a micro-batch, from log-probabilities of targets [batch, length].

    The batch is one of `with_answers`. Metrics have the names and meaning of trl: of sums over the
    tokens of an answer, also where the loss takes their means.
    """
    segments, tokens = batch["segments"], batch[ANSWERS]
    counted = _counted(tokens)
    policy = _by_pair(log_probs, segments)
    ratios = policy - _by_pair(lax.stop_gradient(reference_log_probs), segments)
    scores = ratios / jnp.maximum(tokens, 1) if settings.loss_type == "sigmoid_norm" else ratios
    losses = -jax.nn.log_sigmoid(settings.beta * (scores[..., 0] - scores[..., 1]))

    def metric(values: jax.Array) -> Metric:
        return Metric(jnp.sum(jnp.where(counted, values, 0.0)))

    loss = metric(losses)
    rewards = settings.beta * ratios
    margins = rewards[..., 0] - rewards[..., 1]
    metrics = {
        "loss": loss,
        "rewards/chosen": metric(rewards[..., 0]),
        "rewards/rejected": metric(rewards[..., 1]),
        "rewards/accuracies": metric((margins > 0).astype(jnp.float32)),
        "rewards/margins": metric(margins),
        "logps/chosen": metric(policy[..., 0]),
        "logps/rejected": metric(policy[..., 1]),
    }
    return LossSums(scale * loss.sum, pair_count(batch), metrics)


def with_answers(batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The batch with the number of targets in both answers of each pair: [.., pairs, 2]."""
    targets = (batch["targets"] != IGNORED).astype(jnp.float32)
    return batch | {ANSWERS: _by_pair(targets, batch["segments"])}


def pair_count(batch: dict[str, jax.Array]) -> jax.Array:
    """How many pairs count."""
    return jnp.sum(_counted(batch[ANSWERS]).astype(jnp.int32))


def _counted(answers: jax.Array) -> jax.Array:
    """Whether a pair counts: if there is a target in both of its answers."""
    return jnp.all(answers > 0, axis=-1)


def _by_pair(values: jax.Array, segments: jax.Array) -> jax.Array:
    """Sums of values [.., length] over the documents of each pair: [.., pairs, 2].

    There are as many pairs as fit: one has at least two tokens.
    """
    length = values.shape[-1]
    spec = drop_trivial_axes(spec_of(values), nontrivial_axes())
    *outer, along = spec.partitions

    def local(values: jax.Array, segments: jax.Array) -> jax.Array:
        documents = jnp.where(segments > 0, segments - 1, length).reshape(-1, segments.shape[-1])
        flat = values.reshape(documents.shape)
        sums = jax.vmap(lambda x, ids: jax.ops.segment_sum(x, ids, length))(flat, documents)
        sums = lax.psum(sums, along) if along else sums
        pairs = length // 2
        return sums[:, : 2 * pairs].reshape(*values.shape[:-1], pairs, 2)

    arguments = (jax.sharding.reshard(x, spec) for x in (values, segments))
    out = jax.P(*outer, None, None)
    return jax.shard_map(local, in_specs=(spec, spec), out_specs=out)(*arguments)


def copied_arrays(arrays: Any, dtype: Any) -> Any:
    """ArraySpecs of the reference: what is trained, matrices in the dtype of matmuls.

    None for a model with an adapter.
    """
    if ADAPTER in arrays:
        return None

    def copied(spec: ArraySpec) -> ArraySpec:
        return dataclasses.replace(spec, dtype=dtype) if spec.is_matrix else spec

    return jax.tree.map(copied, unfrozen(arrays, arrays))


def reference_params(arrays: Any, params: Any, reference: Any) -> Any:
    """The parameters of the reference: what is frozen is the model's own."""
    if ADAPTER in params:
        return {name: tree for name, tree in params.items() if name != ADAPTER}
    return with_unfrozen(arrays, params, reference)
