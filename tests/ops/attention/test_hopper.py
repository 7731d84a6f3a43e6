"""Our backward pass for Hopper GPUs: when it is taken, that it lowers, and its numbers on one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from meshwright.ops import mosaic
from meshwright.ops.attention import attention, hopper
from meshwright.ops.attention.block import Partial
from meshwright.ops.attention.mask import Mask

NEEDS = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="kernels that add to an array need jax 0.11"
)
ON_HOPPER = pytest.mark.skipif(
    jax.default_backend() != "gpu" or hopper.refuses(1024, 1024, 64, causal=True) is not None,
    reason="needs a Hopper GPU",
)


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic, "device_in_force", lambda: ("cuda", "NVIDIA H200"))
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    ("queries", "keys", "head_dim", "causal", "why"),
    [
        (1024, 1024, 64, True, None),
        (512, 1024, 64, False, None),
        (1024, 1024, 128, True, "head_dim of 64, not 128"),
        (1000, 1000, 64, True, "1000 and 1000 are not multiples of 128"),
        (512, 1024, 64, True, "begins at the first key"),
    ],
)
def test_what_it_serves_and_why_not(
    queries: int, keys: int, head_dim: int, causal: bool, why: str | None
) -> None:
    found = hopper.refuses(queries, keys, head_dim, causal=causal)
    assert found is None if why is None else why in (found or "")


@pytest.mark.parametrize(
    ("device", "switch", "why"),
    [
        (("cuda", "NVIDIA H100 80GB HBM3"), None, None),
        (("cuda", "NVIDIA GH200 480GB"), None, None),
        (("cuda", "NVIDIA A100-SXM4-80GB"), None, "it runs on the GPUs"),
        (("cuda", "NVIDIA B200"), None, "it runs on the GPUs"),
        (("tpu", "TPU v5p"), None, "it runs on the GPUs"),
        (("cuda", "NVIDIA H200"), "0", "MESHWRIGHT_MOSAIC is 0"),
    ],
)
def test_the_chips_it_runs_on(
    device: tuple[str, str], switch: str | None, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mosaic, "device_in_force", lambda: device)
    if switch is not None:
        monkeypatch.setenv(mosaic.SWITCH, switch)
    found = mosaic.unavailable(mosaic.HOPPER)
    assert found is None if why is None else why in (found or "")


def arrays(
    batch: int, length: int, heads: int, kv_heads: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)

    def normal(number: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=(batch, length, number, 64)), jnp.bfloat16)

    return normal(heads), normal(kv_heads), normal(kv_heads), normal(heads)


@NEEDS
@pytest.mark.parametrize("causal", [True, False])
def test_it_lowers_for_a_gpu_that_is_not_here_on_any_mesh(causal: bool) -> None:
    mesh = jax.make_mesh((4,), ("dp",), axis_types=(AxisType.Explicit,))
    rows = P("dp")

    def local(*given: Any) -> Any:
        q, k, v, out, log_sum, slope = given
        return hopper.backward(q, k, v, Partial(out, log_sum), slope, causal=causal)

    with jax.set_mesh(mesh):
        q, k, v, slope = (jax.device_put(x, rows) for x in arrays(4, 256, 4, 2))
        log_sum = jax.device_put(jnp.zeros((4, 256, 4)), rows)
        on_each = jax.shard_map(local, in_specs=(rows,) * 6, out_specs=rows)
        traced = jax.jit(on_each).trace(q, k, v, q, log_sum, slope)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 1
    found = traced.out_info
    assert [x.shape for x in found] == [q.shape, k.shape, v.shape]
    assert {x.dtype for x in found} == {jnp.dtype(jnp.bfloat16)}


def slopes_in_float32(
    q: jax.Array, k: jax.Array, v: jax.Array, given: jax.Array, causal: bool
) -> Any:
    """By plain softmax, differentiated by jax."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        group = q.shape[2] // k.shape[2]
        k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision="highest") / 8
        if causal:
            seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
            scores = jnp.where(seen[None, None], scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v, precision="highest")

    wide = [x.astype(jnp.float32) for x in (q, k, v, given)]
    return jax.vjp(attend, *wide[:3])[1](wide[3])


@ON_HOPPER
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (3, 3), (8, 1)])
def test_numbers_on_a_hopper_gpu(heads: int, kv_heads: int, causal: bool) -> None:
    q, k, v, given = arrays(2, 512, heads, kv_heads)

    @jax.jit
    def slopes(*given: jax.Array) -> Any:
        *qkv, out = given
        return jax.vjp(lambda q, k, v: attention(q, k, v, mask=Mask(causal=causal)), *qkv)[1](out)

    wanted = slopes_in_float32(q, k, v, given, causal)
    for found, right in zip(slopes(q, k, v, given), wanted, strict=True):
        off = jnp.max(jnp.abs(found.astype(jnp.float32) - right)) / jnp.max(jnp.abs(right))
        assert off < 8e-3  # bfloat16 has 8 bits
