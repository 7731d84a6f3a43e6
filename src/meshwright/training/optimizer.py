"""Optimizers by name, from optax, and the learning rate over a run.

>>> rate = learning_rate(OptimizerConfig(learning_rate=0.1, warmup_steps=10), steps=100)
>>> round(float(rate(9)), 3), round(float(rate(100)), 3)
(0.1, 0.01)
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from meshwright.training.moments import stored_moments
from meshwright.training.muon import muon
from meshwright.training.optimizer_config import NAMES, OptimizerConfig
from meshwright.training.trainable import trained_specs

Schedule = Callable[[Any], Any]


def make_optimizer(
    config: OptimizerConfig, steps: int, arrays: Any
) -> tuple[optax.GradientTransformation, Schedule]:
    """The optax transformation of what is trained of these specs; the learning rate by step."""
    rate = learning_rate(config, steps)
    optimizer = OPTIMIZERS[config.name](config, rate, trained_specs(arrays))
    if config.moments != "auto":
        optimizer = stored_moments(optimizer, config.moments)
    return optimizer, rate


def learning_rate(config: OptimizerConfig, steps: int) -> Schedule:
    """The learning rate of each optimizer step, counted from 0, in a run of `steps`.

    With a warm-up of W steps, step s < W uses peak * (s + 1) / W: the first step trains with
    peak / W, and step W - 1 with the peak. Then it decays as the schedule says.
    """
    peak, last = config.learning_rate, config.learning_rate * config.final_fraction
    warmup = config.warmup(steps)
    rest = max(steps - warmup, 1)
    match config.schedule:
        case "cosine":
            fall = optax.cosine_decay_schedule(peak, rest, config.final_fraction)
        case "linear":
            fall = optax.linear_schedule(peak, last, rest)
        case "wsd":
            decay = min(max(round(steps * config.decay_fraction), 1), rest)
            fall = optax.linear_schedule(peak, last, decay, rest - decay)
        case "inverse_sqrt":
            fall = _inverse_sqrt(peak, max(config.decay_from or warmup, 1), warmup)
        case "constant":
            fall = optax.constant_schedule(peak)
    if warmup == 0:
        return fall
    rise = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
    return optax.join_schedules([rise, fall], [warmup])


def _inverse_sqrt(peak: float, decay_from: int, warmup: int) -> Schedule:
    """peak * sqrt(decay_from / max(step, decay_from)); optax counts from the end of the warm-up."""

    def rate(count: Any) -> Any:
        step = jnp.maximum(jnp.asarray(count, jnp.float32) + warmup, decay_from)
        return peak * jnp.sqrt(decay_from / step)

    return rate


def _mask(arrays: Any) -> Any:
    """Which arrays weight decay applies to."""
    return jax.tree.map(lambda spec: spec.is_matrix, arrays)


def _adamw(config: OptimizerConfig, rate: Schedule, arrays: Any) -> optax.GradientTransformation:
    return optax.adamw(
        rate, config.b1, config.b2, config.eps, weight_decay=config.weight_decay, mask=_mask(arrays)
    )


def _lion(config: OptimizerConfig, rate: Schedule, arrays: Any) -> optax.GradientTransformation:
    return optax.lion(
        rate, config.b1, config.b2, weight_decay=config.weight_decay, mask=_mask(arrays)
    )


def _adafactor(
    config: OptimizerConfig, rate: Schedule, arrays: Any
) -> optax.GradientTransformation:
    # decay follows the learning rate, as in the others: optax multiplies it by nothing
    factored = optax.chain(
        optax.scale_by_factored_rms(min_dim_size_to_factor=128, epsilon=1e-30),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_param_block_rms(),
    )
    return optax.chain(
        each_layer(factored, arrays),
        optax.add_decayed_weights(config.weight_decay, _mask(arrays)),
        optax.scale_by_learning_rate(rate),
    )


def _muon(config: OptimizerConfig, rate: Schedule, arrays: Any) -> optax.GradientTransformation:
    return muon(
        rate,
        # Adam updates what is not a stack of matrices
        jax.tree.map(lambda spec: spec.inputs if spec.is_stacked else 0, arrays),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
    )


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = dict(
    zip(NAMES, (_adamw, _lion, _adafactor, _muon), strict=True)
)


def each_layer(inner: optax.GradientTransformation, arrays: Any) -> optax.GradientTransformation:
    """`inner` on each layer of stacked arrays by itself, as if they were not stacked.

    What an optimizer takes over a whole array (a root mean square, factored moments) must not mix
    layers.
    """
    stacked = jax.tree.map(lambda spec: spec.is_stacked, arrays)
    lifted = optax.GradientTransformation(
        lambda params: jax.vmap(inner.init)(params),
        lambda updates, state, params=None: jax.vmap(inner.update)(updates, state, params),
    )

    def per_array(transformation: optax.GradientTransformation) -> optax.GradientTransformation:
        """Each array by itself, so that its own leading dim is the one mapped over."""

        def init(params: Any) -> Any:
            return jax.tree.map(transformation.init, params)

        def update(updates: Any, state: Any, params: Any = None) -> Any:
            outer: Any = jax.tree.structure(updates)
            leaves = (outer.flatten_up_to(tree) for tree in (updates, state, params))
            done = [transformation.update(*array) for array in zip(*leaves, strict=True)]
            return tuple(outer.unflatten(part) for part in zip(*done, strict=True))

        return optax.GradientTransformation(init, update)

    return optax.partition({True: per_array(lifted), False: per_array(inner)}, param_labels=stacked)
