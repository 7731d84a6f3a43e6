"""The 4-bit NormalFloat against NumPy and, where it is installed, bitsandbytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.ops import dequantize_nf4, quantize

# QLoRA (arXiv 2305.14314), appendix E
LEVELS = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
        0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip


def weight() -> np.ndarray:
    """[inputs, outputs], one block of it zero."""
    numbers = np.random.default_rng(0).normal(0, 0.02, (256, 24)).astype(np.float32)
    numbers[64:128, 3] = 0
    return numbers


def test_bytes_and_scales_are_those_of_the_nearest_levels() -> None:
    found = jax.jit(quantize, static_argnums=(1, 2))(weight(), 1, "nf4")
    blocks = weight().T.reshape(24, 4, 64)
    scale = np.abs(blocks).max(-1)
    np.testing.assert_array_equal(found.scale, scale)
    relative = blocks / np.where(scale == 0, 1, scale)[..., None]
    codes = np.abs(relative[..., None] - LEVELS).argmin(-1).reshape(24, 128, 2)
    np.testing.assert_array_equal(found.values, codes[..., 0] * 16 + codes[..., 1])
    assert (found.values.nbytes + found.scale.nbytes) * 8 / weight().size == 4.5


def test_dequantized_numbers_are_levels_times_scales() -> None:
    found = quantize(jnp.asarray(weight()), 1, "nf4")
    with jax.set_mesh(jax.make_mesh((1,), ("tp",), (jax.sharding.AxisType.Explicit,))):
        numbers = jax.jit(lambda w: dequantize_nf4(w, (256,), jnp.float32))(found)
    codes = np.stack([np.asarray(found.values) >> 4, np.asarray(found.values) & 15], -1)
    scales = np.asarray(found.scale).repeat(64, -1)
    np.testing.assert_array_equal(numbers, LEVELS[codes.reshape(24, 256)] * scales)
    error = np.abs(np.asarray(numbers) - weight().T).reshape(24, 4, 64)
    halves = np.diff(LEVELS).max() / 2
    assert (error <= halves * np.asarray(found.scale)[..., None] + 1e-7).all()


def test_bytes_and_scales_are_those_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    import torch

    packed, state = functional.quantize_4bit(torch.tensor(weight().T.copy()), quant_type="nf4")
    found = quantize(jnp.asarray(weight()), 1, "nf4")
    np.testing.assert_array_equal(found.scale.ravel(), state.absmax.numpy())
    zeros = (np.asarray(found.scale) == 0).repeat(32, -1)  # any level there
    ours, theirs = np.asarray(found.values), packed.numpy().reshape(24, 128)
    np.testing.assert_array_equal(ours[~zeros], theirs[~zeros])
    numbers = functional.dequantize_4bit(packed, state).numpy()
    with jax.set_mesh(jax.make_mesh((1,), ("tp",), (jax.sharding.AxisType.Explicit,))):
        mine = jax.jit(lambda w: dequantize_nf4(w, (256,), jnp.float32))(found)
    np.testing.assert_array_equal(mine, numbers)
