"""Kernels of whole rows: which rows they take, that programs have them, and what they compute.

Their values are jax's interpreter's of GPU kernels, on the CPU; programs are lowered for a GPU that
is not here.
"""

import contextlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tests.ops.test_norms import EPS, norm_in_float64
from tests.ops.test_norms import gradients_in_float64 as gradients_of_norm

import meshwright as mw
from meshwright.ops import mosaic, row_kernels
from meshwright.ops.collectives import all_gather
from meshwright.ops.cross_entropy import cross_entropy
from meshwright.ops.norms import norm_alone, norm_beside

H200 = ("cuda", "NVIDIA H200")
# else the CPU's compiler leaves out the rounding of a sum that is used in float32 as well
AS_WRITTEN = {"xla_allow_excess_precision": False}
ONE, FOUR = ("dp=1,tp=1", P()), ("dp=2,tp=2", P("dp", "tp"))


def interpreted() -> contextlib.AbstractContextManager[Any]:
    """Kernels computed on the CPU; skips where jax cannot."""
    from jax.experimental.pallas import mosaic_gpu

    if not hasattr(mosaic_gpu, "force_gpu_interpret_mode"):
        pytest.skip(f"jax {jax.__version__} cannot interpret GPU kernels; 0.11 can")
    mode: contextlib.AbstractContextManager[Any] = mosaic_gpu.force_gpu_interpret_mode()
    return mode


def some(*shape: int, seed: int = 0, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape, scale=2), dtype)


def exact(x: jax.Array) -> np.ndarray:
    return np.asarray(x).astype("f8")


def gradients_in_float64(
    x: np.ndarray, scale: np.ndarray, dsum: np.ndarray | float, given: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Of x, which is also passed on, and of scale."""
    of_x, of_scale = gradients_of_norm(x, scale, given)
    return dsum + of_x, of_scale


def kernels(function: Any, *shapes: Any) -> int:
    """How many kernels of ours a program for a GPU calls."""
    lowered = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",))
    return len(re.findall(r"custom_call @mosaic_gpu\w*", lowered.as_text()))


# ------------------------------------------------------------------ which rows


@pytest.mark.parametrize(
    ("device", "columns", "dtype", "whole_row", "reason"),
    [
        (("cpu", "cpu"), 2048, jnp.bfloat16, True, "it runs on the GPUs"),
        (("tpu", "TPU v5"), 2048, jnp.bfloat16, True, "it runs on the GPUs"),
        (("rocm", "AMD H100 not"), 2048, jnp.bfloat16, True, "it runs on the GPUs"),
        (("gpu", "NVIDIA A100-SXM4-80GB"), 2048, jnp.bfloat16, True, "it runs on the GPUs"),
        (H200, 2048, jnp.float32, False, "not float32"),
        (H200, 2048, jnp.float8_e4m3fn, False, "not float8_e4m3fn"),
        (H200, 32000 + 64, jnp.bfloat16, False, "32064 columns are not divisible by 128"),
        (H200, 1024 + 128, jnp.bfloat16, True, "rows of 1152 columns do not fit into registers"),
        (H200, 4096, jnp.bfloat16, True, "rows of 4096 columns do not fit into registers"),
    ],
)
def test_rows_are_refused_for_a_reason(
    monkeypatch: pytest.MonkeyPatch, device: Any, columns: int, dtype: Any, whole_row: bool,
    reason: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(mosaic, "current_device", lambda: device)
    monkeypatch.setattr(mosaic, "OLDEST", (0, 0))
    assert reason in str(row_kernels.refuses(columns, dtype, whole_row=whole_row))


@pytest.mark.parametrize("kind", ["NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GH200 480GB"])
def test_rows_of_models_are_taken(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(mosaic, "current_device", lambda: ("gpu", kind))
    monkeypatch.setattr(mosaic, "OLDEST", (0, 0))
    for embed in (1024, 2048):
        assert row_kernels.refuses(embed, jnp.bfloat16, whole_row=True) is None
    for vocab in (32000, 128256, 151936):
        assert row_kernels.refuses(vocab, jnp.float16, whole_row=False) is None


# --------------------------------------------------------------- that they are there


@pytest.mark.parametrize(("text", "spec"), [ONE, FOUR])
@pytest.mark.usefixtures("pretended_h200")
def test_a_norm_with_its_sum_is_one_kernel_and_its_gradient_another(text: str, spec: P) -> None:
    def forward(x: jax.Array, update: jax.Array, scale: jax.Array) -> Any:
        x, normed = norm_beside(x, all_gather(scale, ("dp", "tp")), EPS, 3, update)
        return x, normed

    def backward(x: jax.Array, update: jax.Array, scale: jax.Array) -> Any:
        out, gradients = jax.vjp(forward, x, update, scale)
        return gradients(out)

    mesh = mw.mesh(
        text, devices=jax.devices()[: 4 if text == FOUR[0] else 1], axis_types="explicit"
    )
    with jax.set_mesh(mesh):
        sharding = jax.NamedSharding(mesh, spec)
        scale = jax.ShapeDtypeStruct((1024,), jnp.float32)

        def counts(embed: int, dtype: Any) -> tuple[int, int]:
            x = jax.ShapeDtypeStruct((4, 8, embed), dtype, sharding=sharding)
            of = (x, x, jax.ShapeDtypeStruct((embed,), jnp.float32, sharding=scale.sharding))
            return kernels(forward, *of), kernels(backward, *of)

        assert counts(1024, jnp.bfloat16) == (1, 2)
        assert counts(1024, jnp.float32) == (0, 0)
        assert counts(512, jnp.bfloat16) == (0, 0)


@pytest.mark.usefixtures("pretended_h200")
def test_a_row_that_is_split_or_differs_is_left_to_the_compiler() -> None:
    mesh = mw.mesh("dp=2,tp=2", devices=jax.devices()[:4], axis_types="explicit")
    with jax.set_mesh(mesh):

        def count(spec: P, scale_spec: P, update: Any) -> int:
            x = jax.ShapeDtypeStruct(
                (4, 8, 2048), jnp.bfloat16, sharding=jax.NamedSharding(mesh, spec)
            )
            scale = jax.ShapeDtypeStruct(
                (2048,), jnp.float32, sharding=jax.NamedSharding(mesh, scale_spec)
            )
            return kernels(lambda x, s: norm_beside(x, s, EPS, 1, update(x)), x, scale)

        assert count(P("dp", None, None), P(), lambda x: x) == 1
        assert count(P("dp", None, "tp"), P("tp"), lambda x: x) == 0
        whole = P(None, None, None)
        assert count(P("dp", None, None), P(), lambda x: jax.sharding.reshard(x, whole)) == 0


@pytest.mark.usefixtures("pretended_h200")
@pytest.mark.parametrize("spec", [P("dp"), P("dp", "tp"), P()])
def test_a_scale_that_is_whole_everywhere_has_a_gradient_that_is(spec: P) -> None:
    mesh = mw.mesh("dp=2,tp=2", devices=jax.devices()[:4], axis_types="explicit")
    with jax.set_mesh(mesh):
        x = jax.ShapeDtypeStruct((4, 8, 1024), jnp.bfloat16, sharding=jax.NamedSharding(mesh, spec))
        scale = jax.ShapeDtypeStruct((1024,), jnp.float32, sharding=jax.NamedSharding(mesh, P()))

        def gradients(x: jax.Array, scale: jax.Array) -> Any:
            return jax.vjp(lambda x, s: norm_alone(x, s, EPS), x, scale)[1](x)

        found = jax.eval_shape(gradients, x, scale)
    assert [one.sharding.spec for one in found] == [P(*spec, *(None,) * (3 - len(spec))), P(None)]


@pytest.mark.usefixtures("pretended_h200")
def test_each_chunk_of_the_loss_reads_its_logits_by_one_kernel() -> None:
    def loss(hidden: jax.Array, head: jax.Array, chunk: int) -> Any:
        targets = jnp.zeros(hidden.shape[:2], jnp.int32)
        return cross_entropy(hidden, head, targets, jnp.float32(1.0), chunk=chunk)[0]

    with jax.set_mesh(mw.mesh("dp=1", devices=jax.devices()[:1], axis_types="explicit")):
        for vocab, each in ((1152, 1), (1100, 0)):
            head = jax.ShapeDtypeStruct((16, vocab), jnp.bfloat16)
            # of many tokens before the loop and in it; of few, whose gradients are kept, in it only
            for tokens, chunk, places in (
                (48, 48, 1), (48, 32, 2), (48, 16, 2), (6, 6, 1), (6, 4, 1), (6, 2, 1),
            ):  # fmt: skip
                hidden = jax.ShapeDtypeStruct((1, tokens, 16), jnp.bfloat16)
                gradient = jax.grad(lambda h, w, chunk=chunk: loss(h, w, chunk), argnums=(0, 1))
                assert kernels(gradient, hidden, head) == each * places


# --------------------------------------------------------------- what they compute


@pytest.mark.parametrize("shape", [(8, 1024), (3, 2048), (2, 8192)])
def test_a_sum_is_rounded_once_and_its_norm_is_the_formula(shape: tuple[int, int]) -> None:
    x, update = some(*shape), some(*shape, seed=1)
    scale = some(shape[1], seed=2, dtype=jnp.float32)
    with interpreted():
        run = jax.jit(row_kernels.add_and_norm, static_argnums=3, compiler_options=AS_WRITTEN)
        total, normed = run(x, update, scale, EPS)
    assert total.dtype == normed.dtype == jnp.bfloat16
    np.testing.assert_array_equal(exact(total), exact(x + update))
    right = norm_in_float64(exact(total), exact(scale))
    np.testing.assert_allclose(exact(normed), right, rtol=2**-8)


@pytest.mark.parametrize("returns_sum", [True, False])
@pytest.mark.parametrize("uses", [1, 3])
def test_gradients_of_a_norm_are_the_formula(uses: int, returns_sum: bool) -> None:
    x, dsum, *given = (some(6, 1024, seed=seed) for seed in range(2 + uses))
    scale = some(1024, seed=9, dtype=jnp.float32)
    with interpreted():
        of_x, of_scale = row_kernels.norm_gradient(
            x, scale, EPS, dsum if returns_sum else None, *given
        )
    gradient = sum(exact(part) for part in given)
    on = exact(dsum) if returns_sum else 0.0
    right_x, right_scale = gradients_in_float64(exact(x), exact(scale), on, gradient)
    assert of_x.dtype == jnp.bfloat16
    np.testing.assert_allclose(exact(of_x), right_x, rtol=2**-8, atol=1e-5)
    np.testing.assert_allclose(exact(of_scale), right_scale, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("columns", [128, 1024, 1152, 4096, 2 * 4096 + 1024 + 512 + 128])
@pytest.mark.parametrize("away", [0.0, 3e4, -3e4])
def test_a_row_is_summed_beside_its_maximum_whatever_its_size(columns: int, away: float) -> None:
    x = some(3, columns, dtype=jnp.float16) * 16 + jnp.float16(away)
    with interpreted():
        most, total = row_kernels.log_sum_exp(x)
    wide = exact(x)
    np.testing.assert_allclose(exact(most), wide.max(1), rtol=1e-6)
    found = exact(most) + np.log(exact(total))
    right = wide.max(1) + np.log(np.exp(wide - wide.max(1, keepdims=True)).sum(1))
    np.testing.assert_allclose(found, right, rtol=1e-6, atol=1e-5)


def in_kernels(function: Any, text: str, spec: P, args: Any, given: Any) -> Any:
    """A function's value and gradients, where x and update are split by a spec."""
    devices = jax.devices()[: 4 if text == FOUR[0] else 1]
    with jax.set_mesh(mw.mesh(text, devices=devices, axis_types="explicit")), interpreted():
        x, update, scale = args
        placed = *(jax.device_put(part, spec) for part in (x, update)), scale

        def run(args: Any, given: Any) -> Any:
            out, backward = jax.vjp(function, *args)
            return out, backward(given)

        given = jax.tree.map(lambda part: jax.device_put(part, spec), given)
        return jax.jit(run, compiler_options=AS_WRITTEN)(placed, given)


@pytest.mark.parametrize(("text", "spec"), [ONE, FOUR])
@pytest.mark.usefixtures("pretended_h200")
def test_a_norm_beside_a_sum_has_the_values_and_gradients_of_the_formula(
    text: str, spec: P
) -> None:
    args = some(4, 2, 1024), some(4, 2, 1024, seed=1), some(1024, seed=2, dtype=jnp.float32)
    given = [some(4, 2, 1024, seed=seed) for seed in (3, 4, 5)]

    def beside(x: jax.Array, update: jax.Array, scale: jax.Array) -> Any:
        x, normed = norm_beside(x, all_gather(scale, ("dp", "tp")), EPS, 2, update)
        return [x, *normed]

    (total, *normed), gradients = in_kernels(beside, text, spec, args, given)
    np.testing.assert_array_equal(exact(total), exact(args[0] + args[1]))
    wide, scale = exact(total), exact(args[2])
    for one in normed:
        np.testing.assert_allclose(exact(one), norm_in_float64(wide, scale), rtol=2**-8)
    dsum, *rest = (exact(part) for part in given)
    right_x, right_scale = gradients_in_float64(wide, scale, dsum, rest[0] + rest[1])
    for one in gradients[:2]:
        np.testing.assert_allclose(exact(one), right_x, rtol=2**-8, atol=1e-5)
    np.testing.assert_allclose(exact(gradients[2]), right_scale, rtol=1e-5, atol=1e-5)

    def alone(x: jax.Array, update: jax.Array, scale: jax.Array) -> Any:
        return norm_alone(x, all_gather(scale, ("dp", "tp")), EPS, update)

    normed_alone, gradients = in_kernels(alone, text, spec, args, given[0])
    np.testing.assert_array_equal(exact(normed_alone), exact(normed[0]))
    right_x, right_scale = gradients_in_float64(wide, scale, 0.0, dsum)
    for one in gradients[:2]:
        np.testing.assert_allclose(exact(one), right_x, rtol=2**-8, atol=1e-5)
    np.testing.assert_allclose(exact(gradients[2]), right_scale, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("pretended_h200")
def test_the_loss_over_a_split_vocabulary_is_that_of_all_logits() -> None:
    hidden, head = some(2, 5, 32), some(32, 4 * 128, seed=1)
    targets = np.random.default_rng(2).integers(0, 512, (2, 5)).astype("i")
    mesh = mw.mesh("dp=2,tp=4", devices=jax.devices()[:8], axis_types="explicit")
    with jax.set_mesh(mesh), interpreted():

        @jax.jit
        def run(hidden: jax.Array, head: jax.Array, targets: jax.Array) -> Any:
            whole = all_gather(hidden, ("tp",)), all_gather(head, ("dp",))
            return cross_entropy(*whole, targets, jnp.float32(1.0), chunk=3)[1]

        found = run(
            jax.device_put(hidden, P("dp")),
            jax.device_put(head, P(None, "tp")),
            jax.device_put(targets, P("dp")),
        )
    logits = exact(jnp.einsum("ble,ev->blv", hidden, head))
    normalizer = np.log(np.exp(logits).sum(-1))
    at_target = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    np.testing.assert_allclose(found, (normalizer - at_target).sum(), rtol=1e-3)
