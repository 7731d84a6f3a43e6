"""Attention sinks: one more key for each head, with every kernel and strategy, and its gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.ops.attention import ContextParallel, Mask, attention
from meshwright.ops.attention.block import Block, Method, with_gradient
from meshwright.ops.attention.kernels import one_call
from meshwright.ops.attention.splash import splash_kernel

WINDOW = 5


def inputs(length: int = 16, head_dim: int = 8) -> tuple[jax.Array, ...]:
    """Queries, keys, values, sinks, and the cotangent of the output."""
    random = np.random.default_rng(0)
    shapes = [(2, length, heads, head_dim) for heads in (4, 2, 2, 4)]
    q, k, v, dout = (jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes)
    return q, k, v, jnp.asarray([-2.0, 0.0, 1.0, 8.0]), dout


def plain(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
    """As transformers computes it: a column more, whose weight is dropped."""
    k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    seen = Mask(window=WINDOW).seen(jnp.arange(q.shape[1]), jnp.arange(q.shape[1]))
    scores = jnp.where(seen[None, None], scores, -jnp.inf)
    column = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def with_gradients(run: Any, *arrays: jax.Array) -> Any:
    *given, dout = arrays
    return jax.value_and_grad(lambda *x: jnp.sum(run(*x) * dout), argnums=(0, 1, 2, 3))(*given)


def close(found: Any, right: Any, within: float = 1e-5) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(one, other, rtol=within, atol=within)


@pytest.mark.parametrize("kernel", ["dense", "blockwise"])
def test_kernels_compute_the_definition(kernel: str) -> None:
    def run(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        return one_call(Block(q, k, v, sinks=sinks), Mask(window=WINDOW), Method(kernel))

    close(with_gradients(run, *inputs()), with_gradients(plain, *inputs()))


def test_splash_computes_the_definition() -> None:
    kernel, mask = splash_kernel(interpret=True), Mask(window=WINDOW)
    run = with_gradient(
        lambda block: kernel.partial(kernel.forward(block, mask)),
        lambda block, output, dout: kernel.gradients(kernel.backward(block, mask, output, dout)),
    )
    arrays = inputs(128, 128)
    found = jax.jit(
        lambda *x: with_gradients(lambda q, k, v, sinks: run(Block(q, k, v, sinks=sinks)), *x)
    )(*arrays)
    close(found, with_gradients(plain, *arrays), 1e-3)


@pytest.mark.parametrize("strategy", ["ring", "allgather", "ulysses"])
def test_context_parallelism_computes_the_definition(strategy: str) -> None:
    mesh = mw.mesh("dp=2,sp=2", devices=jax.devices()[:4], axis_types="explicit")
    split, context = P("dp", "sp", None, None), ContextParallel(strategy)

    def run(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        mask = Mask(window=WINDOW)
        return attention(q, k, v, None, mask, sinks=sinks, context=context, kernel="dense")

    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, split if x.ndim == 4 else P())) for x in inputs()
        ]
        found = jax.jit(lambda *x: with_gradients(run, *x))(*placed)
    close(jax.device_get(found), with_gradients(plain, *inputs()))
