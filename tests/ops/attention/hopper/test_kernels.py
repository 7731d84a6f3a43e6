"""Our kernels for Hopper GPUs: when they are taken, and that they lower.

Their numbers need such a GPU: benchmarks/gpu_kernels.py --check checks them.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from meshwright.errors import MeshwrightError
from meshwright.files import log_once
from meshwright.ops import mosaic
from meshwright.ops.attention import (
    EVERYTHING,
    Call,
    ContextParallel,
    Mask,
    attention,
    choose,
    kernels,
)
from meshwright.ops.attention.block import Block
from meshwright.ops.attention.hopper import hopper

NEEDS = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="kernels that add to an array need jax 0.11"
)


ABLE = Call("gpu", "bfloat16", 1024, 1024, 64, Mask(), segmented=False)


@pytest.mark.usefixtures("pretended_h200")
@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({}, None),
        ({"segmented": True}, None),
        ({"segmented": True, "mask": Mask(window=64)}, None),
        ({"queries": 512, "mask": EVERYTHING}, None),
        ({"queries": 192, "keys": 128, "mask": Mask(block=32)}, None),
        ({"head_dim": 128, "segmented": True}, None),
        ({"head_dim": 128}, None),
        ({"head_dim": 96}, "head_dim 64 or 128, not 96"),
        ({"queries": 1000, "keys": 1001}, None),
        ({"dynamic": True}, "the mask at compile time"),
        ({"dtype": "float16"}, "in bfloat16, not float16"),
        ({"platform": "tpu"}, "it runs on Hopper GPUs"),
    ],
)
def test_what_it_serves_and_why_not(said: dict[str, Any], why: str | None) -> None:
    found = hopper.refuses(dataclasses.replace(ABLE, **said))
    assert found is None if why is None else why in (found or "")


@pytest.mark.usefixtures("pretended_h200")
def test_it_is_taken_where_it_is_the_fastest_that_can_serve() -> None:
    part = {"queries": 256, "keys": 256, "mask": Mask(window=300, offset=256)}
    for said, name in (
        ({}, "cudnn"),
        ({"segmented": True}, "hopper"),
        ({"dtype": "float16"}, "cudnn"),
        ({"head_dim": 128}, "cudnn"),
        ({"head_dim": 128, "mask": Mask(window=64)}, "cudnn"),
        ({"head_dim": 128, "segmented": True}, "hopper"),
        ({"head_dim": 128, "partial": True}, "hopper"),  # in float32, which cuDNN cannot give
        ({"segmented": True, "mask": Mask(window=64)}, "hopper"),
        # what cuDNN cannot serve
        ({"head_dim": 128, "mask": Mask(block=64)}, "hopper"),
        ({"head_dim": 128, "queries": 512}, "hopper"),
        ({"head_dim": 128, **part}, "hopper"),
    ):
        assert choose(dataclasses.replace(ABLE, **said)) == name
    assert choose(dataclasses.replace(ABLE, head_dim=128), "hopper") == "hopper"
    with pytest.raises(
        MeshwrightError, match=r"attention='hopper' does not support this: .* not 96"
    ):
        choose(dataclasses.replace(ABLE, head_dim=96), "hopper")


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
    monkeypatch.setattr(mosaic, "current_device", lambda: device)
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
    log_once.cache_clear()
    with caplog.at_level("INFO", logger="meshwright"):
        for _ in range(2):
            choose(dataclasses.replace(ABLE, segmented=True))
            choose(dataclasses.replace(ABLE, head_dim=128, mask=Mask(block=64)))
    assert caplog.messages == [
        "attention kernel: hopper",
        "attention kernel: hopper (not cudnn: it has no block-causal mask)",
    ]


@NEEDS
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(
    "mask", [Mask(), EVERYTHING, Mask(window=100), Mask(block=96), Mask(offset=128)], ids=str
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_it_lowers_for_a_gpu_that_is_not_here_on_any_mesh(
    mask: Mask, documents: bool, head_dim: int, dtype: Any
) -> None:
    mesh = jax.make_mesh((4,), ("dp",), axis_types=(AxisType.Explicit,))

    def local(q: jax.Array, k: jax.Array, v: jax.Array, *segments: jax.Array) -> Any:
        block = Block(q, k, v, *segments * 2)
        whole = hopper.forward(block, mask, dtype)
        return whole, hopper.backward(block, mask, whole, q, dtype)

    with jax.set_mesh(mesh):
        q, k, v = (
            jax.device_put(jnp.zeros((4, 256, heads, head_dim), jnp.bfloat16), P("dp"))
            for heads in (4, 2, 2)
        )
        segments = [jax.device_put(jnp.zeros((4, 256), jnp.int32), P("dp"))] * documents
        given = (q, k, v, *segments)
        on_each = jax.shard_map(local, in_specs=(P("dp"),) * len(given), out_specs=P("dp"))
        traced = jax.jit(on_each).trace(*given)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 2
    whole, gradients = traced.out_info
    dq, dk, dv, dbias = gradients
    assert [x.shape for x in (*whole, dq, dk, dv)] == [
        q.shape, q.shape[:3], q.shape, k.shape, v.shape,
    ]  # fmt: skip
    assert {x.dtype for x in (whole.out, dq, dk, dv)} == {jnp.dtype(dtype)}
    assert dbias is None


@NEEDS
@pytest.mark.usefixtures("pretended_h200")
@pytest.mark.parametrize(
    ("strategy", "order", "mask"),
    [
        ("ring", "zigzag", Mask()),
        ("ring", "contiguous", Mask(window=300)),
        ("ring", "contiguous", EVERYTHING),
        ("allgather", "zigzag", Mask()),
        ("ulysses", "contiguous", Mask()),
    ],
)
@pytest.mark.parametrize("documents", [False, True])
def test_rows_that_are_split_take_it_in_a_loop_over_layers_with_checkpoints(
    strategy: str, order: str, mask: Mask, documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "current_platform", lambda: "gpu")
    mesh = jax.make_mesh((4,), ("sp",), axis_types=(AxisType.Explicit,))

    def layer(x: jax.Array, segments: jax.Array | None) -> jax.Array:
        return attention(
            x, x[:, :, :4], x[:, :, :4], segments, mask, context=ContextParallel(strategy, order)
        )

    def loss(x: jax.Array, *segments: jax.Array) -> jax.Array:
        one = jax.checkpoint(lambda x: layer(x, segments[0] if segments else None))
        x, _ = jax.lax.scan(lambda x, _: (one(x), None), x, length=2)
        return jnp.sum(x.astype(jnp.float32))

    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.zeros((2, 1024, 8, 64), jnp.bfloat16), P(None, "sp"))
        segments = [jax.device_put(jnp.zeros((2, 1024), jnp.int32), P(None, "sp"))] * documents
        text = jax.jit(jax.grad(loss)).trace(x, *segments).lower(lowering_platforms=("cuda",))
    calls = {name: text.as_text().count(name) for name in ("@mosaic_gpu_v2", "__cudnn$")}
    if strategy == "ulysses" and not documents:  # full sequences, of which cuDNN's is faster
        assert calls["__cudnn$"] >= 3
        assert calls["@mosaic_gpu_v2"] == 0
    else:
        assert calls["@mosaic_gpu_v2"] >= 3  # forward, forward again and backward
        assert calls["__cudnn$"] == 0
    assert "dot_general" not in text.as_text()
