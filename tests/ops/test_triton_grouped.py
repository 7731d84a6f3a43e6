"""The kernels that multiply experts on NVIDIA GPUs before and after Hopper, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.ops.test_grouped import close_up_to_rounding

from meshwright.models import preset
from meshwright.ops import group_alignment, grouped_matmul, mosaic, triton_grouped
from meshwright.training.compute import experts_kernel_text

SIZES = np.array([0, 128, 0, 256, 128])
GROUPS = np.repeat(np.arange(len(SIZES)), SIZES)
ROWS = len(GROUPS)


@pytest.mark.parametrize(("inputs", "outputs"), [(128, 192), (80, 48), (72, 100)])
def test_products_are_those_of_each_group(inputs: int, outputs: int) -> None:
    """Also of dims that are padded; rows after the last group may hold anything."""
    random = np.random.default_rng(inputs)

    def drawn(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(size=shape), jnp.bfloat16)

    x, g = (drawn(ROWS + 128, dim).at[ROWS:].set(jnp.nan) for dim in (inputs, outputs))
    weights, sizes = drawn(len(SIZES), inputs, outputs), jnp.asarray(SIZES, jnp.int32)
    tiles = jnp.asarray([*GROUPS[::128], len(SIZES)], jnp.int32)
    y = triton_grouped.rows_product(x, weights, tiles, interpret=True)
    of_x = triton_grouped.rows_product(g, weights, tiles, True, interpret=True)
    of_weights = triton_grouped.weights_product(x, g, sizes, interpret=True)
    x64, w64, g64 = (np.asarray(array, "f8") for array in (x[:ROWS], weights, g[:ROWS]))
    close_up_to_rounding(y[:ROWS], np.einsum("ri,rio->ro", x64, w64[GROUPS]))
    close_up_to_rounding(of_x[:ROWS], np.einsum("ro,rio->ri", g64, w64[GROUPS]))
    of_groups = [x64[one == GROUPS].T @ g64[one == GROUPS] for one in range(len(SIZES))]
    close_up_to_rounding(of_weights, np.stack(of_groups))


@pytest.fixture
def pretended_a100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic, "current_device", lambda: ("cuda", "NVIDIA A100-SXM4-80GB"))
    monkeypatch.setattr(triton_grouped, "current_device", mosaic.current_device)


@pytest.mark.usefixtures("pretended_a100")
def test_other_gpus_take_them() -> None:
    rows, why = group_alignment(jnp.bfloat16)
    assert (rows, why) == (128, "it runs on the GPUs GH200, H100, H20, H200, H800")
    assert group_alignment(jnp.float32) == (1, "kernels are for 16 bits, not float32")
    model, told = preset("tiny-moe"), []
    for dtype in (jnp.bfloat16, jnp.float32):
        told.append(experts_kernel_text(dtype, model, "cuda"))
    assert told[0] == f"experts: by Triton's kernel (the faster kernel is not used: {why})"
    assert told[1].startswith("experts: by XLA, which multiplies every token with every expert (")
    assert experts_kernel_text(jnp.bfloat16, preset("tiny"), "cuda") is None


@pytest.mark.parametrize("kind", ["AMD Instinct MI300X", "NVIDIA Tesla T4", "Tesla V100-SXM2-16GB"])
def test_gpus_that_cannot_take_them_leave_experts_to_xla(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (mosaic, triton_grouped):
        monkeypatch.setattr(module, "current_device", lambda: ("gpu", kind))
    assert group_alignment(jnp.bfloat16)[0] == 1


@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="jax 0.12 lowers them with a GPU only")
@pytest.mark.usefixtures("pretended_a100")
def test_a_product_and_its_gradients_lower_for_gpus_that_are_not_here() -> None:
    x = jax.ShapeDtypeStruct((512, 2880), jnp.bfloat16)
    weights = jax.ShapeDtypeStruct((4, 2880, 720), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)

    def total(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        return jnp.sum(grouped_matmul(x, weights, sizes, 128).astype(jnp.float32))

    traced = jax.jit(jax.value_and_grad(total, (0, 1))).trace(x, weights, sizes)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("experts_rows") >= 2
    assert "experts_weights" in text
    assert "mosaic_gpu" not in text
