"""The cuDNN kernel as far as it goes without a GPU: what it asks cuDNN for, and what it refuses.

What cuDNN answers is compared with a plain softmax by benchmarks/long_context.py, on a GPU.
"""

import dataclasses
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.ops.attention import (
    EVERYTHING,
    Call,
    ContextParallel,
    Mask,
    attention,
    fused,
    kernels,
)
from meshwright.ops.attention.block import Block, Gradients, Partial
from meshwright.ops.attention.cudnn import cudnn

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 32, 4, 2, 64


def described(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def both_passes(mask: Mask) -> Any:
    def run(q: Any, k: Any, v: Any, segments: Any, given: Any) -> tuple[Partial, Gradients]:
        block = Block(q, k, v, segments, segments)
        whole = cudnn.forward(block, mask)
        return whole, cudnn.backward(block, mask, whole, given)

    return run


def asked(text: str) -> list[tuple[str, dict[str, Any], str]]:
    """Of every call of cuDNN in a lowered program: its name, its options and its types."""
    found = []
    for line in text.splitlines():
        name = re.search(r"custom_call @__cudnn\$(\w+)\(", line)
        if name:
            options = re.search(r'backend_config = "((?:[^"\\]|\\.)*)"', line)
            assert options is not None
            config = json.loads(options[1].replace("\\22", '"'))["cudnn_fmha_backend_config"]
            found.append((name[1], config, line.rpartition(" : ")[2]))
    return found


def lowered(
    mask: Mask, packed: bool, length: int = LENGTH
) -> list[tuple[str, dict[str, Any], str]]:
    q, k = (described(BATCH, length, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS))
    segments = described(BATCH, length, dtype=jnp.int32) if packed else None
    traced = jax.jit(both_passes(mask)).trace(q, k, k, segments, q)
    return asked(traced.lower(lowering_platforms=("cuda",)).as_text())


@pytest.mark.parametrize(
    ("mask", "name", "window"),
    [(Mask(), "CAUSAL", 0), (EVERYTHING, "NO_MASK", 0), (Mask(window=8), "CAUSAL", 8)],
)
def test_each_pass_is_one_call_with_the_same_mask_and_scale(
    mask: Mask, name: str, window: int
) -> None:
    (forward, said, _), (backward, said_back, _) = lowered(mask, packed=False)
    assert (forward, backward) == ("fmhaSoftmax", "fmhaSoftmaxBackward")
    for options in (said, said_back):
        assert options["mask_type"] == name
        assert options["sliding_window_length"] == window
        assert options["fmha_scale"] == HEAD_DIM**-0.5
        assert options["dropout_rate"] == 0


def test_the_backward_pass_is_given_lse_head_by_head_and_keeps_key_heads_few() -> None:
    *_, (_, _, types) = lowered(Mask(), packed=False)
    given, got = types.split(" -> ")
    assert f"tensor<{BATCH}x{HEADS}x{LENGTH}xf32>" in given
    assert got.count(f"tensor<{BATCH}x{KV_HEADS}x{LENGTH}x{HEAD_DIM}xbf16>") == 2


def test_documents_are_a_bias_without_a_gradient() -> None:
    (forward, _, _), (backward, _, types) = lowered(Mask(), packed=True)
    assert (forward, backward) == ("fmhaScaleBiasSoftmax", "fmhaScaleBiasSoftmaxBackward")
    given, got = types.split(" -> ")
    bias = f"tensor<{BATCH}x1x{LENGTH}x{LENGTH}xbf16>"
    assert bias in given
    assert bias not in got


def test_a_bias_masks_the_keys_of_other_documents() -> None:
    given: list[fused.Inputs] = []
    q, k = (jnp.ones((1, 4, heads, HEAD_DIM), jnp.bfloat16) for heads in (HEADS, KV_HEADS))
    block = Block(q, k, k, jnp.array([[1, 1, 2, 0]]), jnp.array([[2, 1, 1, 3]]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "forward", given.append)
        cudnn.forward(block, EVERYTHING)
    assert given[0].bias is not None
    seen = np.exp(np.asarray(given[0].bias, np.float32))[0, 0]
    np.testing.assert_array_equal(seen, [[0, 1, 1, 0], [0, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])


@pytest.mark.parametrize("packed", [False, True])
def test_a_ring_of_it_has_the_types_of_each_device(
    packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "current_platform", lambda: "gpu")
    mesh = mw.mesh("dp=2,sp=4,tp=2", devices=jax.devices(), axis_types="explicit")

    def run(q: Any, k: Any, v: Any, segments: Any, given: Any) -> Any:
        def call(q: Any, k: Any, v: Any) -> Any:
            return attention(
                q, k, v, segments, context=ContextParallel("ring", "zigzag"), kernel="cudnn"
            )

        out, back = jax.vjp(call, q, k, v)
        return out, back(given)

    def split(x: jax.ShapeDtypeStruct, *axes: str) -> jax.ShapeDtypeStruct:
        return x.update(sharding=jax.NamedSharding(mesh, P(*axes)))

    q, k = (
        split(described(BATCH, LENGTH, heads, HEAD_DIM), "dp", "sp", "tp")
        for heads in (HEADS, KV_HEADS)
    )
    segments = split(described(BATCH, LENGTH, dtype=jnp.int32), "dp", "sp")
    with jax.set_mesh(mesh):
        traced = jax.jit(run).trace(q, k, k, segments if packed else None, q)
        calls = asked(traced.lower(lowering_platforms=("cuda",)).as_text())
    out, gradients = traced.out_info
    assert [x.sharding.spec for x in (out, *gradients)] == [P("dp", "sp", "tp", None)] * 4
    # causal at home; the others are seen whole
    for way in ("Softmax", "SoftmaxBackward"):
        masks = {options["mask_type"] for name, options, _ in calls if name.endswith(way)}
        assert masks >= {"CAUSAL", "NO_MASK"}


CALL = Call("gpu", "bfloat16", 4096, 4096, 128, Mask(), segmented=False)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"platform": "tpu"}, "it runs on NVIDIA GPUs"),
        ({"dtype": "float32"}, "not float32"),
        ({"head_dim": 136}, "head_dim 136 is not a multiple of 8 up to 128"),
        ({"mask": Mask(block=16)}, "no block-causal mask"),
        ({"mask": Mask(offset=64)}, "causal masks have no offset"),
        ({"mask": Mask(window=64), "segmented": True}, "not both"),
        ({"dynamic": True}, "the mask at compile time"),
        ({"segmented": True, "queries": 2**16, "keys": 2**16}, "too large for 65,536 queries"),
    ],
)
def test_what_it_cannot_do_is_said(changes: dict[str, Any], why: str) -> None:
    assert why in str(cudnn.refuses(dataclasses.replace(CALL, **changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mask": Mask(window=64)},
        {"mask": EVERYTHING, "keys": 512},
        {"segmented": True, "queries": 2**15, "keys": 2**15},
        {"segmented": True, "queries": 333, "keys": 333},
        {"queries": 333, "keys": 333},
    ],
)
def test_what_it_can_do_it_takes(changes: dict[str, Any]) -> None:
    assert cudnn.refuses(dataclasses.replace(CALL, **changes)) is None


def test_a_jax_that_calls_cudnn_otherwise_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src.cudnn import fused_attention_stablehlo

    def rule(scale: float, softcap: float, res: Any, grad_output: Any) -> None: ...

    monkeypatch.setattr(fused_attention_stablehlo, "_dot_product_attention_bwd_rule", rule)
    fused._unknown_calls.cache_clear()
    assert "has an unknown interface to cuDNN (softcap)" in str(cudnn.refuses(CALL))
    monkeypatch.undo()
    fused._unknown_calls.cache_clear()
    assert cudnn.refuses(CALL) is None
