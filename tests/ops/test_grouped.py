"""Grouped matmul: against a loop over groups; when the kernel for Hopper GPUs is taken; that it lowers.

Its numbers need such a GPU: benchmarks/expert_step.py --sides kernels.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from meshwright.ops import (
    Fp8Groups,
    Quantized,
    fp8_groups,
    group_alignment,
    grouped_low_rank,
    grouped_matmul,
    quantize,
)
from meshwright.ops.fp8 import Fp8Weight, scale_of
from meshwright.ops.grouped import weights_product_on_tpu

NEEDS = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the kernel needs jax 0.11")


def test_each_group_is_multiplied_with_its_matrix() -> None:
    random = np.random.default_rng(0)
    sizes = np.array([3, 0, 5, 1])
    x, weights = random.normal(size=(11, 4)), random.normal(size=(4, 4, 6))
    found = grouped_matmul(
        jnp.asarray(x, jnp.float32), jnp.asarray(weights, jnp.float32), jnp.asarray(sizes)
    )
    groups = np.repeat(np.arange(4), sizes)
    right = [row @ weights[group] for row, group in zip(x, groups, strict=False)]
    np.testing.assert_allclose(np.asarray(found)[: sizes.sum()], right, rtol=1e-5, atol=1e-5)


def test_gradients_of_weights_on_tpus_are_those_of_each_group() -> None:
    """Of jax's kernel, interpreted; a group may be empty, and rows may be of none."""
    random = np.random.default_rng(0)
    sizes = np.array([100, 0, 57, 60])
    x, y = random.normal(size=(256, 136)), random.normal(size=(256, 72))
    found = weights_product_on_tpu(
        jnp.asarray(x, jnp.float32),
        jnp.asarray(y, jnp.float32),
        jnp.asarray(sizes, jnp.int32),
        interpret=True,
    )
    ends = np.cumsum(sizes)
    right = [
        x[end - size : end].T @ y[end - size : end] for end, size in zip(ends, sizes, strict=True)
    ]
    np.testing.assert_allclose(np.asarray(found), right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_matrices_of_8_bits_are_multiplied_with_the_scales_of_their_group(dtype: str) -> None:
    random = np.random.default_rng(3)
    x = random.normal(size=(9, 16)).astype(np.float32)
    matrices = random.normal(size=(3, 16, 6)).astype(np.float32) * [[[1]], [[50]], [[1e-3]]]
    weights = quantize(jnp.asarray(matrices, jnp.float32), 1, dtype, groups=1)
    assert weights.values.shape == (3, 6, 16)
    found = grouped_matmul(jnp.asarray(x), weights, jnp.asarray([4, 0, 5]))
    values = np.asarray(weights.values.astype(jnp.float32)) * np.asarray(weights.scale)[..., None]
    right = np.concatenate([x[:4] @ values[0].T, x[4:] @ values[2].T])
    np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-6)


@NEEDS
@pytest.mark.usefixtures("pretended_h200")
def test_matrices_of_fp8_lower_for_hopper_gpus() -> None:
    x = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)
    values = jax.ShapeDtypeStruct((4, 384, 256), jnp.float8_e4m3fn)
    weights = Quantized(values, jax.ShapeDtypeStruct((4, 384), jnp.float32))
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
    traced = jax.jit(lambda x, w, sizes: grouped_matmul(x, w, sizes, 128)).trace(x, weights, sizes)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1


def rounded(x: np.ndarray, dtype: object) -> np.ndarray:
    """The nearest numbers of an 8-bit float after scaling by a power of two."""
    scale = 2.0 ** np.ceil(np.log2(np.abs(x).max() / float(ml_dtypes.finfo(dtype).max)))
    return (x / scale).astype(dtype).astype("f8") * scale


def close_up_to_rounding(found: jax.Array, right: np.ndarray) -> None:
    """To bfloat16; sums are of float32."""
    assert found.dtype == jnp.bfloat16
    assert found.shape == right.shape
    error = np.abs(np.asarray(found, "f8") - right)
    np.testing.assert_array_less(error, 2**-8 * np.abs(right) + 1e-6 * np.abs(right).max())


def in_fp8(weights: jax.Array) -> Fp8Groups:
    return fp8_groups(Fp8Weight(weights, scale_of(weights)), lambda array: array)


def test_results_and_gradients_in_fp8_are_those_of_rounded_operands() -> None:
    """By an independent rounding; rows after the last group may hold anything."""
    random = np.random.default_rng(0)
    sizes = np.array([3, 0, 5, 1])
    groups, rows = np.repeat(np.arange(4), sizes), sizes.sum()
    x = random.normal(size=(11, 8)).astype(np.float32) * 3
    weights = random.normal(size=(4, 8, 6)).astype(np.float32) * 0.02
    g = random.normal(size=(11, 6)).astype(np.float32) * 1e-4
    x[rows:] = 1e6

    def product(x: jax.Array, weights: jax.Array) -> jax.Array:
        return grouped_matmul(x, in_fp8(weights), jnp.asarray(sizes))

    y, pull = jax.vjp(product, jnp.asarray(x), jnp.asarray(weights))
    of_x, of_weights = pull(jnp.asarray(g))
    x8, w8 = (rounded(a, ml_dtypes.float8_e4m3fn) for a in (x[:rows], weights))
    g8 = rounded(g[:rows], ml_dtypes.float8_e5m2)
    right = np.einsum("ri,rio->ro", x8, w8[groups])
    np.testing.assert_allclose(y[:rows], right, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        of_x[:rows], np.einsum("ro,rio->ri", g8, w8[groups]), rtol=1e-5, atol=1e-9
    )
    of_groups = np.zeros_like(w8)
    np.add.at(of_groups, groups, np.einsum("ri,ro->rio", x8, g8))
    np.testing.assert_allclose(of_weights, of_groups, rtol=1e-5, atol=1e-8)
    plain = np.einsum("ri,rio->ro", x[:rows], weights[groups])
    assert np.abs(y[:rows] - plain).max() > 1e-3  # it did round


@NEEDS
@pytest.mark.usefixtures("pretended_h200")
def test_fp8_and_its_gradients_lower_for_hopper_gpus() -> None:
    x = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)
    weights = jax.ShapeDtypeStruct((4, 256, 384), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)

    def total(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        return jnp.sum(grouped_matmul(x, in_fp8(weights), sizes, 128).astype(jnp.float32))

    traced = jax.jit(jax.grad(total, (0, 1))).trace(x, weights, sizes)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") >= 2  # of x, and of the weights


def test_a_matrix_of_low_rank_is_the_product_of_its_factors() -> None:
    random = np.random.default_rng(1)
    x, a, b = (
        jnp.asarray(random.normal(size=shape), jnp.float32)
        for shape in ((9, 4), (3, 4, 2), (3, 2, 6))
    )
    sizes = jnp.asarray([4, 0, 5])
    right = grouped_matmul(x, jnp.einsum("gir,gro->gio", a, b), sizes)
    np.testing.assert_allclose(grouped_low_rank(x, a, b, sizes), right, rtol=1e-5, atol=1e-5)


@NEEDS
@pytest.mark.usefixtures("pretended_h200")
def test_a_low_rank_is_padded_for_the_kernel_of_hopper_gpus() -> None:
    shapes = (512, 256), (4, 256, 8), (4, 8, 384)
    x, a, b = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)

    def total(x: jax.Array, a: jax.Array, b: jax.Array, sizes: jax.Array) -> jax.Array:
        return jnp.sum(grouped_low_rank(x, a, b, sizes, 128).astype(jnp.float32))

    traced = jax.jit(jax.grad(total, (1, 2))).trace(x, a, b, sizes)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") >= 2


@pytest.mark.usefixtures("pretended_h200")
@pytest.mark.parametrize(
    ("dtype", "rows", "why"),
    [(jnp.bfloat16, 128, ""), (jnp.float32, 1, "it is for bfloat16, not float32")],
)
def test_the_kernel_of_hopper_gpus(dtype: object, rows: int, why: str) -> None:
    assert group_alignment(dtype) == (rows, why)


def test_other_machines_take_the_compilers() -> None:
    assert group_alignment(jnp.bfloat16) == (
        1,
        "it runs on the GPUs GH200, H100, H20, H200, H800",
    )


@NEEDS
@pytest.mark.usefixtures("pretended_h200")
@pytest.mark.parametrize(("inputs", "outputs"), [(256, 384), (2880, 1440), (360, 2880)])
def test_it_lowers_for_a_gpu_that_is_not_here(inputs: int, outputs: int) -> None:
    x = jax.ShapeDtypeStruct((512, inputs), jnp.bfloat16)
    weights = jax.ShapeDtypeStruct((4, inputs, outputs), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)

    def total(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        return jnp.sum(grouped_matmul(x, weights, sizes, 128).astype(jnp.float32))

    traced = jax.jit(jax.grad(total, (0, 1))).trace(x, weights, sizes)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") >= 2  # of x, and of the weights
