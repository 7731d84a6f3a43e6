"""Reinforcement learning on samples: from their log-probabilities to a train step.

    batch = sample_batch(step, samples)                       # of an engine: (prompt, new tokens)
    old = step.functions.log_probs(state.params, batch)       # the trainer's own, before the update
    state, report = train_on(step, state, batch, lambda new: my_loss(new, old, advantages))

The loss is any function of the log-probabilities of the sampled tokens. They are computed by one
compiled program, `functions.log_probs`: before the first update `old` and `new` have the same bits,
so every ratio is exactly 1. The train step gets the loss's gradient by each of them and carries it
through the model, so RL runs on every mesh, with every optimizer, and with LoRA.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.ops import IGNORED
from meshwright.training.abstract_step import AbstractStep
from meshwright.training.state import TrainState
from meshwright.training.step import COTANGENTS, Batch, Report

Sample = tuple[Sequence[int], Sequence[int]]
"""The tokens of a prompt, and those that were sampled after it."""


def sample_batch(step: AbstractStep, samples: Sequence[Sample]) -> Batch:
    """Samples as a batch of the step, one in a sequence; the sampled tokens are the targets.

    Fewer samples than the batch has sequences are filled up with sequences without targets.
    """
    shape = step.batch["tokens"].shape  # [micro-batches, sequences, length]
    flat = (math.prod(shape[:2]), shape[2])
    tokens, segments = np.zeros(flat, np.int32), np.zeros(flat, np.int32)
    targets = np.full(flat, IGNORED, np.int32)
    positions = np.broadcast_to(np.arange(shape[2], dtype=np.int32), flat)
    for index, (text, first) in enumerate(_texts(shape, samples)):
        tokens[index, : len(text)] = text
        targets[index, first - 1 : len(text) - 1] = text[first:]
        segments[index, : len(text)] = 1
    batch = {"tokens": tokens, "targets": targets, "segments": segments, "positions": positions}
    placed = {name: field.reshape(shape) for name, field in batch.items()}
    return jax.device_put(placed, step.functions.batch_sharding)


def by_target(step: AbstractStep, samples: Sequence[Sample], values: Sequence[Any]) -> jax.Array:
    """Numbers of each sample, one or one per sampled token, where the batch has these targets."""
    shape = step.batch["tokens"].shape
    placed = np.zeros((math.prod(shape[:2]), shape[2]), np.float32)
    texts = zip(_texts(shape, samples), values, strict=True)
    for index, ((text, first), value) in enumerate(texts):
        placed[index, first - 1 : len(text) - 1] = value
    return jax.device_put(placed.reshape(shape), step.functions.batch_sharding)


def train_on(
    step: AbstractStep,
    state: TrainState,
    batch: Batch,
    loss: Callable[[jax.Array], jax.Array],
) -> tuple[TrainState, Report]:
    """An optimizer step on a loss (a scalar) of the targets' log-probabilities, as in `batch`.

    The report has what a step of `train` reports, the loss, and the `log_probs` it was given.
    """
    with jax.set_mesh(step.mesh):
        log_probs = step.functions.log_probs(state.params, batch)
        value, cotangents = jax.value_and_grad(loss)(log_probs)
        cotangents = jax.sharding.reshard(cotangents, step.functions.batch_sharding.spec)
    state, report = step.functions.train(state, {**batch, COTANGENTS: cotangents})
    return state, report | {"loss": value, "log_probs": log_probs}


def _texts(shape: tuple[int, ...], samples: Sequence[Sample]) -> list[tuple[list[int], int]]:
    """Of each sample: its tokens, and the index of the first that was sampled."""
    most, length = shape[0] * shape[1], shape[2]
    if len(samples) > most:
        raise MeshwrightError(f"{len(samples)} samples do not fit a batch of {most} sequences")
    texts = [([*prompt, *new], len(prompt)) for prompt, new in samples]
    for text, first in texts:
        if not 0 < first < len(text) or len(text) > length:
            raise MeshwrightError(
                f"a sample has {first} tokens of a prompt and {len(text) - first} new ones; each "
                f"needs at least one, and both together at most the step's {length}"
            )
    return texts
