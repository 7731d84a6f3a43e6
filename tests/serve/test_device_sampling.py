"""Filters of many requests at once keep what the filters of one request keep."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.serve.device_sampling import _kept, _order
from meshwright.serve.sampling import Sampling, filtered

VOCAB, BATCH = 11, 6
numbers = st.sampled_from([-3.0, -1.5, -1.0, 0.0, 0.25, 0.5, 1.0, 2.0, 7.5])  # with equal ones
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.5, 1.0, 3.0]),
    top_k=st.none() | st.integers(1, VOCAB),
    top_p=st.none() | st.floats(0.05, 0.999),
    min_p=st.none() | st.floats(0, 1),
)


@settings(max_examples=100)
@given(
    st.lists(st.lists(numbers, min_size=VOCAB, max_size=VOCAB), min_size=BATCH, max_size=BATCH),
    st.lists(samplings, min_size=BATCH, max_size=BATCH),
)
def test_filters_are_those_of_a_single_request(
    logits: list[list[float]], wanted: list[Sampling]
) -> None:
    x = np.array(logits, np.float32)
    expected = [
        np.isfinite(filtered(jnp.asarray(row), each)) for row, each in zip(x, wanted, strict=True)
    ]
    temperature = np.array([each.temperature for each in wanted], np.float32)
    scaled = (x - x.max(-1, keepdims=True)) / temperature[:, None]
    found = jax.jit(_kept)(
        jnp.asarray(scaled),
        jnp.asarray([each.top_k or VOCAB for each in wanted], jnp.int32),
        jnp.asarray([each.top_p or 1.0 for each in wanted], jnp.float32),
        jnp.asarray([each.min_p or 0.0 for each in wanted], jnp.float32),
    )
    np.testing.assert_array_equal(np.asarray(found), np.stack(expected))


def test_integers_have_the_order_of_floats() -> None:
    x = np.array([-np.inf, -3e38, -2.5, -1e-40, -0.0, 0.0, 1e-40, 1.0, 3e38, np.inf], np.float32)
    order = np.asarray(_order(jnp.asarray(x))).astype(np.int64)
    assert (np.diff(order) >= 0).all()
    assert order[4] == order[5]
    assert (np.diff(order[[0, 1, 2, 4, 7, 8, 9]]) > 0).all()
