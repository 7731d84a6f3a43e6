"""Rotary position embedding, with the scalings published models use for long contexts.

>>> rope = Rope(theta=500000.0, scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192))
>>> cos, sin = rope.tables(jnp.arange(6).reshape(1, 6), head_dim=128)
>>> rotate(jnp.ones((1, 6, 2, 128)), cos, sin).shape     # [batch, length, heads, head_dim]
(1, 6, 2, 128)
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.errors import MeshwrightError


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Positions divided by a factor."""

    factor: float


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: slow frequencies divided by a factor, fast ones kept, smooth in between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq: int


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): a ramp over frequencies, and attention scaled by its length."""

    factor: float
    original_max_seq: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True  # the ramp begins and ends at whole pairs


@dataclasses.dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (Ding et al. 2024): each pair divided by its own factor, attention scaled.

    There are two lists of factors: for contexts of at most `original_max_seq`, and for longer ones.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_seq: int
    factor: float  # how many times the original length
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        for name in ("short_factors", "long_factors"):  # lists, as JSON has them
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def check_pairs(self, pairs: int) -> None:
        """Raise a MeshwrightError unless each pair that is rotated has its factors."""
        for name in ("short_factors", "long_factors"):
            if (given := len(getattr(self, name))) != pairs:
                raise MeshwrightError(
                    f"LongRoPE with {given} {name.replace('_', ' ')}: heads rotate {pairs} pairs, "
                    "and each needs one"
                )


Scaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclasses.dataclass(frozen=True)
class Rope:
    theta: float = 10000.0
    scaling: Scaling | None = None
    dims: int | None = None  # of a head, the first; None: all are rotated
    interleaved: bool = False  # pairs are neighbours (GPT-J), not one of each half

    def __post_init__(self) -> None:
        if self.dims is not None and (self.dims < 2 or self.dims % 2):
            raise MeshwrightError(
                f"rotary embedding of {self.dims} dims: it rotates pairs, so it must be even"
            )

    def frequencies(self, head_dim: int, context: int = 0) -> np.ndarray:
        """Radians per position, for each pair of a head that is rotated: [head_dim / 2].

        `context`: tokens that a sequence may have, on which LongRoPE's depend.
        """
        head_dim = self.dims or head_dim
        pair = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
        plain = 1.0 / self.theta**pair
        match self.scaling:
            case None:
                scaled = plain
            case LinearScaling(factor):
                scaled = plain / factor
            case Llama3Scaling():
                scaled = _llama3(plain, self.scaling)
            case YarnScaling():
                scaled = _yarn(plain, self.scaling, self.theta, head_dim)
            case LongRopeScaling(short, long, original):
                scaled = plain / np.asarray(long if context > original else short)
        return scaled.astype(np.float32)

    @property
    def magnitude(self) -> float:
        """Factor of cosines and sines; 1 except for YaRN and LongRoPE."""
        if not isinstance(self.scaling, YarnScaling | LongRopeScaling):
            return 1.0
        if self.scaling.attention_factor is not None:
            return self.scaling.attention_factor
        growth = math.log(max(self.scaling.factor, 1.0))
        if isinstance(self.scaling, YarnScaling):
            return 0.1 * growth + 1.0
        return math.sqrt(1.0 + growth / math.log(max(self.scaling.original_max_seq, 2)))

    def rotate(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """x [.., head_dim] rotated by its `tables`."""
        if self.dims is None or self.dims == x.shape[-1]:
            return _neighbours(x, cos, sin) if self.interleaved else rotate(x, cos, sin)
        rotated = dataclasses.replace(self, dims=None).rotate(x[..., : self.dims], cos, sin)
        return jnp.concatenate([rotated, x[..., self.dims :]], axis=-1)

    def tables(
        self, positions: jax.Array, head_dim: int, context: int = 0
    ) -> tuple[jax.Array, jax.Array]:
        """Cosines and sines for positions [batch, length]: [batch, length, 1, head_dim / 2]."""
        frequencies = jnp.asarray(self.frequencies(head_dim, context))
        angles = positions.astype(jnp.float32)[:, :, None, None] * frequencies[None, None, None, :]
        return jnp.cos(angles) * self.magnitude, jnp.sin(angles) * self.magnitude


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate pair i of each head, (x[i], x[i + head_dim / 2]), by its angle; x: [.., head_dim]."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def _neighbours(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate pair i of each head, (x[2 i], x[2 i + 1]), by its angle."""
    x32 = x.astype(jnp.float32)
    first, second = x32[..., ::2], x32[..., 1::2]
    rotated = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.reshape(x.shape).astype(x.dtype)


def _llama3(plain: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    wavelength = 2 * np.pi / plain
    rotations = scaling.original_max_seq / wavelength  # over the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    return kept * plain + (1 - kept) * plain / scaling.factor


def _yarn(plain: np.ndarray, scaling: YarnScaling, theta: float, head_dim: int) -> np.ndarray:
    def pair_with(rotations: float) -> float:
        """Index of the pair that makes this many rotations over the original context."""
        return (
            head_dim
            * math.log(scaling.original_max_seq / (rotations * 2 * math.pi))
            / (2 * math.log(theta))
        )

    first, last = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - first) / max(last - first, 0.001), 0.0, 1.0)
    return ramp * plain / scaling.factor + (1 - ramp) * plain
