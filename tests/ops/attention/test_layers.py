"""Attention in a loop over layers: what jax computes once for all of them, and keeps."""

import jax
import jax.numpy as jnp
import pytest
from tests.ops.attention.programs import Case

from meshwright.ops.attention import Mask


@pytest.mark.parametrize(
    "case",
    [
        Case("ring", "sp=8", length=256),
        Case("ring", "sp=8", Mask(window=50), length=256),
        Case("allgather", "sp=8", length=256),
        Case("ulysses", "sp=2", length=256),
        Case("ring", "sp=1", length=1024, kernel="blockwise"),
    ],
    ids=["zigzag", "window", "gathered", "ulysses", "blockwise"],
)
@pytest.mark.parametrize("checkpointed", [True, False])
def test_no_mask_is_made_for_all_layers_and_kept(case: Case, checkpointed: bool) -> None:
    def layer(x: jax.Array, segments: jax.Array) -> jax.Array:
        return x + case.attention(x, x[:, :, :2], x[:, :, 2:], segments)

    def loss(x: jax.Array, segments: jax.Array) -> jax.Array:
        once = jax.checkpoint(layer) if checkpointed else layer
        return jnp.sum(jax.lax.scan(lambda x, _: (once(x, segments), None), x, length=3)[0])

    with jax.set_mesh(case.devices):
        q, *_, segments = case.shapes()
        program = jax.make_jaxpr(jax.grad(loss))(q, segments).jaxpr
    loop = next(step for step in program.eqns if step.primitive.name == "scan")
    assert max(array.aval.size for array in loop.invars) <= q.size
