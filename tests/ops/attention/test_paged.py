"""Attention over pages is attention over the sequences that lie in them."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as ragged
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.errors import MeshwrightError
from meshwright.ops.attention import (
    PagedCall,
    PagedKeys,
    PagedTokens,
    attend_to_pages,
    block,
    choose_paged,
    fill_pages,
    paged_attention,
    paged_kernels,
    paged_triton,
)
from meshwright.ops.attention.paged_kernels import pool_shape

PAGE, WIDTH, HEADS, KV_HEADS, HEAD_DIM = 4, 6, 4, 2, 8
LENGTH = 8  # of a chunk
# (tokens before, new tokens) of each sequence: two that decode, three chunks
DECODE, CHUNKS = ((5, 1), (0, 1)), ((0, 8), (0, 3), (13, 6))


def reference(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    new: int,
    window: int,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """The outputs of the last `new` tokens of one sequence, written out in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1).astype(np.float64) for x in (k, v))
    scores = np.einsum("qhd,khd->hqk", q.astype(np.float64), k) * q.shape[-1] ** -0.5
    distance = np.arange(len(k) - new, len(k))[:, None] - np.arange(len(k))[None]
    scores = np.where((distance >= 0) & (distance < window), scores, -np.inf)
    weights = np.exp(scores)
    total = weights.sum(-1, keepdims=True)
    total += 0 if sinks is None else np.exp(sinks.astype(np.float64))[:, None, None]
    return np.einsum("hqk,khd->qhd", weights / total, v)


@pytest.mark.parametrize(("window", "with_sinks"), [(None, False), (5, False), (5, True)])
@pytest.mark.parametrize("tp", [1, 2])
def test_decode_and_chunks_see_what_precedes_them(
    window: int | None, with_sinks: bool, tp: int
) -> None:
    random = np.random.default_rng(0)
    mesh = jax.make_mesh(
        (tp,), ("tp",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:tp]
    )
    pages = random.permutation(np.arange(1, 1 + WIDTH * 5)).reshape(5, WIDTH).astype(np.int32)
    pool = random.normal(size=pool_shape("plain", 32, PAGE, KV_HEADS, HEAD_DIM))
    pool = pool.astype(np.float32)
    tokens = len(DECODE) + len(CHUNKS) * LENGTH
    q, k, v = (
        random.normal(size=(1, tokens, heads, HEAD_DIM)).astype(np.float32)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    starts = [before for before, _ in CHUNKS]
    where = PagedTokens(
        jnp.asarray(pages[: len(DECODE)]), jnp.asarray([n for n, _ in DECODE], jnp.int32),
        jnp.asarray(pages[len(DECODE) :]), jnp.asarray(starts, jnp.int32),
        jnp.asarray([n for _, n in CHUNKS], jnp.int32), LENGTH, first=False, kernel="plain",
    )  # fmt: skip
    by_head = P(None, None, "tp" if tp > 1 else None, None)
    with jax.set_mesh(mesh):
        place = NamedSharding(mesh, by_head)
        more = {}
        if with_sinks:
            sinks = random.normal(size=HEADS).astype(np.float32)
            more["sinks"] = jax.device_put(sinks, NamedSharding(mesh, P(by_head[2])))
        run = jax.jit(lambda *arrays, **more: paged_attention(*arrays, window=window, **more))
        placed = *jax.device_put((q, k, v), place), jax.device_put(pool, place), where
        out, written = run(*placed, **more)
    out, written = np.asarray(out)[0], np.asarray(written)
    first = 0
    for i, (before, new) in enumerate((*DECODE, *CHUNKS)):
        own = slice(first, first + new)
        sequence = []
        for at, x in ((pages[i], k), (pages[i] + 32, v)):
            flat = written[at].reshape(-1, KV_HEADS, HEAD_DIM)[: before + new]
            np.testing.assert_array_equal(flat[before:], x[0, own])
            np.testing.assert_array_equal(
                flat[:before], pool[at].reshape(-1, KV_HEADS, HEAD_DIM)[:before]
            )
            sequence.append(flat)
        expected = reference(
            q[0, own], *sequence, new, window or 100, sinks if with_sinks else None
        )
        np.testing.assert_allclose(out[own], expected, rtol=0, atol=1e-5)
        first += 1 if i < len(DECODE) else LENGTH


@pytest.mark.parametrize("tp", [1, 2])
def test_all_tokens_of_a_sequence_see_the_keys_that_fill_its_pages(tp: int) -> None:
    random = np.random.default_rng(1)
    mesh = jax.make_mesh(
        (tp,), ("tp",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:tp]
    )
    place = NamedSharding(mesh, P(None, None, "tp" if tp > 1 else None, None))
    lengths = np.asarray([5, 0, 11], np.int32)
    pages = random.permutation(np.arange(1, 10)).reshape(3, 3).astype(np.int32)
    pool = random.normal(size=pool_shape("plain", 10, PAGE, KV_HEADS, HEAD_DIM))
    pool = pool.astype(np.float32)
    k, v = (random.normal(size=(3, 12, KV_HEADS, HEAD_DIM)).astype(np.float32) for _ in "kv")
    q = random.normal(size=(1, 2 + LENGTH, HEADS, HEAD_DIM)).astype(np.float32)
    keys = PagedKeys(*map(jnp.asarray, (pages[:2], lengths[:2], pages[2:], lengths[2:])))

    @jax.jit
    def run(q: Any, pool: Any, k: Any, v: Any) -> Any:
        pool = fill_pages(pool, k, v, jnp.asarray(pages), jnp.asarray(lengths), "plain")
        return attend_to_pages(q, pool, keys, LENGTH), pool

    with jax.set_mesh(mesh):
        out, filled = run(*(jax.device_put(x, place) for x in (q, pool, k, v)))
    out, filled = np.asarray(out)[0], np.asarray(filled)
    for i, length in enumerate(lengths):
        for at, x in ((pages[i], k), (pages[i] + 10, v)):
            before, after = (each[at].reshape(-1, KV_HEADS, HEAD_DIM) for each in (pool, filled))
            np.testing.assert_array_equal(after[:length], x[i, :length])
            np.testing.assert_array_equal(after[length:], before[length:])
    assert np.isfinite(out).all()
    for i, at in ((0, slice(0, 1)), (2, slice(2, 2 + LENGTH))):
        one_by_one = [
            reference(q[0, at][j : j + 1], k[i, : lengths[i]], v[i, : lengths[i]], 1, 100)
            for j in range(at.stop - at.start)
        ]
        np.testing.assert_allclose(out[at], np.concatenate(one_by_one), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("call", "kernel"),
    [
        (PagedCall("cuda", "bfloat16", 128, None), "cudnn"),
        (PagedCall("cuda", "float32", 128, None), "plain"),
        (PagedCall("cuda", "bfloat16", 256, None), "plain"),
        (PagedCall("cuda", "bfloat16", 128, 4096), "triton"),
        (PagedCall("cuda", "bfloat16", 96, 4096), "plain"),
        (PagedCall("cuda", "bfloat16", 64, None, pages="fp8"), "triton"),
        (PagedCall("cuda", "float32", 64, None, pages="fp8"), "plain"),
        (PagedCall("cuda", "bfloat16", 64, None, pages="fp8", page_size=8), "plain"),
        (PagedCall("tpu", "bfloat16", 128, None, pages="fp8"), "plain"),
        (PagedCall("cuda", "bfloat16", 128, None, biased=True), "plain"),
        (PagedCall("tpu", "bfloat16", 128, 4096), "ragged"),
        (PagedCall("tpu", "bfloat16", 128, None, biased=True), "plain"),
        (PagedCall("tpu", "bfloat16", 64, None), "plain"),
        (PagedCall("cpu", "float32", 64, None), "plain"),
    ],
)
def test_the_kernel_follows_from_the_call(call: PagedCall, kernel: str) -> None:
    assert choose_paged(call) == kernel


def test_a_kernel_that_cannot_is_refused_with_a_reason() -> None:
    with pytest.raises(MeshwrightError, match=r"'cudnn' does not support this: .* sliding window"):
        choose_paged(PagedCall("cuda", "bfloat16", 128, 4096), "cudnn")
    with pytest.raises(MeshwrightError, match="'ragd' is not a kernel"):
        choose_paged(PagedCall("tpu", "bfloat16", 128, None), "ragd")


@pytest.mark.skipif(
    jax.__version_info__ >= (0, 12),
    reason="lowers Triton's kernels, for which jax 0.12 needs a GPU",
)
@pytest.mark.parametrize(("many", "first"), [(32, True), (32, False), (16, True)])
def test_cudnn_reads_pages_for_decode(many: int, first: bool) -> None:
    """Lowered for an NVIDIA GPU, not run: one call for decode, one for chunks, one for the past.

    Few sequences are decoded by Triton.
    """
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])

    def array(*shape: int, dtype: Any = jnp.bfloat16, spec: Any = ()) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    by_head = P(None, None, "tp", None)
    whole = jnp.int32
    where = PagedTokens(
        array(many, 8, dtype=whole), array(many, dtype=whole), array(2, 8, dtype=whole),
        array(2, dtype=whole), array(2, dtype=whole), 128, first, "cudnn",
    )  # fmt: skip
    q, k = (array(1, many + 256, heads, 128, spec=by_head) for heads in (8, 2))
    pool = array(*pool_shape("cudnn", 100, 64, 2, 128), spec=by_head)
    with jax.set_mesh(mesh):
        traced = jax.jit(paged_attention).trace(q, k, k, pool, where)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"custom_call @__cudnn\$fmhaSoftmax.*", text)
    of_decode = int(many > 16)
    assert len(calls) == of_decode + (1 if first else 2)
    assert sum("\\22is_paged_attention\\22: true" in call for call in calls) == of_decode
    assert ("paged_decode" in text) == (not of_decode)
    assert "tensor<200x64x1x128xbf16>" in text  # the pool itself, with a head per device


def test_the_named_kernel_is_used_where_another_could_be() -> None:
    """Lowered for an NVIDIA GPU, where cudnn has the same pool."""
    assert "cudnn" not in traced("plain").lower(lowering_platforms=("cuda",)).as_text()


def test_ragged_is_one_call_on_a_mesh() -> None:
    assert str(traced("ragged").jaxpr).count("pallas_call") == 1  # lowering needs a TPU


def traced(kernel: str, dtype: Any = jnp.bfloat16) -> Any:
    """The program of a step with decode tokens and chunks, on tp=2."""
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    by_head = NamedSharding(mesh, P(None, None, "tp", None))
    whole = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    where = PagedTokens(
        whole((4, 8)), whole((4,)), whole((2, 8)), whole((2,)), whole((2,)), 16, True, kernel
    )
    q, k = (
        jax.ShapeDtypeStruct((1, 36, heads, 128), jnp.bfloat16, sharding=by_head)
        for heads in (8, 4)
    )
    shape = pool_shape(kernel, 100, 64, 4, 128)
    pool = jax.ShapeDtypeStruct(shape, dtype, sharding=by_head)
    with jax.set_mesh(mesh):
        return jax.jit(paged_attention).trace(q, k, k, pool, where)


def test_ragged_counts_no_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernel's own checks and its reference in place of it: the page table has 30 places,
    and 24 + LENGTH would be more."""
    width, page, head_dim = 5, 6, 128
    chunks = (0, 8), (0, 3), (24, 5), (0, 0)

    def run(q: jax.Array, pages: jax.Array, *where: jax.Array, **settings: Any) -> jax.Array:
        ragged.dynamic_validate_inputs(q, pages, *where)
        settings = {name: settings[name] for name in ("sm_scale", "sliding_window")}
        out = ragged.ref_ragged_paged_attention(q, pages, *where, **settings)
        return jnp.pad(out, ((0, len(q) - len(out)), (0, 0), (0, 0)), constant_values=jnp.nan)

    package = "jax.experimental.pallas.ops.tpu.ragged_paged_attention.ragged_paged_attention"
    monkeypatch.setattr(package, run)
    random = np.random.default_rng(0)
    sequences = len(DECODE) + len(chunks)
    tables = random.permutation(np.arange(1, 1 + width * sequences)).astype(np.int32)
    tables = tables.reshape(sequences, width)
    where = PagedTokens(
        jnp.asarray(tables[: len(DECODE)]), jnp.asarray([n for n, _ in DECODE], jnp.int32),
        jnp.asarray(tables[len(DECODE) :]), jnp.asarray([n for n, _ in chunks], jnp.int32),
        jnp.asarray([n for _, n in chunks], jnp.int32), LENGTH, first=False, kernel="ragged",
    )  # fmt: skip
    pages = random.normal(size=(1 + width * sequences, page, 2 * KV_HEADS, head_dim))
    pages = pages.astype(np.float32)
    q = random.normal(size=(len(DECODE) + len(chunks) * LENGTH, HEADS, head_dim))
    q = q.astype(np.float32)
    out = np.asarray(
        paged_kernels._ragged(jnp.asarray(q), None, None, jnp.asarray(pages), where, None)  # type: ignore[arg-type]
    )
    assert np.isfinite(out).all()
    first = 0
    for i, (before, new) in enumerate((*DECODE, *chunks)):
        flat = pages[tables[i]].reshape(-1, KV_HEADS, 2, head_dim)[: before + new]
        own = slice(first, first + new)
        if new:
            expected = reference(q[own], flat[:, :, 0], flat[:, :, 1], new, 100)
            np.testing.assert_allclose(out[own], expected, rtol=0, atol=1e-5)
        first += 1 if i < len(DECODE) else LENGTH


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_triton_is_a_call_to_write_and_two_to_attend_on_a_mesh(dtype: Any) -> None:
    calls = re.findall(r"name=(\w+)", str(traced("triton", dtype).jaxpr))
    named = [name for name in calls if "page" in name]
    assert named == ["write_pages", "paged_decode", "paged_decode_merged"]


@pytest.mark.parametrize(("heads", "head_dim"), [(2, 16), (3, 24)])  # and no powers of two
def test_triton_writes_tokens_into_their_pages(heads: int, head_dim: int) -> None:
    random = np.random.default_rng(2)
    pool, k, v = (
        random.normal(size=(*first, heads, head_dim)).astype(np.float32)
        for first in ((2 * 7, 8), (5,), (5,))
    )
    pages, places = np.array([3, 3, 6, 0, 1]), np.array([0, 7, 2, 5, 5])
    found = paged_triton.write_pages(
        *(jnp.asarray(x) for x in (pool, k, v, pages, places)), interpret=True
    )
    pool[pages, places], pool[7 + pages, places] = k, v
    np.testing.assert_array_equal(found, pool)


SEVERAL_PROGRAMS = [
    (3, 8, 2, 5, 16, None),
    (2, 4, 4, 9, 8, None),
    (3, 8, 2, 9, 16, 20),
    (2, 8, 1, 40, 16, 100),  # the first of which see nothing
]


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "width", "page", "window", "dtype"),
    [
        *(
            (*case, dtype)
            for case in SEVERAL_PROGRAMS
            for dtype in (jnp.float32, jnp.float8_e4m3fn)
        ),
        (80, 8, 8, 3, 16, None, jnp.float32),  # one program a sequence and head
    ],
)
def test_tritons_decode_is_attention_over_pages(
    batch: int, heads: int, kv_heads: int, width: int, page: int, window: int | None, dtype: Any
) -> None:
    random = np.random.default_rng(0)
    tables = random.permutation(np.arange(1, 1 + batch * width)).reshape(batch, width)
    pages = 1 + batch * width
    pool = jnp.asarray(random.normal(size=(2 * pages, page, kv_heads, 16)), dtype)
    q = random.normal(size=(batch, heads, 16)).astype(np.float32)
    lengths = random.integers(1, width * page + 1, batch)
    lengths[0] = 1
    sinks = random.normal(size=heads).astype(np.float32)
    output = paged_triton.paged_decode(
        *(jnp.asarray(x) for x in (q, pool, tables.astype(np.int32), lengths.astype(np.int32))),
        window=window, interpret=True,
    )  # fmt: skip
    exact = np.asarray(pool.astype(jnp.float32))
    with_sinks = block.with_sinks(block.Partial(*output), jnp.asarray(sinks)).out
    for i, length in enumerate(lengths):
        k, v = (
            exact[at].reshape(-1, kv_heads, 16)[:length] for at in (tables[i], tables[i] + pages)
        )
        # weights are float16 beside pages of 8 bits
        atol = 1e-5 if dtype == jnp.float32 else 2e-3
        for out, of in ((output[0], None), (with_sinks, sinks)):
            expected = reference(q[i : i + 1], k, v, 1, window or 10**6, of)
            np.testing.assert_allclose(out[i : i + 1], expected, rtol=0, atol=atol)


def test_fp8_pages_hold_what_attention_sees_and_nothing_overflows() -> None:
    random = np.random.default_rng(0)
    mesh = jax.make_mesh((1,), ("tp",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:1])
    pool = jnp.zeros(pool_shape("plain", 4, PAGE, KV_HEADS, HEAD_DIM), jnp.float8_e4m3fn)
    tables = jnp.asarray([[1, 2, 3]], jnp.int32)
    none = jnp.zeros((0, 3), jnp.int32), jnp.zeros(0, jnp.int32)
    where = PagedTokens(
        *none, tables, jnp.zeros(1, jnp.int32), jnp.full(1, LENGTH, jnp.int32), LENGTH, True,
        "plain",
    )  # fmt: skip
    q, k, v = (
        random.normal(size=(1, LENGTH, heads, HEAD_DIM)).astype(np.float32)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    v[0, 1, 0, 0], k[0, 2, 0, 1] = 1e4, -1e4
    with jax.set_mesh(mesh):
        out, written = jax.jit(paged_attention)(*map(jnp.asarray, (q, k, v)), pool, where)
    rounded = [
        np.asarray(jnp.clip(x[0], -448, 448).astype(jnp.float8_e4m3fn).astype(jnp.float32))
        for x in (k, v)
    ]
    flat = np.asarray(written.astype(jnp.float32)).reshape(2, -1, KV_HEADS, HEAD_DIM)
    for found, expected in zip(flat, rounded, strict=True):
        np.testing.assert_array_equal(found[PAGE : PAGE + LENGTH], expected)
    expected = reference(q[0], *rounded, LENGTH, 100)
    np.testing.assert_allclose(np.asarray(out)[0], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("kernel", "pages", "itemsize", "most"),
    [
        ("triton", 16_384, 1, 16_384),  # 2**31 numbers: 32-bit offsets reach them
        ("triton", 16_385, 1, 16_384),
        ("triton", 32_768, 1, 16_384),
        ("triton", 32_769, 1, 32_769),  # more than 2**32 bytes: offsets have 64 bits
        ("triton", 20_000, 2, 20_000),
        ("plain", 20_000, 1, 20_000),
    ],
)
def test_pages_that_offsets_do_not_reach_are_left_out(
    kernel: str, pages: int, itemsize: int, most: int
) -> None:
    assert paged_kernels.most_pages(kernel, pages, 64 * 8 * 128, itemsize) == most


def test_pages_of_odd_sizes_are_counted_exactly() -> None:
    page = 64 * 5 * 128
    for pages in (2**32 // (2 * page), 2**31 // (2 * page) + 1):
        assert 2 * page * paged_kernels.most_pages("triton", pages, page, 1) <= 2**31
    more = 2**32 // (2 * page) + 1
    assert paged_kernels.most_pages("triton", more, page, 1) == more
