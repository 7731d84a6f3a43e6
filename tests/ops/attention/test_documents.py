"""Packed documents by calls that know none, against attention with a mask of them in float64.

The calls are plain ones with the freedom that a fused kernel has: past a row's counts, and for all
rows if one counts none, they give NaN.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ops.attention.reference import in_float64, inputs

from meshwright.ops.attention.block import Block, Gradients, Partial, merge
from meshwright.ops.attention.documents import backward, forward, padded_length, parts_of
from meshwright.ops.attention.fused import Inputs

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
QUICKLY = {"xla_backend_optimization_level": 0}  # most of the time here is the compiler's


def weights_of(rows: Inputs, lse: Any = None) -> tuple[Any, Any, Any]:
    """[rows, heads, queries, keys]: by the log-sum given, or by their own."""
    k = jnp.repeat(rows.k, rows.q.shape[2] // rows.k.shape[2], axis=2)
    scores = jnp.einsum("bihd,bjhd->bhij", rows.q, k) * HEAD_DIM**-0.5
    queries, keys = jnp.arange(rows.q.shape[1]), jnp.arange(rows.k.shape[1])
    if rows.bias is not None:
        scores = scores + rows.bias
    if rows.causal:
        scores = jnp.where(queries[:, None] >= keys[None], scores, -jnp.inf)
    if rows.counts is not None:
        is_query = queries[None] < rows.counts[0][:, None]
        is_key = keys[None] < rows.counts[1][:, None]
        scores = jnp.where((is_query[:, :, None] & is_key[:, None, :])[:, None], scores, -jnp.inf)
    if lse is None:
        lse = jax.nn.logsumexp(scores, axis=-1).swapaxes(1, 2)
    weights = jnp.exp(scores - lse.swapaxes(1, 2)[..., None])
    return jnp.where(jnp.isneginf(scores), 0.0, weights), lse, k


def spoiled(x: Any, count: Any) -> Any:
    """NaN past the count of each row, and everywhere if there is a row of none."""
    inside = (jnp.arange(x.shape[1])[None] < count[:, None]) & jnp.all(count > 0)
    return jnp.where(inside.reshape(*inside.shape, *(1,) * (x.ndim - 2)), x, jnp.nan)


def plain_forward(rows: Inputs) -> Partial:
    assert rows.bias is None or rows.bias.dtype == rows.q.dtype
    weights, lse, _ = weights_of(rows)
    v = jnp.repeat(rows.v, rows.q.shape[2] // rows.v.shape[2], axis=2)
    found = Partial(jnp.einsum("bhij,bjhd->bihd", weights, v), lse)
    return found if rows.counts is None else Partial(*(spoiled(x, rows.counts[0]) for x in found))


def plain_backward(rows: Inputs, whole: Partial, given: Any) -> Gradients:
    weights, _, k = weights_of(rows, whole.lse)
    group = rows.q.shape[2] // rows.k.shape[2]
    v = jnp.repeat(rows.v, group, axis=2)
    delta = jnp.sum(whole.out * given, axis=-1).swapaxes(1, 2)[..., None]
    of_scores = weights * (jnp.einsum("bihd,bjhd->bhij", given, v) - delta) * HEAD_DIM**-0.5

    def shared(x: Any) -> Any:
        return x.reshape(*x.shape[:2], -1, group, x.shape[3]).sum(3)

    found = Gradients(
        jnp.einsum("bhij,bjhd->bihd", of_scores, k),
        shared(jnp.einsum("bhij,bihd->bjhd", of_scores, rows.q)),
        shared(jnp.einsum("bhij,bihd->bjhd", weights, given)),
    )
    if rows.counts is None:
        return found
    queries, keys = rows.counts
    return Gradients(spoiled(found.q, queries), spoiled(found.k, keys), spoiled(found.v, keys))


def run(q: Any, k: Any, v: Any, given: Any, segments: Any, bias_up_to: int) -> tuple[Any, Any]:
    """Inputs in one causal part."""
    block = Block(q, k, v, segments, segments)
    whole = forward(plain_forward, block, True, bias_up_to)
    return whole.out, backward(plain_backward, block, True, whole, given, bias_up_to)


def run_in_halves(
    q: Any, k: Any, v: Any, given: Any, segments: Any, bias_up_to: int
) -> tuple[Any, Any]:
    """Inputs in two parts, as two devices hold them: causal within, full from second to first."""
    half = q.shape[1] // 2
    first, second = slice(None, half), slice(half, None)

    def part(queries: slice, keys: slice) -> tuple[Block, bool]:
        block = Block(
            q[:, queries], k[:, keys], v[:, keys], segments[:, queries], segments[:, keys]
        )
        return block, queries == keys

    def went(block: Block, causal: bool) -> Partial:
        return forward(plain_forward, block, causal, bias_up_to)

    early, late = part(first, first), part(second, second)
    across = part(second, first)
    wholes = went(*early), merge(went(*late), went(*across))

    def came(block: Block, causal: bool, queries: int) -> Gradients:
        some = given[:, second if queries else first]
        return backward(plain_backward, block, causal, wholes[queries], some, bias_up_to)

    a, b, c = came(*early, 0), came(*late, 1), came(*across, 1)
    joined = [(a.q, b.q + c.q), (a.k + c.k, b.k), (a.v + c.v, b.v)]
    out = jnp.concatenate([whole.out for whole in wholes], axis=1)
    return out, Gradients(*(jnp.concatenate(pair, axis=1) for pair in joined))


def check(names: list[str], rows: list[list[int]], bias_up_to: int, program: Any) -> None:
    segments = np.array(rows, "i")
    batch, length = segments.shape
    q, k, v, given = inputs(batch, length, HEADS, KV_HEADS, HEAD_DIM)
    compiled = jax.jit(program, static_argnums=5, compiler_options=QUICKLY)
    out, gradients = compiled(q, k, v, given, segments, bias_up_to)
    wanted_out, wanted = in_float64(q, k, v, given, segments)
    for row, name in enumerate(names):
        np.testing.assert_allclose(out[row], wanted_out[row], atol=2e-6, err_msg=name)
        for of, got, want in zip("qkv", gradients[:3], wanted, strict=True):
            np.testing.assert_allclose(got[row], want[row], atol=5e-6, err_msg=f"{name}, {of}")


def runs(*lengths: int) -> list[int]:
    """Documents one after the other, then padding (0) up to 32."""
    row = [number for number, length in enumerate(lengths, 1) for _ in range(length)]
    return row + [0] * (32 - len(row))


PACKED = {
    "one document": runs(32),
    "one across the middle": runs(10, 20),
    "none across the middle": runs(16, 16),
    "short ones": runs(3, 4, 5, 2, 1, 1, 6, 10),
    "equal ones": runs(8, 8, 8, 8),
    "padding from before the middle": runs(5, 5),
    "all padding": runs(),
    "a last token of padding": runs(31),
    "numbers that come back": [1] * 8 + [2] * 8 + [1] * 8 + [2] * 8,
    "numbers that alternate": [1, 2] * 16,
    "numbers that fall, and negative ones": [9] * 12 + [-3] * 12 + [-(2**31)] * 8,
}
SOME = 4 * 32 * len(PACKED)  # a bias of that many is for parts of 4, and full ones up to 8 by 8


@pytest.mark.parametrize("bias_up_to", [SOME, 2**20], ids=["document by document", "a bias"])
@pytest.mark.parametrize("program", [run, run_in_halves])
def test_documents_are_kept_apart(program: Any, bias_up_to: int) -> None:
    check(list(PACKED), list(PACKED.values()), bias_up_to, program)


@settings(max_examples=20)
@given(st.lists(st.lists(st.integers(-1, 3), min_size=16, max_size=16), min_size=2, max_size=2))
def test_documents_may_be_numbered_in_any_way(rows: list[list[int]]) -> None:
    check(["first", "second"], rows, 64, run_in_halves)


def test_nothing_is_computed_for_parts_that_share_no_document() -> None:
    calls: list[str] = []

    def counted(rows: Inputs) -> Partial:
        if rows.counts is not None:
            jax.debug.callback(lambda: calls.append("called"))
        return plain_forward(rows)

    @jax.jit
    def compiled(q: Any, k: Any, v: Any, segments: Any) -> Partial:
        return forward(counted, Block(q, k, v, segments, segments), True, 32 * 4)

    q, k, v, _ = inputs(1, 32, HEADS, KV_HEADS, HEAD_DIM)
    for lengths, wanted in (((16, 16), 0), ((4, 12, 16), 0), ((15, 17), 1), ((32,), 1)):
        calls.clear()
        compiled(q, k, v, np.array([runs(*lengths)], "i"))
        jax.effects_barrier()
        assert len(calls) == wanted, lengths


def test_a_causal_part_is_cut_until_its_bias_is_small() -> None:
    assert parts_of(1, 8192, 2**26) == 1
    assert parts_of(2, 8192, 2**26) == 2
    assert parts_of(1, 65536, 2**26) == 64


@given(st.integers(1, 2**20))
def test_lengths_that_a_bias_cannot_serve_are_padded_a_little(length: int) -> None:
    padded = padded_length(length)
    assert padded % 2 == 0
    assert padded // parts_of(1, padded) * padded <= 2**30
    assert length <= padded <= max(1.01 * length, length + 1)
    assert padded_length(padded) == padded


def test_lengths_that_a_bias_serves_are_kept() -> None:
    for length in (2, 1000, 8192, 524288):
        assert padded_length(length) == length
    assert padded_length(333) == 334
    assert padded_length(65538) > 65538
