"""A float32 weight in three pieces of bfloat16: as exact as a matmul in float32."""

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.ops import float32_matmul


def test_the_product_and_its_gradients_have_the_error_of_float32() -> None:
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(64, 256)), jnp.bfloat16)
    weight = jnp.asarray(random.normal(0, 0.02, (256, 16)), jnp.float32)
    gradient = jnp.asarray(random.normal(size=(64, 16)), jnp.float32)
    y, pull = jax.vjp(jax.jit(float32_matmul), x, weight)
    of_x, of_weight = pull(gradient)
    exact_x, exact_weight, exact = (np.asarray(one, np.float64) for one in (x, weight, gradient))
    assert y.dtype == of_weight.dtype == jnp.float32
    assert of_x.dtype == jnp.bfloat16
    right = exact_x @ exact_weight
    in_bfloat16 = np.asarray(x @ weight.astype(jnp.bfloat16), np.float64)
    assert np.abs(np.asarray(y) - right).max() < 1e-6 * np.abs(right).max()
    assert np.abs(in_bfloat16 - right).max() > 1e-3 * np.abs(right).max()  # a check that can fail
    right = exact_x.T @ exact
    assert np.abs(np.asarray(of_weight) - right).max() < 1e-5 * np.abs(right).max()
    right = exact @ exact_weight.T
    assert np.abs(np.asarray(of_x, np.float64) - right).max() < 4e-3 * np.abs(right).max()
