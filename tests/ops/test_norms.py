"""Norms and biases: against NumPy in float64, values and gradients, on any mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.ops.collectives import all_gather
from meshwright.ops.norms import NormKind, add_bias, normalize

EPS = 1e-5


def norm_in_float64(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    x = x.astype("f8")
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * scale


def gradients_in_float64(
    x: np.ndarray, scale: np.ndarray, given: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """By the quotient rule: of x and of scale."""
    x = x.astype("f8")
    r = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + EPS)
    g = given * scale
    of_x = r * g - x * r**3 * (g * x).mean(-1, keepdims=True)
    return of_x, (given * x * r).reshape(-1, x.shape[-1]).sum(0)


def both(function: Any) -> Any:
    """Its value and, of what is given for that, the gradients."""

    @jax.jit
    def run(args: Any, given: jax.Array) -> Any:
        out, backward = jax.vjp(function, *args)
        return out, backward(given)

    return run


def inputs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return (
        rng.normal(size=(4, 8, 16), scale=3).astype("f"),
        rng.normal(size=16).astype("f"),
        rng.normal(size=(4, 8, 16)).astype("f"),
    )


@pytest.mark.parametrize(
    "layout",
    [
        P(),
        P("dp", None, None),
        P("dp", "tp", None),
        P("dp", None, "tp"),
        P(None, None, ("dp", "tp")),
    ],
    ids=str,
)
def test_rms_norm_and_its_gradients_are_the_formula(layout: P) -> None:
    mesh = mw.mesh("dp=2,tp=4", devices=jax.devices()[:8], axis_types="explicit")
    x, scale, given = inputs()
    last = layout[-1] if len(layout) == 3 else None
    tokens = [axis for axis in layout[:2] if axis is not None]

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return normalize(x, all_gather(scale, tokens), NormKind(EPS))

    with jax.set_mesh(mesh):
        args = jax.device_put(x, layout), jax.device_put(scale, P(last))
        out, (of_x, of_scale) = both(norm)(args, jax.device_put(given, layout))
        assert out.sharding.is_equivalent_to(args[0].sharding, 3)
        assert of_scale.sharding.is_equivalent_to(args[1].sharding, 1)
    np.testing.assert_allclose(out, norm_in_float64(x, scale), rtol=2e-6, atol=1e-6)
    expected_x, expected_scale = gradients_in_float64(x, scale, given)
    np.testing.assert_allclose(of_x, expected_x, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(of_scale, expected_scale, rtol=1e-5, atol=2e-6)


def test_rms_norm_of_bfloat16_is_rounded_once() -> None:
    x, scale, _ = inputs()
    low = jnp.asarray(x, jnp.bfloat16)
    with jax.set_mesh(mw.mesh("dp=1", devices=jax.devices()[:1], axis_types="explicit")):
        out = normalize(low, jnp.asarray(scale), NormKind(EPS))
    assert out.dtype == jnp.bfloat16
    exact = norm_in_float64(np.asarray(low, "f8"), scale)
    np.testing.assert_allclose(np.asarray(out, "f8"), exact, rtol=2**-8)


def test_a_row_of_zeros_stays_zero() -> None:
    with jax.set_mesh(mw.mesh("dp=1", devices=jax.devices()[:1], axis_types="explicit")):
        out = normalize(jnp.zeros((1, 1, 4)), jnp.ones(4), NormKind(EPS))
    np.testing.assert_array_equal(out, 0)


def test_a_bias_is_added_and_its_gradient_is_the_sum_over_tokens() -> None:
    mesh = mw.mesh("dp=2,tp=4", devices=jax.devices()[:8], axis_types="explicit")
    rng = np.random.default_rng(1)
    x, given = (rng.normal(size=(4, 6, 8, 3)).astype("f") for _ in range(2))
    bias = rng.normal(size=(8, 3)).astype("f")
    with jax.set_mesh(mesh):
        layout = P("dp", None, "tp", None)
        args = jax.device_put(x, layout), jax.device_put(bias, P("tp", None))
        biased = both(lambda x, b: add_bias(x, all_gather(b, ("dp",))))
        out, (of_x, of_bias) = biased(args, jax.device_put(given, layout))
    np.testing.assert_array_equal(out, x + bias)
    np.testing.assert_array_equal(of_x, given)
    np.testing.assert_allclose(of_bias, given.astype("f8").sum((0, 1)), rtol=1e-5, atol=1e-6)
