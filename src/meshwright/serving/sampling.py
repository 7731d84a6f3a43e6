"""Settings of sampling: greedy, or temperature, filters, penalties and biases.

See device_sampling.py for how tokens are chosen by them.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.arithmetic import check_seed, whole_number
from meshwright.data import Tokenizer
from meshwright.errors import MeshwrightError

_MOST = 1e30  # of penalties and biases


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling settings; filters apply in the order of the fields."""

    temperature: float = 1.0
    """Sampling temperature; 0 (or anything below 1e-6) is greedy."""
    top_k: int | None = None
    """Keep the k most probable tokens."""
    top_p: float | None = None
    """Nucleus sampling: keep the smallest set of tokens whose probability reaches p."""
    min_p: float | None = None
    """Keep tokens with at least p times the probability of the most probable token."""
    repetition_penalty: float = 1.0
    """Divide positive logits (multiply negative ones) of tokens that the prompt or output has."""
    presence_penalty: float = 0.0
    """Subtract this from the logits of tokens that the output has."""
    frequency_penalty: float = 0.0
    """Subtract this for each time that the output has a token."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, number that is added to its logit)."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not _number(self.temperature) or not 0 <= self.temperature < math.inf:
            raise MeshwrightError(
                f"temperature={self.temperature!r} must be a number >= 0; 0 is greedy, 1 samples "
                "from the model's own distribution"
            )
        if self.top_k is not None and whole_number(self.top_k, "top_k") < 1:
            raise MeshwrightError(
                "top_k=0 would remove every token; give 1 or more, or leave it out"
            )
        for name, value in (("top_p", self.top_p), ("min_p", self.min_p)):
            if value is not None and not (_number(value) and 0 <= value <= 1):
                raise MeshwrightError(f"{name}={value!r} must be a probability from 0 to 1")
        if self.top_p == 0:
            raise MeshwrightError("top_p=0 would remove every token; for greedy use temperature=0")
        if not _moderate(self.repetition_penalty) or self.repetition_penalty < 1 / _MOST:
            raise MeshwrightError(
                f"repetition_penalty={self.repetition_penalty!r} must be a finite number above 0; "
                "1 changes nothing, more makes repetition less likely"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not _moderate(value):
                raise MeshwrightError(
                    f"{name}={value!r} must be a finite number; 0 changes nothing"
                )
        _check_bias(self.logit_bias)
        check_seed(self.seed)

    @property
    def has_penalties(self) -> bool:
        penalties = self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty
        return any(penalties)

    @property
    def is_adjusted(self) -> bool:
        """Whether logits are changed by what was generated, or by a bias."""
        return self.has_penalties or bool(self.logit_bias)


class KnownTokens(NamedTuple):
    """The ids that may be sampled: those that the tokenizer has, which may be fewer than the
    model's.
    """

    vocab: int
    missing: tuple[int, ...] = ()

    @staticmethod
    def of(tokenizer: Tokenizer, model_vocab: int) -> "KnownTokens":
        return KnownTokens(min(tokenizer.vocab, model_vocab), tokenizer.missing)

    def only(self, logits: jax.Array) -> jax.Array:
        """Logits [n, vocab] of the ids below `vocab`; -inf for those that are missing."""
        logits = logits[:, : self.vocab]
        return logits.at[:, np.array(self.missing)].set(-jnp.inf) if self.missing else logits


def _check_bias(logit_bias: object) -> None:
    pairs = logit_bias if isinstance(logit_bias, tuple | list) else [logit_bias]
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise MeshwrightError(
                f"logit_bias={logit_bias!r} must be pairs of a token and a number, as in "
                "((7, -1.5),)"
            )
        token, bias = pair
        whole_number(token, "a token of logit_bias")
        if not _moderate(bias):
            raise MeshwrightError(
                f"logit_bias adds {bias!r} to token {token}; give a finite number, -100 to avoid "
                "the token"
            )


def _moderate(value: Any) -> bool:
    """Whether it is a finite number, which float32 can hold (NaN compares as False)."""
    return _number(value) and abs(value) <= _MOST


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
