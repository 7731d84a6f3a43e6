"""Attention on whole rows: the kernels that run here against a plain softmax in float64."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tests.ops.attention.programs import QUICKLY
from tests.ops.attention.reference import Arrays, Sees, documents, in_float64, inputs

import meshwright as mw
from meshwright.errors import MeshwrightError
from meshwright.ops.attention import ContextParallel, Mask, attention

ALL = Mask(causal=False)


def one_device() -> jax.sharding.Mesh:
    return mw.mesh("dp=1", devices=jax.devices()[:1], axis_types="explicit")


def eight(text: str) -> jax.sharding.Mesh:
    return mw.mesh(text, devices=jax.devices()[:8], axis_types="explicit")


def run(arrays: Arrays, segments: Any, mask: Mask, kernel: str) -> tuple[Any, Any]:
    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def both(q: Any, k: Any, v: Any, given: Any, segments: Any) -> Any:
        call = lambda *x: attention(*x, segments, mask, kernel=kernel)  # noqa: E731
        out, backward = jax.vjp(call, q, k, v)
        return out, backward(given)

    return both(*arrays, segments)


SHORT = {
    # length, heads, kv heads, documents, mask
    "causal": (16, 4, 4, False, Mask()),
    "grouped heads": (16, 6, 2, False, Mask()),
    "one key head": (12, 4, 1, True, Mask()),
    "window": (16, 4, 2, False, Mask(window=5)),
    "window and documents": (15, 4, 2, True, Mask(window=4)),
    "window of one": (7, 2, 1, False, Mask(window=1)),
    "blocks": (14, 4, 2, True, Mask(block=4)),
    "all": (13, 4, 2, True, ALL),
    "one token": (1, 2, 1, False, Mask()),
}
LONG = {
    # in blocks of 512, the last filled up
    "grouped heads and documents": (1027, 2, 1, True, Mask()),
    "window and documents": (1026, 2, 1, True, Mask(window=100)),
}


def agrees(case: tuple[int, int, int, bool, Mask], kernel: str, within: float = 2e-6) -> None:
    length, heads, kv_heads, packed, mask = case
    arrays = inputs(2, length, heads, kv_heads)
    segments = documents(2, length) if packed else None
    with jax.set_mesh(one_device()):
        out, gradients = run(arrays, segments, mask, kernel)
    expected, expected_gradients = in_float64(*arrays, segments, Sees(**dataclasses.asdict(mask)))
    np.testing.assert_allclose(out, expected, rtol=0, atol=within)
    for found, right in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(found, right, rtol=0, atol=2.5 * within)


@pytest.mark.parametrize("case", SHORT)
def test_values_and_gradients_are_those_of_a_plain_softmax(case: str) -> None:
    agrees(SHORT[case], "dense")


@pytest.mark.parametrize("case", LONG)
def test_a_block_of_queries_at_a_time_it_is_the_same(case: str) -> None:
    agrees(LONG[case], "blockwise", within=4e-6)  # sums over a thousand keys


@pytest.mark.parametrize("kernel", ["dense", "blockwise"])
def test_split_over_rows_and_heads_it_is_the_same(kernel: str) -> None:
    layout = P("fsdp", None, "tp", None)
    arrays, segments = inputs(4, 16, 8, 2), documents(4, 16)
    expected, expected_gradients = in_float64(*arrays, segments, Sees(window=6))
    with jax.set_mesh(eight("fsdp=4,tp=2,sp=1")):
        placed = tuple(jax.device_put(x, layout) for x in arrays)
        rows = jax.device_put(segments, P("fsdp", None))
        out, gradients = run(placed, rows, Mask(window=6), kernel)
        assert out.sharding.is_equivalent_to(placed[0].sharding, 4)
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-6)
    for found, right in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(found, right, rtol=0, atol=5e-6)


def test_an_axis_of_one_device_splits_nothing(caplog: pytest.LogCaptureFixture) -> None:
    arrays = inputs(1, 15, 4, 2)
    with jax.set_mesh(eight("tp=1,sp=1,dp=8")), caplog.at_level("INFO", logger="meshwright"):
        q, k, v = (jax.device_put(x, P(None, "sp", "tp", None)) for x in arrays[:3])
        out = attention(q, k, v)
    np.testing.assert_allclose(out, in_float64(*arrays)[0], rtol=0, atol=2e-6)
    assert "context parallelism" not in caplog.text


def test_without_a_mesh_it_is_the_same() -> None:
    arrays = inputs(1, 9, 4, 2)
    out = attention(*(jnp.asarray(x) for x in arrays[:3]))
    np.testing.assert_allclose(out, in_float64(*arrays)[0], rtol=0, atol=2e-6)


@pytest.mark.parametrize(("queries", "offset"), [(3, 0), (3, 5), (8, -2), (1, 7)])
def test_queries_may_stand_anywhere_along_their_keys(queries: int, offset: int) -> None:
    q, k, v, given = inputs(2, 8, 4, 2)
    with jax.set_mesh(one_device()):
        out, gradients = run(
            (q[:, :queries], k, v, given[:, :queries]), None, Mask(offset=offset), "dense"
        )
    sees = Sees(offset=offset)
    some = max(0, -offset)  # queries before all keys see nothing
    arrays = q[:, some:queries], k, v, given[:, some:queries]
    expected, expected_gradients = in_float64(
        *arrays, None, dataclasses.replace(sees, offset=offset + some)
    )
    np.testing.assert_array_equal(out[:, :some], 0)
    np.testing.assert_array_equal(gradients[0][:, :some], 0)
    np.testing.assert_allclose(out[:, some:], expected, rtol=0, atol=2e-6)
    for found, right in zip(
        (gradients[0][:, some:], *gradients[1:]), expected_gradients, strict=True
    ):
        np.testing.assert_allclose(found, right, rtol=0, atol=5e-6)


@pytest.mark.parametrize("kernel", ["dense", "blockwise"])
def test_bfloat16_is_within_its_rounding(kernel: str) -> None:
    arrays = tuple(np.asarray(jnp.asarray(x, jnp.bfloat16), "f") for x in inputs(2, 12, 4, 2))
    with jax.set_mesh(one_device()):
        low = tuple(jnp.asarray(x, jnp.bfloat16) for x in arrays)
        out, gradients = run(low, None, Mask(), kernel)
    expected, expected_gradients = in_float64(*arrays)
    # weights and values have 8 bits, sums have more
    for found, right in zip((out, *gradients), (expected, *expected_gradients), strict=True):
        assert found.dtype == jnp.bfloat16
        assert np.abs(np.asarray(found, "f8") - right).max() <= 3 * 2**-8 * np.abs(right).max()


def test_padding_gives_numbers_and_leaves_no_trace_in_documents() -> None:
    *arrays, _ = inputs(1, 8, 2, 2)
    segments = np.array([[1, 1, 1, 1, 1, 0, 0, 0]], "i")
    other = [x.copy() for x in arrays]
    for x in other:
        x[:, 5:] = 1e3
    with jax.set_mesh(one_device()):
        run = jax.jit(attention)
        first, second = (np.asarray(run(*x, segments)) for x in (arrays, other))
    assert np.isfinite(first).all()
    np.testing.assert_array_equal(first[:, :5], second[:, :5])


def test_long_rows_never_hold_all_scores() -> None:
    length = 8192
    shape = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)
    whole = 4 * length**2

    def memory(kernel: str) -> int:
        def loss(q: jax.Array) -> jax.Array:
            return jnp.sum(attention(q, q, q, kernel=kernel))

        with jax.set_mesh(one_device()):
            compiled = jax.jit(jax.grad(loss)).lower(shape).compile()
        return int(compiled.memory_analysis().temp_size_in_bytes)

    assert memory("dense") >= whole
    assert memory("blockwise") < 0.5 * whole


# ---- mistakes

WHOLE, OVER_SP = P(None, None, None, None), P(None, "sp", None, None)


def attend(
    shapes: tuple[tuple[int, ...], ...] = ((2, 16, 4, 8), (2, 16, 2, 8), (2, 16, 2, 8)),
    layouts: tuple[P, ...] = (OVER_SP,) * 3,
    segments: tuple[tuple[int, ...], P] | None = None,
    dtypes: tuple[str, ...] = ("float32",) * 3,
    mask: Mask | None = None,
    **options: Any,
) -> None:
    with jax.set_mesh(eight("tp=2,sp=4")):
        arrays = [
            jax.device_put(np.zeros(shape, dtype), layout)
            for shape, layout, dtype in zip(shapes, layouts, dtypes, strict=True)
        ]
        given = (
            None if segments is None else jax.device_put(np.zeros(segments[0], "i"), segments[1])
        )
        split = ("strategy", "order")
        context = ContextParallel(**{name: options.pop(name) for name in split if name in options})
        jax.eval_shape(
            lambda q, k, v, s: attention(q, k, v, s, mask, context=context, **options),
            *arrays,
            given,
        )


HEADS, KV = (2, 16, 4, 8), (2, 16, 2, 8)
OVER_TP = P(None, None, "tp", None)
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "rank": (
        {"shapes": ((2, 16, 32), KV, KV), "layouts": (P(None, "sp", None), OVER_SP, OVER_SP)},
        r"takes q as \[batch, length, heads, head_dim\].* not \(2, 16, 32\)",
    ),
    "values of another shape": (
        {"shapes": (HEADS, KV, (2, 16, 4, 8))}, r"not \(2, 16, 4, 8\), \(2, 16, 2, 8\) and \(2, 16, 4, 8\)"
    ),
    "rows that differ": (
        {"shapes": (HEADS, (3, 16, 2, 8), (3, 16, 2, 8))}, r"not \(2, 16, 4, 8\), \(3, 16, 2, 8\)"
    ),
    "heads": (
        {"shapes": (HEADS, (2, 16, 3, 8), (2, 16, 3, 8))},
        "4 heads cannot share 3 kv_heads evenly; heads must be a multiple",
    ),
    "dtypes": (
        {"dtypes": ("bfloat16", "float32", "float32")},
        "of one dtype, not bfloat16, float32 and float32",
    ),
    "keys whole where queries are split": (
        {"layouts": (OVER_SP, WHOLE, WHOLE)}, "needs q, k and v with the same sharding"
    ),
    "key heads whole where heads are split": (
        {"layouts": (OVER_TP, WHOLE, WHOLE)}, "needs q, k and v with the same sharding"
    ),
    "head_dim split": ({"layouts": (P(None, None, None, "tp"),) * 3}, "head_dim not sharded"),
    "documents of other rows": (
        {"segments": ((2, 8), P(None, "sp"))},
        r"segments have shape \(2, 8\); for the queries they must be \[batch, length\] = \(2, 16\)",
    ),
    "documents laid out otherwise": (
        {"segments": ((2, 16), P(None, None))}, "batch and length must be sharded alike"
    ),
    "fewer queries than keys": (
        {"shapes": ((2, 8, 4, 8), KV, KV), "strategy": "ring"},
        "as many keys as queries, not 16 and 8",
    ),
    "an offset": (
        {"mask": Mask(offset=2), "strategy": "ring"},
        "'ring' is not possible: it has no mask with an offset of 2",
    ),
    "order": ({"order": "zig-zag"}, "order='zig-zag' is not a sequence order; did you mean 'zigzag'"),
    "a window in zigzag": (
        {"order": "zigzag", "mask": Mask(window=3), "strategy": "ring"},
        "ring attention with .*window=3.* needs sequences in contiguous order, not in zigzag",
    ),
    "blocks over the edge of a chunk": (
        {"order": "zigzag", "mask": Mask(block=4), "strategy": "allgather"},
        "allgather attention with .*block=4.* needs sequences in contiguous order",
    ),
    "ulysses in zigzag": (
        {"shapes": ((2, 16, 4, 8),) * 3, "order": "zigzag", "strategy": "ulysses"},
        "ulysses attention with .* needs sequences in contiguous order",
    ),
    "strategy": ({"strategy": "rign"}, "'rign' is not a strategy; did you mean 'ring'"),
    "kernel": ({"kernel": "blokwise", "strategy": "ring"}, "did you mean 'blockwise'"),
    "a kernel of another machine": (
        {"kernel": "cudnn", "strategy": "ring"}, "'cudnn' does not support this: it runs on NVIDIA GPUs"
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_does_not_fit_together_is_an_error(mistake: str) -> None:
    given, words = MISTAKES[mistake]
    attend(layouts=(OVER_SP,) * 3)  # as it should be
    with pytest.raises(MeshwrightError, match=words):
        attend(**given)
