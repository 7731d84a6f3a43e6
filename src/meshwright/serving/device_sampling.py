"""Choose the next tokens of all requests at once, each by its own settings.

Settings are arrays with an entry per slot, so other settings compile nothing. A token depends on
the request's seed, its position and its logits: not on the rest of the batch. There are four
programs: greedy, plain (temperature), full (filters, penalties) and full with log-probabilities; a
step uses the simplest that has what its requests ask for. No program sorts the vocabulary: that
would take longer than a decode step.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from meshwright.serving.request import Request
from meshwright.serving.sampling import KnownTokens, Sampling

TOP = 20  # most probable tokens that are returned with log-probabilities
MAX_BIAS = 300  # entries of a logit_bias
VARIANTS = ("greedy", "plain", "full", "logprobs")
_GREEDY = 1e-6  # a temperature below is greedy


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Settings:
    """Sampling settings of each slot, as arrays of the host or the device."""

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    repetition: Any
    presence: Any
    frequency: Any
    seed: Any
    bias_tokens: Any  # [slots, MAX_BIAS]; unused entries are the vocabulary's size
    bias: Any

    @staticmethod
    def empty(slots: int, vocab: int) -> "Settings":
        def full(value: float, dtype: Any = np.float32) -> npt.NDArray[Any]:
            return np.full(slots, value, dtype)

        return Settings(
            full(0), full(vocab, np.int32), full(1), full(0), full(1), full(0), full(0),
            full(0, np.uint32), np.full((slots, MAX_BIAS), vocab, np.int32),
            np.zeros((slots, MAX_BIAS), np.float32),
        )  # fmt: skip

    def set(self, slot: int, sampling: Sampling, vocab: int) -> None:
        """Note the settings of a request (on the host)."""
        self.temperature[slot] = sampling.temperature
        self.top_k[slot] = min(sampling.top_k or vocab, vocab)
        self.top_p[slot] = 1.0 if sampling.top_p is None else sampling.top_p
        self.min_p[slot] = sampling.min_p or 0.0
        self.repetition[slot] = sampling.repetition_penalty
        self.presence[slot] = sampling.presence_penalty
        self.frequency[slot] = sampling.frequency_penalty
        self.seed[slot] = sampling.seed
        self.bias_tokens[slot], self.bias[slot] = vocab, 0.0
        for index, (token, bias) in enumerate(sampling.logit_bias):
            self.bias_tokens[slot, index], self.bias[slot, index] = token, bias


def variant_of(request: Request) -> int:
    """The index of the simplest program that has what a request asks for."""
    sampling = request.sampling
    filtered = any(x not in (None, 0) for x in (sampling.top_k, sampling.min_p))
    filtered |= sampling.top_p not in (None, 1)
    if request.logprobs is not None:
        return VARIANTS.index("logprobs")
    if sampling.is_adjusted:
        return VARIANTS.index("full")
    if sampling.temperature < _GREEDY:
        return VARIANTS.index("greedy")
    return VARIANTS.index("full" if filtered else "plain")


def allowed_only(logits: jax.Array, masks: jax.Array) -> jax.Array:
    """Logits [n, vocab] with -inf where the bit of a token in `masks` [n, words] is 0.

    Words have 32 bits, those of small ids first; tokens beyond them are not allowed.
    """
    bits = (masks[:, :, None] >> jnp.arange(32)[None, None]) & 1
    allowed = bits.reshape(masks.shape[0], -1)[:, : logits.shape[1]]
    allowed = jnp.pad(allowed, ((0, 0), (0, logits.shape[1] - allowed.shape[1])))
    return jnp.where(allowed != 0, logits, -jnp.inf)


def greedy(logits: jax.Array, known: KnownTokens) -> jax.Array:
    """[n, vocab] → tokens."""
    return jnp.argmax(known.only(logits), axis=-1).astype(jnp.int32)


def plain(
    logits: jax.Array,
    settings: Settings,
    slots: jax.Array,
    positions: jax.Array,
    known: KnownTokens,
) -> jax.Array:
    """Tokens by temperature alone."""
    logits = known.only(logits)
    return _draw(logits, _scaled(logits, settings.temperature[slots]), settings, slots, positions)


def full(
    logits: jax.Array,
    settings: Settings,
    slots: jax.Array,
    positions: jax.Array,
    counts: tuple[jax.Array, jax.Array],
    known: KnownTokens,
) -> jax.Array:
    """Tokens by all settings.

    `counts` are those of each slot's prompt and output, [slots, vocab] each.
    """
    penalized = logits
    in_prompt, in_output = (x[slots] for x in counts)
    repetition = settings.repetition[slots, None]
    seen = (in_prompt > 0) | (in_output > 0)
    divided = jnp.where(penalized > 0, penalized / repetition, penalized * repetition)
    penalized = jnp.where(seen, divided, penalized)
    penalized -= settings.presence[slots, None] * (in_output > 0).astype(jnp.float32)
    penalized -= settings.frequency[slots, None] * in_output.astype(jnp.float32)
    index = jnp.arange(slots.shape[0])[:, None]
    penalized = penalized.at[index, settings.bias_tokens[slots]].add(
        settings.bias[slots], mode="drop"
    )
    penalized = known.only(penalized)
    scaled = _scaled(penalized, settings.temperature[slots])
    kept = _kept(scaled, settings.top_k[slots], settings.top_p[slots], settings.min_p[slots])
    return _draw(penalized, jnp.where(kept, scaled, -jnp.inf), settings, slots, positions)


def top_logprobs(logits: jax.Array, tokens: jax.Array, count: int) -> Any:
    """Of tokens [n]: log-probability, rank, and the most probable tokens with theirs."""
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    ahead = jnp.sum(logits > chosen[:, None], axis=-1, dtype=jnp.int32)
    top, ids = lax.top_k(logits, min(count, logits.shape[1]))
    return chosen - normalizer, ahead, ids.astype(jnp.int32), top - normalizer[:, None]


def _scaled(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    # the maximum is 0, so that no temperature makes it infinite
    above = logits - jnp.max(logits, axis=-1, keepdims=True)
    return above / jnp.maximum(temperature, _GREEDY)[:, None]


def _kept(scaled: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """Which tokens the filters keep: top-k, then top-p of these, then min-p."""
    order = _order(scaled)
    kept = _first(order, jnp.ones_like(scaled), top_k.astype(jnp.float32))
    probabilities = jax.nn.softmax(jnp.where(kept, scaled, -jnp.inf), axis=-1)
    kept &= _first(order, probabilities, top_p) | (top_p >= 1)[:, None]
    return kept & (scaled >= jnp.log(min_p)[:, None])


def _order(x: jax.Array) -> jax.Array:
    """Integers (uint32) in the order of floats (float32)."""
    bits = lax.bitcast_convert_type(x + 0.0, jnp.uint32)  # + 0.0: no negative zero
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _first(order: jax.Array, weights: jax.Array, limits: jax.Array) -> jax.Array:
    """The tokens before whom, in descending order, the weights sum up to less than the limit.

    Of equal tokens those with smaller ids are first. Bisection finds the last level of the order
    that has such tokens.
    """

    def above(level: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(order > level[:, None], weights, 0.0), axis=-1)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // jnp.uint32(2)
        enough = above(middle) < limits
        return jnp.where(enough, low, middle + jnp.uint32(1)), jnp.where(enough, middle, high)

    low = jnp.zeros(order.shape[0], jnp.uint32)
    _, level = lax.fori_loop(0, 32, halve, (low, jnp.full_like(low, 2**32 - 1)))
    equal = order == level[:, None]
    share = jnp.where(equal, weights, 0.0)
    before = above(level)[:, None] + jnp.cumsum(share, axis=-1) - share
    return (order > level[:, None]) | (equal & (before < limits[:, None]))


def _draw(
    logits: jax.Array,
    scaled: jax.Array,
    settings: Settings,
    slots: jax.Array,
    positions: jax.Array,
) -> jax.Array:
    """Greedy where the temperature is 0, else a sample."""

    def draw(seed: jax.Array, position: jax.Array, scaled: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 0), position)
        return jax.random.categorical(key, scaled).astype(jnp.int32)

    sampled = jax.vmap(draw)(settings.seed[slots], positions, scaled)
    most = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jnp.where(settings.temperature[slots] < _GREEDY, most, sampled)
