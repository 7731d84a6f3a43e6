"""The kernels that multiply experts on Hopper GPUs, in jax's interpreter, against numpy.

The interpreter reports memory that is written while another part of the kernel reads it. Their speed
needs such a GPU: benchmarks/expert_step.py --sides kernels.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.ops.test_grouped import close_up_to_rounding, in_fp8, rounded

from meshwright.ops import grouped_matmul, hopper_grouped
from meshwright.ops.mosaic import mosaic

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="its interpreter of such kernels needs jax 0.12"
)

# of one tile, which in 8 bits is one step of the sum; of none; of several; and rows of no group
SIZES = np.array([0, 128, 0, 256, 128])
GROUPS = np.repeat(np.arange(len(SIZES)), SIZES)
ROWS = len(GROUPS)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On a GPU of two processors, each of which computes several tiles."""
    monkeypatch.setattr(hopper_grouped, "_processors", lambda: 2)
    gpu = mosaic()
    with gpu.force_gpu_interpret_mode(gpu.InterpretGPUParams(detect_races=True)):
        yield


@pytest.mark.parametrize(
    ("matmul", "inputs", "outputs"),
    [
        ("bfloat16", 128, 384), ("bfloat16", 256, 128), ("fp8", 128, 384), ("fp8", 256, 128),
        ("bfloat16", 192, 320), ("bfloat16", 72, 180), ("fp8", 64, 100),  # padded
    ],
)  # fmt: skip
def test_products_and_gradients_are_those_of_each_group(
    matmul: str, inputs: int, outputs: int
) -> None:
    random = np.random.default_rng(inputs)
    x = jnp.asarray(random.normal(size=(ROWS + 128, inputs)) * 3, jnp.bfloat16)
    weights = jnp.asarray(random.normal(size=(len(SIZES), inputs, outputs)) * 0.02, jnp.bfloat16)
    g = jnp.asarray(random.normal(size=(ROWS + 128, outputs)) * 1e-4, jnp.bfloat16)
    x, g = (array.at[ROWS:].set(jnp.nan) for array in (x, g))

    def product(x: jax.Array, weights: jax.Array) -> jax.Array:
        matrices = in_fp8(weights) if matmul == "fp8" else weights
        return grouped_matmul(x, matrices, jnp.asarray(SIZES), hopper_grouped.ROWS)

    y, pull = jax.vjp(product, x, weights)
    of_x, of_weights = pull(g)
    exact = [np.asarray(array, "f8") for array in (x[:ROWS], weights, g[:ROWS])]
    if matmul == "fp8":
        dtypes = jnp.float8_e4m3fn, jnp.float8_e4m3fn, jnp.float8_e5m2
        exact = [rounded(array, dtype) for array, dtype in zip(exact, dtypes, strict=True)]
    x64, w64, g64 = exact
    close_up_to_rounding(y[:ROWS], np.einsum("ri,rio->ro", x64, w64[GROUPS]))
    close_up_to_rounding(of_x[:ROWS], np.einsum("ro,rio->ri", g64, w64[GROUPS]))
    of_groups = [x64[one == GROUPS].T @ g64[one == GROUPS] for one in range(len(SIZES))]
    close_up_to_rounding(of_weights, np.stack(of_groups))
