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
from tests.ops.attention.reference import Sees, in_float64, inputs

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


def weights_of(given: fused.Inputs, lse: Any = None) -> tuple[Any, Any, Any]:
    """[batch, heads, queries, keys]: by the log-sum given, or by their own."""
    k = jnp.repeat(given.k, given.q.shape[2] // given.k.shape[2], axis=2)
    scores = jnp.einsum("bihd,bjhd->bhij", given.q, k) * given.q.shape[-1] ** -0.5
    if given.bias is not None:
        scores = scores + given.bias
    if given.causal:
        scores = jnp.where(jnp.tri(*scores.shape[2:], dtype=bool), scores, -jnp.inf)
    if lse is None:
        lse = jax.nn.logsumexp(scores, axis=-1).swapaxes(1, 2)
    return jnp.exp(scores - lse.swapaxes(1, 2)[..., None]), lse, k


def plain_forward(given: fused.Inputs) -> Partial:
    weights, lse, _ = weights_of(given)
    v = jnp.repeat(given.v, given.q.shape[2] // given.v.shape[2], axis=2)
    return Partial(jnp.einsum("bhij,bjhd->bihd", weights, v), lse)


def plain_backward(given: fused.Inputs, whole: Partial, dout: Any) -> Gradients:
    weights, _, k = weights_of(given, whole.lse)
    group = given.q.shape[2] // given.k.shape[2]
    v = jnp.repeat(given.v, group, axis=2)
    delta = jnp.sum(whole.out * dout, axis=-1).swapaxes(1, 2)[..., None]
    scale = given.q.shape[-1] ** -0.5
    of_scores = weights * (jnp.einsum("bihd,bjhd->bhij", dout, v) - delta) * scale

    def shared(x: Any) -> Any:
        return x.reshape(*x.shape[:2], -1, group, x.shape[3]).sum(3)

    return Gradients(
        jnp.einsum("bhij,bjhd->bihd", of_scores, k),
        shared(jnp.einsum("bhij,bihd->bjhd", of_scores, given.q)),
        shared(jnp.einsum("bhij,bihd->bjhd", weights, dout)),
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("most", "calls"), [(2**26, 1), (128 * 300 * 2, 3), (1, 3)])
def test_documents_are_kept_apart_in_blocks_of_queries(
    most: int, calls: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By plain calls with what cuDNN is given, against attention with a mask in float64."""
    given: list[fused.Inputs] = []

    def forward(inputs: fused.Inputs) -> Partial:
        given.append(inputs)
        return plain_forward(inputs)

    monkeypatch.setattr(fused, "forward", forward)
    monkeypatch.setattr(fused, "backward", plain_backward)
    monkeypatch.setattr("meshwright.ops.attention.cudnn.BIAS_UP_TO", most)
    length, mask = 300, Mask() if causal else EVERYTHING
    segments = np.array([[1] * 100 + [2] * 60 + [3] * 140, [5] * 299 + [0]], "i")
    q, k, v, dout = inputs(2, length, HEADS, KV_HEADS)
    block = Block(q, k, v, jnp.asarray(segments), jnp.asarray(segments))
    whole = cudnn.forward(block, mask)
    found = whole.out, *cudnn.backward(block, mask, whole, dout)[:3]
    out, gradients = in_float64(q, k, v, dout, segments, Sees(causal))
    for name, got, want in zip("oqkv", found, (out, *gradients[:3]), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5, err_msg=name)
    assert len(given) == calls
    sizes = [one.bias.size for one in given if one.bias is not None]
    assert max(sizes) <= (2 * length * length if calls == 1 else 2 * 128 * length)


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
    # segment ids go around the ring: every call has a bias, without them none
    assert {"ScaleBias" in name for name, _, _ in calls} == {packed}


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
        {"segmented": True, "queries": 2**19, "keys": 2**19},
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
