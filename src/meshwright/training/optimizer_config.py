"""Settings of an optimizer and of the learning rate over a run."""

import dataclasses
from typing import Literal, get_args

from meshwright.errors import MeshwrightError, did_you_mean, explained

ScheduleName = Literal["cosine", "linear", "wsd", "inverse_sqrt", "constant"]
StoredMoments = Literal["float32", "bfloat16", "int8"]
Moments = Literal["auto", StoredMoments]
DEFAULT_WARMUP = 100
NAMES = ("adamw", "lion", "adafactor", "muon")


@explained("mw.OptimizerConfig(learning_rate=3e-4)")
@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Settings of the optimizer and of the learning rate over a run."""

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
        if self.name not in NAMES:
            raise MeshwrightError(
                f"optimizer {self.name!r} is not known{did_you_mean(self.name, NAMES)}"
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
