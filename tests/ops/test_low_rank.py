"""Dropout of a product of low rank: what is dropped, by statistics and against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from meshwright.ops import Dropout, hashed, low_rank_product

LENGTH, FEATURES = 64, 512


def kept(rate: float, *numbers: int) -> np.ndarray:
    """Of 4 sequences, as a mask of floats."""
    sequences = hashed(*numbers, jnp.arange(4)[:, None])
    noise = hashed(sequences, jnp.arange(LENGTH)[None])
    return np.asarray(Dropout(noise, rate).kept(jnp.arange(FEATURES)), np.float64)


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.5, 0.9])
def test_the_share_of_what_is_dropped_is_the_rate(rate: float) -> None:
    mask = kept(rate, 0, 1)
    deviation = np.sqrt(rate * (1 - rate))
    assert abs(mask.mean() - (1 - rate)) < 5 * deviation / np.sqrt(mask.size)
    for dims in ((0, 1), (2,), (0, 2)):  # also of each feature, token and position
        shares = mask.mean(dims)
        expected = deviation / np.sqrt(mask.size / shares.size)
        assert abs(shares.std() / expected - 1) < 0.2


def test_what_is_dropped_in_one_place_says_nothing_of_another() -> None:
    rate, masks = 0.5, [kept(0.5, 0, 1), kept(0.5, 0, 2), kept(0.5, 1, 1)]
    one = masks[0]
    pairs = [
        (one, masks[1]),  # another step
        (one, masks[2]),  # another seed
        (one[:2], one[2:]),
        (one[:, 1:], one[:, :-1]),
        (one[..., 1:], one[..., :-1]),
        (one[:, 1:, 1:], one[:, :-1, :-1]),
    ]
    for left, right in pairs:
        correlation = ((left - rate) * (right - rate)).mean() / (rate * (1 - rate))
        assert abs(correlation) < 5 / np.sqrt(left.size)


@pytest.mark.parametrize("spec", [P("x", None, "y"), P(None, ("x", "y"), None), P(None, "y", "x")])
def test_the_product_is_that_of_numpy_with_the_same_mask(spec: P) -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(4, 8, 16)).astype("f")
    a, b = (generator.normal(size=shape).astype("f") for shape in ((16, 2), (2, 6)))
    noise = hashed(7, jnp.arange(32).reshape(4, 8))
    dropout = Dropout(noise, 0.4)
    expected = (x * np.asarray(dropout.kept(jnp.arange(16)))) @ a @ b
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    over = [spec[2]] if spec[2] else []

    def run(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        inputs = jax.sharding.reshard(x, spec), jax.sharding.reshard(a, P(spec[2], None)), b
        target = P(*spec[:2], None)
        return low_rank_product("ble,em->blm", *inputs, over, target, None, dropout)

    with jax.set_mesh(mesh):
        found = np.asarray(jax.jit(run)(x, a, b))
    np.testing.assert_allclose(found, expected, atol=1e-5)
