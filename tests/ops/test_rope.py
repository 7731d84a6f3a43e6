"""Rotary embedding: against rotation by complex numbers, and each scaling's published formula."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.ops.rope import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rope,
    YarnScaling,
    rotate,
)

HEAD_DIM = 64


def plain(theta: float, head_dim: int = HEAD_DIM) -> list[float]:
    return [math.exp(-math.log(theta) * 2 * i / head_dim) for i in range(head_dim // 2)]


@pytest.mark.parametrize("theta", [10000.0, 500000.0, 1e6])
def test_frequencies_fall_geometrically_from_one(theta: float) -> None:
    np.testing.assert_allclose(Rope(theta).frequencies(HEAD_DIM), plain(theta), rtol=1e-6)


def test_linear_scaling_divides_every_position() -> None:
    scaled = Rope(10000.0, LinearScaling(4.0)).frequencies(HEAD_DIM)
    np.testing.assert_allclose(scaled, np.array(plain(10000.0)) / 4, rtol=1e-6)


@pytest.mark.parametrize(("factor", "head_dim"), [(8.0, 128), (32.0, 64)])
def test_llama_3_scaling_is_metas_formula(factor: float, head_dim: int) -> None:
    low, high, original = 1.0, 4.0, 8192
    expected = []
    for frequency in plain(500000.0, head_dim):
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            expected.append(frequency)
        elif wavelength > original / low:
            expected.append(frequency / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            expected.append((1 - smooth) * frequency / factor + smooth * frequency)
    rope = Rope(500000.0, Llama3Scaling(factor, low, high, original))
    found = rope.frequencies(head_dim)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    kinds = {round(p / f, 3) for p, f in zip(plain(500000.0, head_dim), found, strict=True)}
    assert {1.0, factor} < kinds  # kept, divided, and some in between
    assert rope.magnitude == 1.0


@pytest.mark.parametrize(("theta", "factor", "original"), [(1e4, 16.0, 4096), (1e6, 4.0, 32768)])
def test_yarn_is_the_papers_formula(theta: float, factor: float, original: int) -> None:
    beta_fast, beta_slow, head_dim = 32.0, 1.0, 128

    def correction(rotations: float) -> float:  # d(r) of the paper, solved for the dim
        return head_dim / 2 * math.log(original / (2 * math.pi * rotations)) / math.log(theta)

    first, last = math.floor(correction(beta_fast)), math.ceil(correction(beta_slow))
    expected = []
    for i, frequency in enumerate(plain(theta, head_dim)):
        ramp = min(max((i - first) / (last - first), 0.0), 1.0)
        expected.append((1 - ramp) * frequency + ramp * frequency / factor)
    rope = Rope(theta, YarnScaling(factor, original, beta_fast, beta_slow))
    np.testing.assert_allclose(rope.frequencies(head_dim), expected, rtol=1e-6)
    assert 0 < first < last < head_dim // 2  # fast, ramp and slow are all there
    assert rope.magnitude == pytest.approx(0.1 * math.log(factor) + 1)


def test_yarns_attention_factor_can_be_given() -> None:
    rope = Rope(1e4, YarnScaling(16.0, 4096, attention_factor=1.5))
    cos, _ = rope.tables(jnp.zeros((1, 1), jnp.int32), 8)
    np.testing.assert_allclose(cos, 1.5)
    assert Rope(1e4, YarnScaling(1.0, 4096)).magnitude == 1.0


def test_long_rope_has_other_factors_above_the_original_length() -> None:
    short, long = [1.0, 1.5, 2.0, 2.5], [2.0, 4.0, 8.0, 16.0]
    rope = Rope(1e4, LongRopeScaling(short, long, original_max_seq=64, factor=16.0))
    for context, factors in ((1, short), (64, short), (65, long), (1024, long)):
        expected = np.array(plain(1e4, 8)) / factors
        np.testing.assert_allclose(rope.frequencies(8, context), expected, rtol=1e-6)
        cos, _ = rope.tables(jnp.full((1, 1), 3), 8, context)
        scale = math.sqrt(1 + math.log(16) / math.log(64))  # of the paper, whatever the length
        np.testing.assert_allclose(cos[0, 0, 0], scale * np.cos(3 * expected), rtol=1e-5)
    given = LongRopeScaling(short, long, 64, 16.0, attention_factor=1.25)
    assert Rope(1e4, given).magnitude == 1.25
    assert Rope(1e4, LongRopeScaling(short, long, 64, 1.0)).magnitude == 1.0


def test_pairs_rotate_as_complex_numbers_do() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 5, 3, 16)).astype("f")
    positions = np.array([[0, 1, 2, 3, 4], [7, 0, 1, 400, 2047]], "i")
    turned = rotate(jnp.asarray(x), *Rope(1e4).tables(jnp.asarray(positions), 16))
    pairs = x[..., :8].astype("c16") + 1j * x[..., 8:]
    angles = positions[:, :, None, None] * np.array(plain(1e4, 16))
    pairs = pairs * np.exp(1j * angles)
    expected = np.concatenate([pairs.real, pairs.imag], -1)
    # an angle of 2,000 radians in float32 is off by up to 1e-4
    np.testing.assert_allclose(turned, expected, atol=5e-4)
    np.testing.assert_allclose(turned[0], expected[0], atol=2e-6)


def test_a_score_depends_on_the_distance_only() -> None:
    rng = np.random.default_rng(1)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 1, 32)), jnp.float32) for _ in range(2))

    def score(i: int, j: int) -> jax.Array:
        at = [Rope(1e4).tables(jnp.full((1, 1), n), 32) for n in (i, j)]
        return jnp.vdot(rotate(q, *at[0]), rotate(k, *at[1]))

    np.testing.assert_allclose(score(9, 4), score(105, 100), rtol=1e-4)
    assert abs(float(score(9, 4) - score(9, 5))) > 1e-2


def test_bfloat16_is_turned_in_float32_and_rounded_once() -> None:
    x = jnp.asarray(np.random.default_rng(2).normal(size=(1, 4, 2, 16)), jnp.bfloat16)
    tables = Rope(1e4).tables(jnp.arange(4)[None], 16)
    exact = rotate(x.astype(jnp.float32), *tables).astype(jnp.bfloat16)
    turned = rotate(x, *tables)
    assert turned.dtype == jnp.bfloat16
    np.testing.assert_array_equal(turned, exact)
