"""Attention: every kernel that runs here against a plain one in float64, values and gradients."""

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.errors import MeshwrightError
from meshwright.ops.attention import Call, attention, choose

Arrays = tuple[np.ndarray, ...]


def one_device() -> jax.sharding.Mesh:
    return mw.mesh("dp=1", devices=jax.devices()[:1], axis_types="explicit")


def inputs(batch: int, length: int, heads: int, kv_heads: int, head_dim: int = 8) -> Arrays:
    rng = np.random.default_rng(0)
    sizes = [(heads, 2.0), (kv_heads, 2.0), (kv_heads, 1.0), (heads, 1.0)]
    return tuple(
        rng.normal(size=(batch, length, n, head_dim), scale=scale).astype("f") for n, scale in sizes
    )


def documents(batch: int, length: int) -> np.ndarray:
    """Each row cut elsewhere, with padding (0) at the end."""
    segments = np.zeros((batch, length), "i")
    for row in range(batch):
        cut = 1 + (3 * row + length // 3) % (length - 2)
        segments[row, :cut], segments[row, cut : length - 1 - row % 2] = 1, 2
    return segments


def in_float64(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, given: np.ndarray,
    segments: np.ndarray | None, window: int | None,
) -> tuple[np.ndarray, Arrays]:  # fmt: skip
    """Query by query, with Python's own loops; and the gradients by the softmax's rule."""
    q, k, v, given = (x.astype("f8") for x in (q, k, v, given))
    out, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
    group = q.shape[2] // k.shape[2]
    for b, i, h in np.ndindex(q.shape[:3]):
        seen = [
            j
            for j in range(i + 1)
            if (segments is None or segments[b, j] == segments[b, i])
            and (window is None or i - j < window)
        ]
        keys, values = k[b, seen, h // group], v[b, seen, h // group]
        scores = keys @ q[b, i, h] / np.sqrt(q.shape[3])
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        out[b, i, h] = weights @ values
        of_weights = values @ given[b, i, h]
        of_scores = weights * (of_weights - weights @ of_weights) / np.sqrt(q.shape[3])
        dq[b, i, h] = of_scores @ keys
        dk[b, seen, h // group] += of_scores[:, None] * q[b, i, h]
        dv[b, seen, h // group] += weights[:, None] * given[b, i, h]
    return out, (dq, dk, dv)


def run(arrays: Arrays, segments: Any, window: int | None, kernel: str) -> tuple[Any, Any]:
    *qkv, given = arrays

    @jax.jit
    def both(q: Any, k: Any, v: Any, given: Any, segments: Any) -> Any:
        call = functools.partial(attention, segments=segments, window=window, kernel=kernel)
        out, backward = jax.vjp(call, q, k, v)
        return out, backward(given)

    return both(*qkv, given, segments)


SHORT = {
    # length, heads, kv heads, documents, window
    "causal": (16, 4, 4, False, None),
    "grouped heads": (16, 6, 2, False, None),
    "one key head": (12, 4, 1, True, None),
    "documents": (16, 4, 4, True, None),
    "window": (16, 4, 2, False, 5),
    "window and documents": (15, 4, 2, True, 4),
    "window of one": (7, 2, 1, False, 1),
    "odd length": (13, 4, 2, True, None),
    "one token": (1, 2, 1, False, None),
}
LONG = {
    # in blocks of 206, of 79, of 342
    "causal": (1030, 2, 2, False, None),
    "grouped heads and documents": (1027, 2, 1, True, None),
    "window and documents": (1026, 2, 1, True, 100),
}


def agrees(case: tuple[int, int, int, bool, int | None], kernel: str, within: float = 2e-6) -> None:
    length, heads, kv_heads, packed, window = case
    arrays = inputs(2, length, heads, kv_heads)
    segments = documents(2, length) if packed else None
    with jax.set_mesh(one_device()):
        out, slopes = run(arrays, segments, window, kernel)
    expected, expected_slopes = in_float64(*arrays, segments, window)
    np.testing.assert_allclose(out, expected, atol=within)
    for found, right in zip(slopes, expected_slopes, strict=True):
        np.testing.assert_allclose(found, right, atol=5 * within)


@pytest.mark.parametrize("case", SHORT)
def test_values_and_gradients_are_those_of_a_plain_softmax(case: str) -> None:
    agrees(SHORT[case], "dense")


@pytest.mark.parametrize("case", LONG)
def test_a_block_of_queries_at_a_time_it_is_the_same(case: str) -> None:
    agrees(LONG[case], "blockwise", within=1e-5)  # sums over a thousand keys


@pytest.mark.parametrize("kernel", ["dense", "blockwise"])
@pytest.mark.parametrize(
    ("text", "q_layout"),
    [
        ("fsdp=4,tp=2,sp=1", P("fsdp", None, "tp", None)),
        ("fsdp=2,tp=2,sp=2", P("fsdp", "sp", "tp", None)),
        ("fsdp=1,tp=1,sp=8", P(None, "sp", None, None)),
    ],
)
def test_split_over_rows_heads_and_length_it_is_the_same(
    text: str, q_layout: P, kernel: str
) -> None:
    arrays = inputs(4, 16, 8, 2)
    segments = documents(4, 16)
    expected, expected_slopes = in_float64(*arrays, segments, 6)
    with jax.set_mesh(mw.mesh(text, devices=jax.devices()[:8], axis_types="explicit")):
        placed = tuple(jax.device_put(x, q_layout) for x in arrays)
        out, slopes = run(placed, jax.device_put(segments, P(*q_layout[:2])), 6, kernel)
        assert out.sharding.is_equivalent_to(placed[0].sharding, 4)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    for found, right in zip(slopes, expected_slopes, strict=True):
        np.testing.assert_allclose(found, right, atol=1e-5)


@pytest.mark.parametrize("kernel", ["dense", "blockwise"])
def test_bfloat16_is_within_rounding(kernel: str) -> None:
    arrays = tuple(np.asarray(jnp.asarray(x, jnp.bfloat16), "f") for x in inputs(2, 12, 4, 2))
    with jax.set_mesh(one_device()):
        low = tuple(jnp.asarray(x, jnp.bfloat16) for x in arrays)
        out, _ = run(low, None, None, kernel)
    expected, _ = in_float64(*arrays, None, None)
    assert out.dtype == jnp.bfloat16
    # weights and values are rounded to 8 bits, sums are not
    assert np.abs(np.asarray(out, "f8") - expected).max() <= 3 * 2**-8 * np.abs(arrays[2]).max()


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


CALL = Call("gpu", "bfloat16", 4096, 4096, 128, None, False)


def changed(**what: Any) -> Call:
    return Call(**{**CALL.__dict__, **what})


@pytest.mark.parametrize(
    ("call", "split", "expected"),
    [
        (CALL, False, "cudnn"),
        (CALL, True, "blockwise"),
        (changed(platform="cpu"), False, "blockwise"),
        (changed(platform="cpu", length=512, key_length=512), False, "dense"),
        (changed(dtype="float32"), False, "blockwise"),
        (changed(head_dim=256), False, "blockwise"),
        (changed(window=128), False, "cudnn"),
    ],
)
def test_the_fastest_kernel_that_can_serve_is_chosen(
    call: Call, split: bool, expected: str
) -> None:
    assert choose(call, split=split) == expected


def test_what_was_passed_over_is_said(caplog: pytest.LogCaptureFixture) -> None:
    choose.cache_clear()
    with caplog.at_level(logging.INFO, logger="meshwright"):
        choose(changed(platform="cpu"))
    assert "attention: blockwise" in caplog.text
    assert "not cudnn: it runs on NVIDIA GPUs" in caplog.text
    assert "not dense: its scores grow with the square of the length (4096)" in caplog.text


def test_a_kernel_that_is_not_there_or_cannot_serve_is_an_error() -> None:
    with pytest.raises(MeshwrightError, match=r"did you mean 'cudnn'\?"):
        choose(CALL, "cuddn")
    with pytest.raises(MeshwrightError, match="cannot serve this: it runs on NVIDIA GPUs"):
        choose(changed(platform="cpu"), "cudnn")
    with pytest.raises(MeshwrightError, match="cannot serve this: the length is split over sp"):
        choose(CALL, "cudnn", split=True)


def test_long_rows_never_hold_all_scores() -> None:
    length = 4096
    shape = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)
    whole = 4 * length**2

    def memory(kernel: str) -> int:
        def loss(q: jax.Array) -> jax.Array:
            return jnp.sum(attention(q, q, q, kernel=kernel))

        with jax.set_mesh(one_device()):
            compiled = jax.jit(jax.grad(loss)).lower(shape).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert memory("dense") >= whole
    assert memory("blockwise") < 0.6 * whole
