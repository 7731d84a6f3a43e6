"""Functions as users write them, for audits to read."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

LAYERS, WIDTH, HIDDEN, TOKENS = 3, 512, 2048, 4096


def abstract(mesh: Mesh, dtype: Any = jnp.bfloat16) -> tuple[Any, jax.ShapeDtypeStruct]:
    """Weights split over fsdp, tokens over all axes."""

    def one(shape: tuple[int, ...], *spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    weights = {
        "in": one((LAYERS, WIDTH, HIDDEN), None, "fsdp", None),
        "out": one((LAYERS, HIDDEN, WIDTH), None, "fsdp", None),
    }
    return weights, one((TOKENS, WIDTH), mesh.axis_names, None)


def automatic_step(weights: Any, x: jax.Array) -> Any:
    """FSDP left to the partitioner: it says nowhere what is to be all-gathered or reduce-scattered."""

    def loss(weights: Any) -> jax.Array:
        def layer(x: jax.Array, weight: Any) -> Any:
            return x + jnp.tanh(x @ weight["in"]) @ weight["out"], None

        out, _ = jax.lax.scan(layer, x, weights)
        return jnp.mean(jnp.square(out.astype(jnp.float32)))

    gradient = jax.grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - g, weights, gradient)


def compiled_step(mesh: Mesh, **options: Any) -> Any:
    """The step with new weights laid out as the old ones."""
    weights, x = abstract(mesh)
    kept = jax.tree.map(lambda leaf: leaf.sharding, weights)
    lowered = jax.jit(automatic_step, out_shardings=kept).trace(weights, x).lower(**options)
    return lowered.compile()
