"""Our backward pass for Hopper GPUs: when it is taken, and that it lowers.

Its numbers need such a GPU: benchmarks/gpu_kernels.py checks them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from meshwright.errors import MeshwrightError
from meshwright.ops import mosaic
from meshwright.ops.attention import hopper
from meshwright.ops.attention.block import Partial

NEEDS = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="kernels that add to an array need jax 0.11"
)


@pytest.mark.usefixtures("pretended_h200")
@pytest.mark.parametrize(
    ("queries", "keys", "head_dim", "causal", "documents", "why"),
    [
        (1024, 1024, 64, True, False, None),
        (512, 1024, 64, False, False, None),
        (1024, 1024, 128, True, False, "head_dim of 64, not 128"),
        (1000, 1000, 64, True, False, "1000 and 1000 are not multiples of 128"),
        (512, 1024, 64, True, False, "begins at the first key"),
        (1024, 1024, 64, True, True, "does not know packed documents"),
    ],
)
def test_what_it_serves_and_why_not(
    queries: int, keys: int, head_dim: int, causal: bool, documents: bool, why: str | None
) -> None:
    found = hopper.refuses(queries, keys, head_dim, causal=causal, documents=documents)
    assert found is None if why is None else why in (found or "")


@pytest.mark.parametrize(
    ("device", "switch", "why"),
    [
        (("cuda", "NVIDIA H100 80GB HBM3"), None, None),
        (("cuda", "NVIDIA GH200 480GB"), None, None),
        (("cuda", "NVIDIA A100-SXM4-80GB"), None, "it runs on the GPUs"),
        (("cuda", "NVIDIA B200"), None, "it runs on the GPUs"),
        (("tpu", "TPU v5p"), None, "it runs on the GPUs"),
        (("cuda", "NVIDIA H20-3e"), None, None),
        (("cuda", "NVIDIA H200"), "1", None),
        (("cuda", "NVIDIA H200"), "0", "MESHWRIGHT_MOSAIC is 0"),
    ],
)
def test_the_chips_it_runs_on(
    device: tuple[str, str], switch: str | None, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mosaic, "device_in_force", lambda: device)
    monkeypatch.setattr(mosaic, "OLDEST", (0, 0))
    if switch is not None:
        monkeypatch.setenv(mosaic.SWITCH, switch)
    found = mosaic.unavailable(mosaic.HOPPER)
    assert found is None if why is None else why in (found or "")


@pytest.mark.usefixtures("pretended_h200")
def test_a_switch_that_says_neither_is_a_mistake_and_an_old_jax_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mosaic, "OLDEST", (99, 1))
    assert mosaic.unavailable(mosaic.HOPPER) == "it needs jax 99.1 or newer"
    monkeypatch.setenv(mosaic.SWITCH, "off")
    with pytest.raises(MeshwrightError, match="MESHWRIGHT_MOSAIC='off' in the environment is"):
        mosaic.unavailable(mosaic.HOPPER)


@pytest.mark.usefixtures("pretended_h200")
def test_what_is_taken_and_what_is_not_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    mosaic.say.cache_clear()
    with caplog.at_level("INFO", logger="meshwright"):
        for _ in range(2):
            hopper.refuses(1024, 1024, 64, causal=True)
            hopper.refuses(1024, 1024, 128, causal=True)
    assert caplog.messages == [
        "backward of attention, 1024 queries and 1024 keys: our own kernel",
        "backward of attention, 1024 queries and 1024 keys: not ours: it is for a head_dim of 64, "
        "not 128",
    ]


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
