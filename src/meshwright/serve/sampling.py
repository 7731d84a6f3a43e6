"""Sample a token from logits: greedy, or with temperature, top-k, top-p and min-p.

A sample depends on the seed, the prompt's index, the position and the logits, but not on the mesh
or on the rest of the batch.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from meshwright.arithmetic import check_seed, whole_number
from meshwright.data import Tokenizer
from meshwright.errors import MeshwrightError
from meshwright.ops import spec_of

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


def sample(
    logits: jax.Array,
    indices: jax.Array,
    positions: jax.Array,
    sampling: Sampling,
    known: KnownTokens | None = None,
) -> jax.Array:
    """A token [batch] from logits [batch, vocab], whose vocabulary is not sharded.

    `indices` and `positions` [batch] make the random keys distinct. Only `known` tokens are
    sampled, or any without it.
    """
    batch = spec_of(logits)[0]

    def local(logits: jax.Array, indices: jax.Array, positions: jax.Array) -> jax.Array:
        logits = logits.astype(jnp.float32)
        logits = logits if known is None else known.only(logits)
        if sampling.temperature < 1e-6:  # float32 could not divide by much less
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        root = jax.random.key(sampling.seed)

        def draw(logits: jax.Array, index: jax.Array, position: jax.Array) -> jax.Array:
            key = jax.random.fold_in(jax.random.fold_in(root, index), position)
            return jax.random.categorical(key, filtered(logits, sampling)).astype(jnp.int32)

        return jax.vmap(draw)(logits, indices, positions)

    specs = (P(batch, None), P(batch), P(batch))
    return jax.shard_map(local, in_specs=specs, out_specs=P(batch))(
        logits, *(jax.sharding.reshard(x, P(batch)) for x in (indices, positions))
    )


def filtered(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Logits [vocab] divided by the temperature; -inf for tokens that a filter removes."""
    # the maximum is 0, so that no temperature makes it infinite
    scaled = (logits - jnp.max(logits)) / sampling.temperature
    kept = jnp.ones(logits.shape, bool)
    vocab = logits.shape[0]
    if sampling.top_k is not None or sampling.top_p is not None:
        # exactly k remain: of equal logits, those with smaller ids
        k = vocab if sampling.top_k is None else min(sampling.top_k, vocab)
        likeliest, ids = lax.top_k(scaled, k)
        stays = jnp.ones(k, bool)
        if sampling.top_p is not None:
            probabilities = jax.nn.softmax(likeliest)
            before = jnp.cumsum(probabilities) - probabilities
            stays = before < sampling.top_p
        kept = jnp.zeros(logits.shape, bool).at[ids].set(stays, unique_indices=True)
    if sampling.min_p:  # 0 keeps every token
        kept &= scaled >= math.log(sampling.min_p)  # the maximum is at 0
    return jnp.where(kept, scaled, -jnp.inf)


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
