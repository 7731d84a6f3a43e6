"""Muon: the momentum of each layer's matrix, made nearly orthogonal; Adam for all else.

optax.contrib.muon's numbers and state. Its Newton-Schulz steps need full matrices, and automatic
partitioning all-gathers those of all layers on every device; here every device receives layers of
its own, one at a time.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from meshwright.training.whole_layers import map_layers

_BETA = 0.95
_STEPS = 5
_RMS = 0.2  # updates as large as Adam's, so that one learning rate serves both


def muon(
    rate: optax.ScalarOrSchedule,
    input_dims: Any,
    *,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
) -> optax.GradientTransformationExtraArgs:
    """`input_dims`: of each array, how many dims of a layer its matrix reads; 0 leaves it to Adam.

    Arrays are stacked, layers first. Its update takes `shardings`, a tree like the parameters, of
    where their parts lie; without it the compiler all-gathers stacks that are split.
    """
    labels = jax.tree.map(lambda dims: "muon" if dims else "adam", input_dims)
    orthogonal = optax.chain(
        scale_by_muon(input_dims, eps=eps),
        _scale_by_shape(input_dims),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(rate),
    )
    adam = optax.adamw(rate, b1, b2, eps, weight_decay=0.0, nesterov=True)
    return optax.partition({"muon": orthogonal, "adam": adam}, labels)


def scale_by_muon(input_dims: Any, *, eps: float) -> optax.GradientTransformationExtraArgs:
    """optax.contrib.scale_by_muon, a layer at a time."""

    def update(
        updates: Any, state: Any, params: Any = None, *, shardings: Any = None, **_: Any
    ) -> Any:
        count = optax.safe_increment(state.count)
        momentum = optax.tree.update_moment(updates, state.mu, _BETA, 1)
        ahead = jax.tree.map(
            lambda m, g: _BETA * m + (1 - _BETA) * g,
            optax.tree.bias_correction(momentum, _BETA, optax.safe_increment(count)),
            optax.tree.bias_correction(updates, _BETA, count),
        )

        def update_array(dims: int, stack: Any, sharding: Any) -> Any:
            if not dims:
                return stack  # Adam's: nothing is here
            spec = P() if sharding is None else sharding.spec

            def layer(x: jax.Array, coefficients: jax.Array) -> jax.Array:
                matrix = x.reshape(_sides(x.shape, dims))
                return orthogonalize(matrix, coefficients, eps).reshape(x.shape)

            return map_layers(layer, stack, spec, state.ns_coeffs)

        if shardings is None:
            shardings = jax.tree.map(lambda _: None, input_dims)
        with jax.named_scope("newton_schulz"):
            updates = jax.tree.map(update_array, input_dims, ahead, shardings)
        return updates, optax.contrib.MuonState(count, momentum, state.ns_coeffs)

    return optax.GradientTransformationExtraArgs(optax.contrib.scale_by_muon().init, update)


def _scale_by_shape(input_dims: Any) -> optax.GradientTransformation:
    """To the same root mean square for every shape of matrix."""

    def scale(dims: int, stack: Any) -> Any:
        return stack * (_RMS * math.sqrt(max(_sides(stack.shape[1:], dims)))) if dims else stack

    return optax.stateless(lambda updates, _: jax.tree.map(scale, input_dims, updates))


def _sides(layer: tuple[int, ...], dims: int) -> tuple[int, int]:
    """Of a layer's matrix: how many numbers it reads, and how many it writes."""
    return math.prod(layer[:dims]), math.prod(layer[dims:])


def orthogonalize(x: jax.Array, coefficients: jax.Array, eps: float) -> jax.Array:
    """Newton-Schulz steps: the singular vectors of `x` stay, its singular values come near 1."""
    if x.shape[0] > x.shape[1]:
        return orthogonalize(x.T, coefficients, eps).T  # the products are of the shorter side
    x = x / (jnp.linalg.norm(x) + eps)
    a, b, c = coefficients.astype(x.dtype)
    for _ in range(_STEPS):
        squared = x @ x.T
        x = a * x + (b * squared + c * squared @ squared) @ x
    return x
