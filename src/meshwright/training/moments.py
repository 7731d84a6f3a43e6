"""Optimizer moments kept in fewer bits than they are computed in.

    optimizer = stored_moments(optax.adamw(3e-4), "int8")  # 2 bytes a parameter instead of 8

The optimizer computes in float32. Between steps its moments are kept as bfloat16 or as 8-bit codes,
each array in the shape of its parameter: they lie where it lies, on any mesh, with no scales beside
them. Rounding is stochastic. A second moment changes by a few percent of itself or less in a step,
and rounded to the nearest it would stay where it is.

int8 codes are small floats, so that small numbers have the same relative error as large ones:

| moment | kept as | range | from one code to the next |
|---|---|---|---|
| second | 2 bits of mantissa | 2^-60 to 2^4 | 14 to 25%, of its square root 7 to 12% |
| Adam's first | in units of that root: a sign, 4 bits of mantissa | 2^-5 to 2^3 | 3 to 6% |
| any other first | a sign, 2 bits of mantissa | 2^-30 to 2^2 | 14 to 25% |

Below the range is 0. A first moment is never more than 8 times the root, so that no update is
larger than 8 learning rates, whatever was rounded.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from meshwright.training.optimizer_config import StoredMoments


@dataclasses.dataclass(frozen=True)
class FloatCode:
    """Magnitudes below 2**highest as the top bits of a float32; code 0 is 0.

    Codes go by the order of the floats: a shift is all it takes, exact on every machine.
    """

    dtype: Any
    codes: int  # above 0
    mantissa: int  # bits
    highest: int

    @property
    def lowest(self) -> float:
        """The number of code 1."""
        octaves, part = divmod(self._offset + 1, 2**self.mantissa)
        return 2.0 ** (octaves - 127) * (1 + part / 2**self.mantissa)

    @property
    def largest(self) -> float:
        """The number of the last code."""
        return 2.0**self.highest * (1 - 2.0 ** -(self.mantissa + 1))

    def decode(self, code: jax.Array) -> jax.Array:
        """The numbers of these codes, in float32."""
        signed = code.astype(jnp.int32)
        bits = (jnp.abs(signed) + self._offset) << self._shift
        magnitude = lax.bitcast_convert_type(bits, jnp.float32)
        return jnp.sign(signed).astype(jnp.float32) * magnitude

    def encode(self, x: jax.Array, random: jax.Array) -> jax.Array:
        """One of the two codes around each number, so that their mean over `random` is it.

        `random` has 16 bits.
        """
        magnitude = jnp.minimum(jnp.abs(x), self.largest)
        bits = lax.bitcast_convert_type(magnitude, jnp.uint32) + (random << (self._shift - 16))
        code = (bits >> self._shift).astype(jnp.int32) - self._offset
        is_above_zero = magnitude > random.astype(jnp.float32) * (self.lowest / 2**16)
        code = jnp.where(magnitude < self.lowest, is_above_zero.astype(jnp.int32), code)
        return jnp.where(x < 0, -code, code).astype(self.dtype)

    @property
    def _shift(self) -> int:
        return 23 - self.mantissa

    @property
    def _offset(self) -> int:
        """Of a float32's top bits to a code."""
        return ((self.highest + 127) << self.mantissa) - self.codes - 1


SECOND = FloatCode(jnp.uint8, codes=255, mantissa=2, highest=4)
IN_ROOTS = FloatCode(jnp.int8, codes=127, mantissa=4, highest=3)  # a first moment over its root
ALONE = FloatCode(jnp.int8, codes=127, mantissa=2, highest=2)  # a first moment without a second


def stored_moments(
    optimizer: optax.GradientTransformation, kept_as: StoredMoments
) -> optax.GradientTransformationExtraArgs:
    """The optimizer, with its moments `mu` and `nu` kept so between steps."""
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> Any:
        zeros = inner.init(optax.tree.cast(params, jnp.float32))
        return _of_each(zeros, lambda first, second, _: _cast(first, second, kept_as))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        updates = optax.tree.cast(updates, jnp.float32)
        updates, state = inner.update(updates, unpack(state), params, **extra)
        return updates, pack(state, kept_as)

    return optax.GradientTransformationExtraArgs(init, update)


def pack(state: Any, kept_as: StoredMoments) -> Any:
    """An optax state of float32 with its moments as they are kept.

    What is rounded up is decided by the count of steps and the place in the array, alike on every
    mesh.
    """
    if kept_as == "float32":
        return state
    return _of_each(state, _round if kept_as == "bfloat16" else _encode)


def unpack(state: Any) -> Any:
    """The moments of a packed state, in float32."""
    return _of_each(state, _decode)


def _of_each(state: Any, change: Callable[..., Any]) -> Any:
    """The state with `change` of the moments of every parameter: (mu, nu or None, seed)."""

    def changed(node: Any) -> Any:
        if not _has_moments(node):
            return node
        names = ("mu", "nu") if hasattr(node, "nu") else ("mu",)
        tree: Any = jax.tree.structure(node.mu)
        arrays = (tree.flatten_up_to(getattr(node, name)) for name in names)
        count = node.count.astype(jnp.uint32)
        done = []
        for number, (first, *second) in enumerate(zip(*arrays, strict=True)):
            seed = _mix(count ^ _mix(jnp.uint32(number)))
            done.append(change(first, second[0] if second else None, seed))
        kept = {name: tree.unflatten([pair[i] for pair in done]) for i, name in enumerate(names)}
        return node._replace(**kept)

    return jax.tree.map(changed, state, is_leaf=_has_moments)


def _has_moments(node: Any) -> bool:
    return hasattr(node, "mu")


def _cast(first: jax.Array, second: jax.Array | None, kept_as: StoredMoments) -> Any:
    """The dtypes in which moments are kept; of zeros, the codes too."""
    dtype = jnp.dtype(kept_as)
    of_second = SECOND.dtype if kept_as == "int8" else dtype
    return first.astype(dtype), None if second is None else second.astype(of_second)


def _encode(first: jax.Array, second: jax.Array | None, seed: jax.Array) -> Any:
    of_first, of_second = _random_bits(seed, first.shape)
    if second is None:
        return ALONE.encode(first, of_first), None
    code = SECOND.encode(second, of_second)
    root = jnp.sqrt(SECOND.decode(code))
    in_roots = jnp.where(root == 0, 0.0, first / jnp.where(root == 0, 1.0, root))
    return IN_ROOTS.encode(in_roots, of_first), code


def _decode(first: jax.Array, second: jax.Array | None, _: jax.Array) -> Any:
    if first.dtype != jnp.int8:
        return _cast(first, second, "float32")
    if second is None:
        return ALONE.decode(first), None
    decoded = SECOND.decode(second)
    return IN_ROOTS.decode(first) * jnp.sqrt(decoded), decoded


def _round(first: jax.Array, second: jax.Array | None, seed: jax.Array) -> Any:
    """To one of the two bfloat16 around each number, so that their mean is it."""

    def rounded(x: jax.Array | None, bits: jax.Array) -> jax.Array | None:
        if x is None:
            return None
        below = (lax.bitcast_convert_type(x, jnp.uint32) + bits) & jnp.uint32(0xFFFF0000)
        return lax.bitcast_convert_type(below, jnp.float32).astype(jnp.bfloat16)

    return tuple(map(rounded, (first, second), _random_bits(seed, first.shape)))


def _random_bits(seed: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Two numbers of 16 bits for each element, a hash of its place and the seed.

    jax.random's generators take ten times as many operations, and whole arrays of their own where
    the compiler does not join them with the update.
    """
    place = jnp.zeros(shape, jnp.uint32)
    for dim, size in enumerate(shape):
        place = place * jnp.uint32(size % 2**32) + lax.broadcasted_iota(jnp.uint32, shape, dim)
    bits = _mix(place ^ seed)
    return bits & jnp.uint32(0xFFFF), bits >> 16


def _mix(x: jax.Array) -> jax.Array:
    """A number of 32 bits whose every bit depends on every bit of x (MurmurHash3's last step)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
