"""The embedding: rows of the table, with the vocabulary and the tokens split in any way."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.ops.collectives import all_gather
from meshwright.ops.embedding import embed

VOCAB, EMBED = 32, 8

# mesh, the table, the tokens, what comes out
CASES = [
    ("dp=1,fsdp=1,tp=1,sp=1", P(None, None), P(None, None), P(None, None, None)),
    ("dp=1,fsdp=1,tp=8,sp=1", P("tp", None), P(None, None), P(None, None, None)),
    ("dp=2,fsdp=2,tp=2,sp=1", P("tp", "fsdp"), P(("dp", "fsdp"), None), P(("dp", "fsdp"), None, None)),
    ("dp=1,fsdp=2,tp=2,sp=2", P("tp", ("fsdp", "sp")), P("fsdp", "sp"), P("fsdp", "sp", None)),
    # the sum over tp scatters the sequence, or embed
    ("dp=1,fsdp=2,tp=2,sp=2", P("tp", "fsdp"), P("fsdp", "sp"), P("fsdp", ("sp", "tp"), None)),
    ("dp=1,fsdp=2,tp=4,sp=1", P("tp", None), P("fsdp", None), P("fsdp", None, "tp")),
    # the vocabulary over several axes, and over none
    ("dp=1,fsdp=2,tp=2,sp=2", P(("tp", "sp"), None), P("fsdp", None), P("fsdp", None, None)),
    ("dp=1,fsdp=8,tp=1,sp=1", P(None, "fsdp"), P("fsdp", None), P("fsdp", None, None)),
]  # fmt: skip


@pytest.mark.parametrize(("text", "table_spec", "tokens_spec", "target"), CASES)
def test_rows_and_their_gradients_are_those_of_a_plain_lookup(
    text: str, table_spec: P, tokens_spec: P, target: P
) -> None:
    rng = np.random.default_rng(0)
    table = rng.normal(size=(VOCAB, EMBED)).astype("f")
    tokens = rng.integers(0, VOCAB, (8, 8)).astype("i")
    tokens[0, :3] = (0, VOCAB - 1, VOCAB // 2)
    given = rng.normal(size=(8, 8, EMBED)).astype("f")
    count = 1 if text == "dp=1,fsdp=1,tp=1,sp=1" else 8
    mesh = mw.mesh(text, devices=jax.devices()[:count], axis_types="explicit")
    over = [
        a for entry in tokens_spec for a in (entry if isinstance(entry, tuple) else (entry,)) if a
    ]
    with jax.set_mesh(mesh):
        placed = jax.device_put(table, table_spec)
        where = jax.device_put(tokens, tokens_spec)

        @jax.jit
        def both(table: jax.Array, tokens: jax.Array, given: jax.Array) -> Any:
            out, backward = jax.vjp(lambda t: embed(all_gather(t, over), tokens, target), table)
            return out, backward(given)[0]

        out, gradient = both(placed, where, jax.device_put(given, target))
        assert out.sharding.is_equivalent_to(jax.NamedSharding(mesh, target), 3)
        assert gradient.sharding.is_equivalent_to(placed.sharding, 2)
    np.testing.assert_array_equal(out, table[tokens])
    expected = np.zeros((VOCAB, EMBED))
    np.add.at(expected, tokens, given.astype("f8"))
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)


def test_the_gradient_of_a_common_token_is_summed_in_float32() -> None:
    """4096 parts of one row: in bfloat16 a sum of ones stops at 256."""
    mesh = mw.mesh("dp=1,fsdp=1,tp=1,sp=1", devices=jax.devices()[:1], axis_types="explicit")
    with jax.set_mesh(mesh):
        table = jnp.zeros((4, 8), jnp.bfloat16)
        tokens = jnp.ones((4, 1024), jnp.int32)
        gradient = jax.grad(
            lambda t: jnp.sum(embed(t, tokens, P(None, None, None)).astype(jnp.float32))
        )
        np.testing.assert_array_equal(
            np.asarray(gradient(table)[1].astype(jnp.float32)), np.full(8, 4096.0)
        )
