"""The relative position bias against its definition, written out pair by pair."""

import math
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.ops.relative_bias import relative_bias, relative_buckets


def bucket(distance: int, buckets: int, far: int, bidirectional: bool) -> int:
    """The bucket of one distance: exact up to a quarter or half, then by powers."""
    first = 0
    if bidirectional:
        buckets //= 2
        first = buckets if distance > 0 else 0
        away = abs(distance)
    else:
        away = max(-distance, 0)
    exact = buckets // 2
    if away < exact:
        return first + away
    # the bucket b from `exact` on begins at exact * (far / exact) ** (b / (buckets - exact))
    grown = [exact * (far / exact) ** (b / (buckets - exact)) for b in range(buckets - exact)]
    return first + exact + max(b for b, begin in enumerate(grown) if away >= begin - 1e-4)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "far"), [(32, 128), (8, 16), (16, 50)])
def test_buckets_are_exact_near_and_logarithmic_far(
    buckets: int, far: int, bidirectional: bool
) -> None:
    distances = np.arange(-300, 301)
    found = relative_buckets(distances, buckets, far, bidirectional=bidirectional)
    assert found.tolist() == [bucket(d, buckets, far, bidirectional) for d in distances.tolist()]


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(5, 9), (9, 5), (1, 1), (8, 8)])
def test_the_bias_of_a_pair_is_that_of_its_distance(
    queries: int, keys: int, bidirectional: bool
) -> None:
    rng = np.random.default_rng(0)
    table = rng.normal(size=(8, 4)).astype("f")
    weights = rng.normal(size=(2, 4, queries, keys)).astype("f")

    def total(table: Any, weights: Any) -> jax.Array:
        bias = relative_bias(
            table, queries, keys, max_distance=16, bidirectional=bidirectional, token_axes=("fsdp",)
        )
        local = lambda bias, weights: jax.lax.psum((bias[None] * weights).sum(), ("fsdp", "tp"))  # noqa: E731
        kinds = jax.typeof(bias).sharding.spec, P("fsdp", "tp")
        return jax.shard_map(local, in_specs=kinds, out_specs=P())(bias, weights)

    mesh = mw.mesh("fsdp=2,tp=2", devices=jax.devices()[:4], axis_types="explicit")
    with jax.set_mesh(mesh):
        placed = jax.device_put(table, P(None, "tp")), jax.device_put(weights, P("fsdp", "tp"))
        value, gradient = jax.jit(jax.value_and_grad(total))(*placed)
        program = jax.jit(jax.grad(total)).lower(*placed).compile().as_text()
    expected, expected_gradient = 0.0, np.zeros_like(table)
    for i in range(queries):
        for j in range(keys):
            row, weight = bucket(j - i, 8, 16, bidirectional), weights[:, :, i, j].sum(0)
            expected += math.fsum(table[row] * weight)
            expected_gradient[row] += weight
    np.testing.assert_allclose(value, expected, rtol=1e-4)
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-5)
    # numbers for each distance are summed over devices, not those of each pair
    assert f"f32[2,{queries},{keys}]{{2,1,0}} all-reduce" not in program
