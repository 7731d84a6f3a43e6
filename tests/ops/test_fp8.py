"""Matmuls in fp8 against NumPy with ml_dtypes, and on meshes against one device."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.ops import Fp8Weight, all_gather, fp8, fp8_einsum, partial_sums, reduce_to
from meshwright.ops.fp8 import scale_of

TOKENS, EMBED, MLP = (4, 8), 32, 64
ONE = mw.mesh("dp=1,fsdp=1,tp=1,sp=1", devices=jax.devices()[:1], axis_types="explicit")


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(*TOKENS, EMBED)).astype("f4") * 3
    w = rng.normal(size=(EMBED, MLP)).astype("f4") * 0.02
    g = rng.normal(size=(*TOKENS, MLP)).astype("f4") * 1e-4
    return x, w, g


def rounded(x, dtype):
    """The nearest numbers of an 8-bit float after scaling by a power of two."""
    most = float(ml_dtypes.finfo(dtype).max)
    scale = 2.0 ** np.ceil(np.log2(np.abs(x).max() / most))
    assert np.abs(x).max() / scale <= most < 2 * np.abs(x).max() / scale * (1 + 1e-6)
    return (x / scale).astype(dtype).astype("f8") * scale


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_results_and_gradients_are_those_of_rounded_operands(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8, "current_platform", lambda: platform)
    x, w, g = arrays()

    def product(x, w):
        return fp8_einsum("ble,em->blm", x, Fp8Weight(w, scale_of(w)), (), P())

    with jax.set_mesh(ONE):
        y, back = jax.vjp(product, jnp.asarray(x), jnp.asarray(w))
        dx, dw = back(jnp.asarray(g))
    x8, w8 = (rounded(a, ml_dtypes.float8_e4m3fn) for a in (x, w))
    g8 = rounded(g, ml_dtypes.float8_e5m2)
    np.testing.assert_allclose(y, np.einsum("ble,em->blm", x8, w8), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dx, np.einsum("blm,em->ble", g8, w8), rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(dw, np.einsum("ble,blm->em", x8, g8), rtol=1e-5, atol=1e-8)
    assert np.abs(np.asarray(y) - np.einsum("ble,em->blm", x, w)).max() > 1e-3  # it did round


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_a_number_that_is_not_finite_is_not_hidden(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the step is skipped."""
    monkeypatch.setattr(fp8, "current_platform", lambda: platform)
    x, w, _ = arrays()
    for bad in (np.nan, np.inf):
        x[0, 0, 0] = bad
        scaled = Fp8Weight(jnp.asarray(w), scale_of(jnp.asarray(w)))
        with jax.set_mesh(ONE):
            y = fp8_einsum("ble,em->blm", jnp.asarray(x), scaled, (), P())
        assert not np.isfinite(np.asarray(y)[0, 0]).any()


def test_each_compiler_gets_the_form_that_it_computes_in_eight_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TPUs: operands in 8 bits. GPUs: operands that were in 8 bits, not merged with transposes."""
    x, w, _ = (jnp.asarray(array) for array in arrays())

    def loss(x, w):
        return fp8_einsum("ble,em->blm", x, Fp8Weight(w, scale_of(w)), (), P()).sum()

    def program(platform):
        monkeypatch.setattr(fp8, "current_platform", lambda: platform)
        with jax.set_mesh(ONE):
            return (
                jax.jit(jax.value_and_grad(lambda x, w: loss(x, w), (0, 1))).lower(x, w).as_text()
            )

    def operands(text):
        found = re.findall(r"dot_general.*: \(tensor<[\dx]*(\w+)>, tensor<[\dx]*(\w+)>\)", text)
        return sorted({kind for pair in found for kind in pair})

    assert operands(program("tpu")) == ["f8E4M3FN", "f8E5M2"]
    assert operands(program("cuda")) == ["f32"]
    assert program("cuda").count("optimization_barrier") == 4  # x, w twice, gradients
    assert "optimization_barrier" not in program("tpu")


@pytest.mark.parametrize("largest", [1e-38, 1e-6, 1.0, 447.9, 448.0, 448.1, 7e4, 3e38])
def test_a_scale_is_the_least_power_of_two_that_fits(largest):
    scale = float(scale_of(jnp.asarray([largest, -largest / 2], jnp.float32)))
    assert np.log2(scale) == round(np.log2(scale))
    assert largest / scale <= 448 * (1 + 1e-6)
    assert largest / scale * 2 > 448 or scale == 2.0**-100


@pytest.mark.parametrize(
    "mesh", ["dp=1,fsdp=8,tp=1,sp=1", "dp=2,fsdp=2,tp=2,sp=1", "dp=1,fsdp=2,tp=2,sp=2"]
)
def test_a_block_on_eight_devices_is_that_on_one(mesh):
    """Up and down, as an mlp splits them: the sums that meet are the only difference."""
    x, w, _ = arrays()
    down = np.ascontiguousarray(arrays(1)[1].T)

    def block(x, w, down, batch, weight_axes, tp):
        x = all_gather(x, tp)
        scaled = [Fp8Weight(one, scale_of(one)) for one in (w, down)]
        hidden = fp8_einsum("ble,em->blm", x, scaled[0], weight_axes, P(*batch, tp or None))
        out = partial_sums(P(*batch, None), tp)
        y = fp8_einsum("blm,me->ble", jax.nn.silu(hidden), scaled[1], weight_axes, out)
        return reduce_to(y, tp, P(*batch, None))

    def results(text, count):
        made = mw.mesh(text, devices=jax.devices()[:count], axis_types="explicit")
        wide = {axis for axis, size in made.shape.items() if size > 1}
        batch = (
            tuple(a for a in ("dp", "fsdp") if a in wide) or None,
            "sp" if "sp" in wide else None,
        )
        tp = ("tp",) if "tp" in wide else ()
        fsdp = "fsdp" if "fsdp" in wide else None
        axes = tuple(axis for axis in ("dp", "fsdp", "sp") if axis in wide)
        with jax.set_mesh(made):
            where = [P(*batch, None), P(fsdp, tp or None), P(tp or None, fsdp)]
            inputs = [
                jax.device_put(np.resize(a, (8, *a.shape[1:])) if a is x else a, spec)
                for a, spec in zip((x, w, down), where, strict=True)
            ]

            def run(*inputs):
                y, back = jax.vjp(lambda *a: block(*a, batch, axes, tp), *inputs)
                return y, back(jnp.sin(1e3 * y))

            y, gradients = jax.jit(run)(*inputs)
            assert [one.sharding.spec for one in gradients] == [one.sharding.spec for one in inputs]
            return jax.device_get((y, *gradients))

    one, several = results("dp=1,fsdp=1,tp=1,sp=1", 1), results(mesh, 8)
    for a, b in zip(one, several, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5 * np.abs(a).max())
