"""Capped scores: every kernel and strategy that accepts them computes the definition."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.ops.attention import ContextParallel, Mask, attention
from meshwright.ops.attention.block import Block, Call, Method, with_gradient
from meshwright.ops.attention.kernels import KERNELS, explain_kernel, one_call
from meshwright.ops.attention.splash import splash_kernel

CAP = 0.7


def inputs(length: int = 16, head_dim: int = 8) -> tuple[jax.Array, ...]:
    random = np.random.default_rng(0)
    shapes = [(2, length, heads, head_dim) for heads in (4, 2, 2, 4)]
    return tuple(jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes)


def plain(q: jax.Array, k: jax.Array, v: jax.Array, window: int | None = None) -> jax.Array:
    k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    scores = CAP * jnp.tanh(scores / CAP)
    seen = Mask(window=window).seen(jnp.arange(q.shape[1]), jnp.arange(q.shape[1]))
    weights = jax.nn.softmax(jnp.where(seen[None, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def with_gradients(run: Any, *arrays: jax.Array) -> Any:
    *qkv, dout = arrays
    return jax.value_and_grad(lambda *qkv: jnp.sum(run(*qkv) * dout), argnums=(0, 1, 2))(*qkv)


def close(found: Any, right: Any, within: float = 1e-5) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(one, other, rtol=within, atol=within)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kernel", ["dense", "blockwise"])
def test_kernels_compute_the_definition(kernel: str, window: int | None) -> None:
    def run(q: Any, k: Any, v: Any) -> Any:
        return one_call(Block(q, k, v), Mask(window=window), Method(kernel, CAP))

    arrays = inputs()
    close(
        with_gradients(run, *arrays),
        with_gradients(functools.partial(plain, window=window), *arrays),
    )


def test_splash_computes_the_definition() -> None:
    kernel, mask = splash_kernel(interpret=True), Mask()
    run = with_gradient(
        lambda block: kernel.partial(kernel.forward(block, mask, softcap=CAP)),
        lambda block, output, dout: kernel.gradients(
            kernel.backward(block, mask, output, dout, softcap=CAP)
        ),
    )
    arrays = inputs(128, 128)
    found = jax.jit(lambda *x: with_gradients(lambda q, k, v: run(Block(q, k, v)), *x))(*arrays)
    close(found, with_gradients(plain, *arrays), 1e-3)


@pytest.mark.parametrize("strategy", ["ring", "allgather", "ulysses"])
def test_context_parallelism_computes_the_definition(strategy: str) -> None:
    mesh = mw.mesh("sp=2", devices=jax.devices()[:2], axis_types="explicit")
    split = NamedSharding(mesh, P(None, "sp", None, None))
    arrays = inputs()
    context = ContextParallel(strategy)

    def run(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, None, Mask(), softcap=CAP, context=context, kernel="dense")

    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, split) for x in arrays]
        found = jax.jit(lambda *x: with_gradients(run, *x))(*placed)
    close(jax.device_get(found), with_gradients(plain, *arrays))


def test_kernels_that_cannot_say_why() -> None:
    call = Call("gpu", "bfloat16", 4096, 4096, 128, Mask(), segmented=False, softcapped=True)
    name, why = explain_kernel(call)
    assert name == "blockwise"
    assert "not cudnn: it does not cap scores" in why
    assert (
        KERNELS["splash"].refuses(
            Call("tpu", "bfloat16", 256, 256, 128, Mask(), False, softcapped=True)
        )
        is None
    )
