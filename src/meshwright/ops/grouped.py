"""Grouped matmul: rows in groups, each group multiplied with a matrix of its own.

>>> rows, weights = jnp.ones((5, 2)), jnp.stack([jnp.eye(2), 2 * jnp.eye(2)])
>>> grouped_matmul(rows, weights, jnp.array([3, 2]))[:, 0].tolist()
[1.0, 1.0, 1.0, 2.0, 2.0]
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def grouped_matmul(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """[rows, out] of x [rows, in] and weights [groups, in, out]; `sizes` [groups] of the groups.

    The rows of a group are together, in the order of the groups. Rows after the last group are of
    none: what is computed of them means nothing.
    """
    return lax.ragged_dot(x, weights, sizes.astype(jnp.int32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def repeat_rows(x: jax.Array, order: jax.Array, inverse: jax.Array, times: int) -> jax.Array:
    """Each row of x [n, d] so many times, then in this order [n · times]; `inverse` undoes it.

    Its gradient is gathered and summed, where that of indexing would be scattered.
    """
    return x[order // times]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def sum_rows(y: jax.Array, order: jax.Array, inverse: jax.Array, times: int) -> jax.Array:
    """The transpose of `repeat_rows`: the sums [n, d] of the copies of each row."""
    return jnp.sum(y[inverse].reshape(-1, times, y.shape[-1]), axis=1)


def _repeat(
    x: jax.Array, order: jax.Array, inverse: jax.Array, times: int
) -> tuple[jax.Array, Any]:
    return repeat_rows(x, order, inverse, times), (order, inverse)


def _repeat_gradient(times: int, saved: Any, gradient: jax.Array) -> tuple[jax.Array, None, None]:
    return sum_rows(gradient, *saved, times), None, None


def _sum(y: jax.Array, order: jax.Array, inverse: jax.Array, times: int) -> tuple[jax.Array, Any]:
    return sum_rows(y, order, inverse, times), (order, inverse)


def _sum_gradient(times: int, saved: Any, gradient: jax.Array) -> tuple[jax.Array, None, None]:
    return repeat_rows(gradient, *saved, times), None, None


repeat_rows.defvjp(_repeat, _repeat_gradient)
sum_rows.defvjp(_sum, _sum_gradient)
