"""A matmul of bfloat16 activations and a float32 weight, with float32's error, on bfloat16 units.

A float32 number is the sum of three bfloat16 numbers. Side by side they are one bfloat16 matmul
with three times the columns, which for a small weight costs far less than a matmul in float32.
"""

import jax
import jax.numpy as jnp
from jax import lax


def float32_matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """[rows, out] in float32 of x [rows, in] and weight [in, out]."""
    if x.dtype != jnp.bfloat16:
        return jnp.matmul(x, weight.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    return _matmul(x, weight)


@jax.custom_vjp
def _matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    if weight.dtype == jnp.bfloat16:
        return jnp.matmul(x, weight, preferred_element_type=jnp.float32)
    pieces = jnp.concatenate(_pieces(weight, 3), axis=1)
    return _sum(jnp.matmul(x, pieces, preferred_element_type=jnp.float32), 3)


def _forward(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _matmul(x, weight), (x, weight)


def _backward(
    saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """With the first two pieces of each: the gradient of x is rounded to one, in the end."""
    x, weight = saved
    high, low = _pieces(gradient, 2)
    weight_high, weight_low = _pieces(weight.astype(jnp.float32), 2)
    of_x = jnp.matmul(
        jnp.concatenate([high, low, high], axis=1),
        jnp.concatenate([weight_high, weight_high, weight_low], axis=1).T,
        preferred_element_type=jnp.float32,
    )
    both = jnp.concatenate([high, low], axis=1)
    of_weight = _sum(jnp.matmul(x.T, both, preferred_element_type=jnp.float32), 2)
    return of_x.astype(x.dtype), of_weight.astype(weight.dtype)


_matmul.defvjp(_forward, _backward)


def _pieces(array: jax.Array, count: int) -> list[jax.Array]:
    """Arrays in bfloat16, the largest part first, whose sum is the float32 array."""
    found = []
    for _ in range(count):
        # the compiler may leave out a cast back and forth, and with it the rounding
        piece = lax.reduce_precision(array, exponent_bits=8, mantissa_bits=7)
        found.append(piece.astype(jnp.bfloat16))
        array = array - piece
    return found


def _sum(array: jax.Array, count: int) -> jax.Array:
    """Of the parts of [rows, count · out] that are side by side, the smallest first."""
    return sum(reversed(jnp.split(array, count, axis=1)), start=jnp.float32(0))
