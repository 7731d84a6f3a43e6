"""Optimizers by name, from optax, and the learning rate over a run.

>>> rate = learning_rate(OptimizerConfig(learning_rate=0.1, warmup_steps=10), steps=100)
>>> round(float(rate(9)), 3), round(float(rate(100)), 3)
(0.1, 0.01)
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.training.moments import StoredMoments, stored_moments
from meshwright.training.muon import muon
from meshwright.training.trainable import trained_specs

ScheduleName = Literal["cosine", "linear", "wsd", "inverse_sqrt", "constant"]
Moments = Literal["auto", StoredMoments]
DEFAULT_WARMUP = 100


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    name: str = "adamw"
    """adamw, lion, adafactor or muon."""
    learning_rate: float = 3e-4
    """Peak learning rate, reached by the last step of the warm-up."""
    schedule: ScheduleName = "cosine"
    """Decay after the warm-up: cosine, linear, wsd (constant, then linear at the end), constant, or
    inverse_sqrt (T5, PaLM: peak * sqrt(decay_from / step) from step decay_from on)."""
    warmup_steps: int | None = None
    """Steps of linear warm-up; the first step uses learning_rate / warmup_steps, not 0. By default
    100, or half of the run where that is less."""
    decay_from: int | None = None
    """inverse_sqrt only: the step (from 0) at which the decay begins; by default the end of the
    warm-up. PaLM: --optimizer.learning-rate 1e-2 --optimizer.warmup-steps 0 with 10000 here."""
    final_fraction: float = 0.1
    """cosine, linear and wsd: learning rate at the end of the run, as a fraction of the peak."""
    decay_fraction: float = 0.2
    """wsd: the fraction of all steps over which the learning rate decays."""
    b1: float = 0.9
    """Decay rate of the first moment."""
    b2: float = 0.95
    """Decay rate of the second moment."""
    eps: float = 1e-8
    """Added to the denominator of the update."""
    weight_decay: float = 0.1
    """Weight decay of matrices; norms and biases are not decayed."""
    clip_norm: float | None = 1.0
    """Gradients are scaled down to this global norm; None: no clipping."""
    moments: Moments = "auto"
    """How moments are kept between steps: float32, bfloat16 or int8, in 4, 2 or 1 bytes each; auto:
    as the parameters. adafactor has none to keep, muon none in int8."""

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise MeshwrightError(
                f"optimizer {self.name!r} is not known{did_you_mean(self.name, OPTIMIZERS)}"
            )
        choices = {"schedule": get_args(ScheduleName), "moments": get_args(Moments)}
        for name, known in choices.items():
            value = getattr(self, name)
            if value not in known:
                raise MeshwrightError(f"{name} {value!r} is not known{did_you_mean(value, known)}")
        # `not (…)`, so that nan is refused as well
        if not self.learning_rate > 0:
            raise _out_of_range(self, "learning_rate", "must be above 0, such as 3e-4")
        if self.warmup_steps is not None and self.warmup_steps < 0:
            raise _out_of_range(self, "warmup_steps", "must be at least 0; 0 means no warm-up")
        self._check_decay_from()
        for name in ("final_fraction", "decay_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise _out_of_range(self, name, "must lie between 0 and 1")
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise _out_of_range(self, name, "must be from 0 to below 1, such as 0.95")
        if not self.eps > 0:
            raise _out_of_range(self, "eps", "must be above 0, such as 1e-8")
        if not self.weight_decay >= 0:
            raise _out_of_range(self, "weight_decay", "must be at least 0; 0 means no weight decay")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise _out_of_range(self, "clip_norm", "must be above 0, or None for no clipping")
        if self.name == "adafactor" and self.moments != "auto":
            raise _out_of_range(
                self,
                "moments",
                "is not of adafactor, whose moments are factored and take little memory; leave it "
                "out, or train with adamw, lion or muon",
            )
        if self.moments == "int8" and self.clip_norm is None:
            raise _out_of_range(
                self, "moments", "holds second moments up to 14, so gradients must be clipped; "
                "give --optimizer.clip-norm 1, or moments bfloat16",
            )  # fmt: skip
        if self.name == "muon" and self.moments == "int8":
            raise _out_of_range(
                self,
                "moments",
                "is too coarse for muon, whose loss was 2 to 4% higher with it; give bfloat16, or "
                "train with adamw or lion",
            )

    def _check_decay_from(self) -> None:
        if self.decay_from is None:
            return
        if self.schedule != "inverse_sqrt":
            raise _out_of_range(
                self, "decay_from", "belongs to --optimizer.schedule inverse_sqrt; leave it out"
            )
        earliest = max(self.warmup_steps or 0, 1)
        if self.decay_from < earliest:
            raise _out_of_range(
                self, "decay_from", f"must be at least {earliest}: the decay follows the warm-up"
            )

    def warmup(self, steps: int) -> int:
        """Steps of warm-up in a run of `steps`: those asked for, or the default, shortened."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return min(DEFAULT_WARMUP, max(steps // 2, 1), self.decay_from or DEFAULT_WARMUP)


def _out_of_range(config: OptimizerConfig, name: str, rule: str) -> MeshwrightError:
    return MeshwrightError(f"optimizer.{name}={getattr(config, name)} {rule}")


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


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adamw": _adamw,
    "lion": _lion,
    "adafactor": _adafactor,
    "muon": _muon,
}


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
