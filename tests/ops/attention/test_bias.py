"""Attention with a bias, and of queries to the keys of another sequence, against float64."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tests.ops.attention.programs import QUICKLY
from tests.ops.attention.reference import Arrays, Sees, in_float64, inputs

import meshwright as mw
from meshwright.errors import MeshwrightError
from meshwright.ops import all_gather
from meshwright.ops.attention import (
    EVERYTHING,
    KERNELS,
    Call,
    ContextParallel,
    Mask,
    attention,
    blockwise,
)

BATCH, HEADS = 4, 4


def some_bias(queries: int, keys: int, heads: int = HEADS) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(heads, queries, keys)).astype("f")


def cross(queries: int, keys: int, kv_heads: int = HEADS) -> Arrays:
    """Queries of one sequence, keys and values of another, and a cotangent of the output."""
    q, _, _, dout = inputs(BATCH, queries, HEADS, kv_heads)
    _, k, v, _ = inputs(BATCH, keys, HEADS, kv_heads, seed=1)
    return q, k, v, dout


def padded(length: int, first: int) -> np.ndarray:
    """Sequences of different lengths, the rest of each padding (0)."""
    ends = length - (np.arange(BATCH) * 3 + first) % (length - 1)
    return (np.arange(length)[None] < ends[:, None]).astype("i")


def forward_and_backward(
    arrays: Arrays, segments: Any, bias: Any, mask: Mask, **options: Any
) -> tuple[jax.Array, Any]:
    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def both(q: Any, k: Any, v: Any, dout: Any, segments: Any, bias: Any) -> Any:
        def call(q: Any, k: Any, v: Any, *bias: Any) -> jax.Array:
            given = bias[0] if bias else None
            return attention(q, k, v, segments, mask, bias=given, **options)

        out, backward = jax.vjp(call, q, k, v, *([] if bias is None else [bias]))
        return out, backward(dout)

    return both(*arrays, segments, bias)


def check(found: Any, expected: Any, within: float = 2e-6) -> None:
    (out, gradients), (right_out, right_gradients) = found, expected
    np.testing.assert_allclose(out, right_out, rtol=0, atol=within)
    assert len(gradients) == len(right_gradients)
    for gradient, right in zip(gradients, right_gradients, strict=True):
        np.testing.assert_allclose(gradient, right, rtol=0, atol=5 * within)


CASES: dict[str, tuple[int, int, int, bool, Mask]] = {
    # queries, keys, kv_heads, padding, mask
    "causal": (12, 12, 4, False, Mask()),
    "encoder": (13, 13, 4, True, EVERYTHING),
    "grouped heads": (12, 12, 2, False, Mask()),
    "cross": (7, 12, 4, True, EVERYTHING),
    "one query": (1, 9, 4, True, EVERYTHING),
}


@pytest.mark.parametrize("kernel", ["dense", "blockwise"])
@pytest.mark.parametrize("case", CASES)
def test_a_bias_is_added_and_has_a_gradient(
    case: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blockwise, "BLOCK_QUERIES", 5)  # several blocks, the last of them padded
    queries, keys, kv_heads, is_padded, mask = CASES[case]
    arrays, bias = cross(queries, keys, kv_heads), some_bias(queries, keys)
    segments = None
    if is_padded:
        of_keys = padded(keys, 2)
        segments = (
            (of_keys, of_keys) if queries == keys else (np.ones((BATCH, queries), "i"), of_keys)
        )
    with jax.set_mesh(mw.mesh("dp=1", devices=jax.devices()[:1], axis_types="explicit")):
        found = forward_and_backward(arrays, segments, bias, mask, kernel=kernel)
    check(found, in_float64(*arrays, segments, Sees(causal=mask.causal), bias))


@pytest.mark.parametrize("reduced", [False, True], ids=["replicated", "reduced"])
@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [("fsdp=4,tp=2,sp=1", "auto"), ("fsdp=2,tp=2,sp=2", "ulysses"), ("fsdp=1,tp=2,sp=2", "auto")],
)
def test_on_a_mesh_the_gradient_of_the_bias_is_summed_over_the_batch(
    mesh: str, strategy: str, reduced: bool
) -> None:
    arrays, bias = cross(8, 8), some_bias(8, 8)
    segments = padded(8, 2)
    devices = jax.devices()[: math.prod(mw.MeshSpec.parse(mesh).sizes)]
    with jax.set_mesh(mw.mesh(mesh, devices=devices, axis_types="explicit")):
        layout = P("fsdp", "sp", "tp", None)
        placed = tuple(jax.device_put(x, layout) for x in arrays)
        of_tokens = jax.device_put(segments, P("fsdp", "sp"))
        of_heads = jax.device_put(bias, P("tp", None, None))

        @functools.partial(jax.jit, compiler_options=QUICKLY)
        def both(q: Any, k: Any, v: Any, dout: Any, segments: Any, bias: Any) -> Any:
            def call(q: Any, k: Any, v: Any, bias: Any) -> jax.Array:
                bias = all_gather(bias, ("fsdp", "sp")) if reduced else bias
                return attention(
                    q, k, v, segments, bias=bias, context=ContextParallel(strategy=strategy)
                )

            out, backward = jax.vjp(call, q, k, v, bias)
            return out, backward(dout)

        found = both(*placed, of_tokens, of_heads)
    check(found, in_float64(*arrays, segments, Sees(), bias))


@pytest.mark.parametrize("strategy", ["ring", "allgather", "ulysses"])
def test_cross_attention_with_both_lengths_split(strategy: str) -> None:
    arrays = cross(8, 16)
    segments = np.ones((BATCH, 8), "i"), padded(16, 2)
    mesh = mw.mesh("fsdp=2,tp=2,sp=2", devices=jax.devices()[:8], axis_types="explicit")
    with jax.set_mesh(mesh):
        placed = tuple(jax.device_put(x, P("fsdp", "sp", "tp", None)) for x in arrays)
        of_tokens = tuple(jax.device_put(x, P("fsdp", "sp")) for x in segments)
        found = forward_and_backward(
            placed, of_tokens, None, EVERYTHING, context=ContextParallel(strategy=strategy)
        )
    check(found, in_float64(*arrays, segments, Sees(causal=False)))


@pytest.mark.parametrize("kernel", ["hopper", "cudnn", "splash"])
def test_fused_kernels_refuse_a_bias_with_a_reason(kernel: str, pretended_h200: None) -> None:
    platform = "tpu" if kernel == "splash" else "gpu"
    call = Call(platform, "bfloat16", 512, 512, 64, Mask(), segmented=False, biased=True)
    assert KERNELS[kernel].refuses(call) == "it adds no bias to the scores"


@pytest.mark.parametrize("strategy", ["ring", "allgather"])
def test_rings_refuse_a_bias_and_name_what_can(strategy: str) -> None:
    mesh = mw.mesh("fsdp=1,tp=1,sp=2", devices=jax.devices()[:2], axis_types="explicit")
    with jax.set_mesh(mesh):
        x = jax.device_put(np.zeros((2, 8, 4, 8), "f"), P(None, "sp"))
        context = ContextParallel(strategy)
        with pytest.raises(MeshwrightError, match=r"it adds no bias .*; ulysses would work"):
            jax.eval_shape(
                lambda x, bias: attention(x, x, x, bias=bias, context=context),
                x,
                jnp.zeros((4, 8, 8)),
            )


@pytest.mark.parametrize(
    ("shape", "layout", "words"),
    [
        ((4, 8, 7), P("tp"), r"is \[heads, queries, keys\], here \[4, 8, 8\], not \[4, 8, 7\]"),
        ((4, 8, 8), P(), "a bias of attention is split over heads as the queries are"),
    ],
)
def test_a_bias_that_does_not_fit_is_an_error(shape: Any, layout: P, words: str) -> None:
    with jax.set_mesh(mw.mesh("dp=1,tp=2", devices=jax.devices()[:2], axis_types="explicit")):
        x = jax.device_put(np.zeros((2, 8, 4, 8), "f"), P(None, None, "tp"))
        bias = jax.device_put(np.zeros(shape, "f"), layout)
        with pytest.raises(MeshwrightError, match=words):
            jax.eval_shape(lambda x, bias: attention(x, x, x, bias=bias), x, bias)
