"""The fused cross-entropy: against log_softmax over all logits at once, on any mesh."""

import dataclasses
import importlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.ops.collectives import all_gather, spec_of
from meshwright.ops.cross_entropy import IGNORED, cross_entropy, target_log_probs

BATCH, LENGTH, EMBED, VOCAB = 8, 6, 16, 40
SCALE = 1 / 37


@dataclasses.dataclass(frozen=True)
class Case:
    mesh: str = "dp=1,fsdp=1,tp=1,sp=1"
    chunk: int = 2048
    z_loss: float = 0.0
    tied: bool = False
    padding: int = 0  # entries of the head that are no tokens
    weighted: bool = False
    by_token: bool = False  # from target_log_probs, whose cotangents are the weights


def inputs(tied: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(BATCH, LENGTH, EMBED)).astype("f")
    head = rng.normal(size=(VOCAB, EMBED) if tied else (EMBED, VOCAB)).astype("f")
    targets = rng.integers(0, VOCAB, (BATCH, LENGTH)).astype("i")
    targets[0, :4] = (0, VOCAB - 1, VOCAB // 2, VOCAB // 2 - 1)
    targets[rng.random((BATCH, LENGTH)) < 0.2] = IGNORED
    targets[3] = IGNORED  # a whole sequence: one device of dp=8 counts nothing
    return hidden, head, targets


def token_weights() -> np.ndarray:
    return np.random.default_rng(1).uniform(0.1, 3, (BATCH, LENGTH)).astype("f")


def in_float64(
    hidden: np.ndarray, head: np.ndarray, targets: np.ndarray, case: Case
) -> tuple[float, float, np.ndarray, np.ndarray]:
    """Loss, entropy and the gradients, from all logits at once."""
    h, w = hidden.astype("f8"), head.astype("f8")
    w = w.T if case.tied else w
    logits = h @ w
    most = logits.max(-1, keepdims=True)
    normalizer = np.log(np.exp(logits - most).sum(-1)) + most[..., 0]
    counted = targets != IGNORED
    counts = counted * (token_weights().astype("f8") if case.weighted else 1)
    at_target = np.take_along_axis(logits, np.where(counted, targets, 0)[..., None], -1)[..., 0]
    entropy = ((normalizer - at_target) * counts).sum()
    loss = SCALE * (entropy + case.z_loss * (normalizer**2 * counts).sum())
    softmax = np.exp(logits - normalizer[..., None])
    gradient = softmax * (1 + 2 * case.z_loss * normalizer)[..., None]
    gradient -= np.eye(VOCAB)[np.where(counted, targets, 0)]
    gradient *= (counts * SCALE)[..., None]
    of_head = np.einsum("ble,blv->ev", h, gradient)
    return loss, entropy, gradient @ w.T, of_head.T if case.tied else of_head


def fused(case: Case, dtype: Any = jnp.float32) -> tuple[Any, Any, Any, Any]:
    hidden, head, targets = inputs(case.tied)
    missing = (0, case.padding)
    # large numbers, which would be the likeliest tokens
    head = np.pad(head, (missing, (0, 0)) if case.tied else ((0, 0), missing), constant_values=50)
    count = np.prod([int(part.split("=")[1]) for part in case.mesh.split(",")])
    mesh = mw.mesh(case.mesh, devices=jax.devices()[:count], axis_types="explicit")
    tokens = P(("dp", "fsdp"), "sp")
    head_spec = P("tp", ("fsdp", "sp")) if case.tied else P(("fsdp", "sp"), "tp")

    @jax.jit
    def run(hidden: jax.Array, head: jax.Array, targets: jax.Array, weights: Any) -> Any:
        def loss(hidden: jax.Array, head: jax.Array) -> Any:
            whole = all_gather(head, ("dp", "fsdp", "sp"))
            if case.by_token:
                log_probs = target_log_probs(
                    all_gather(hidden, ("tp",)), whole, targets,
                    chunk=case.chunk, tied=case.tied, vocab=VOCAB,
                )  # fmt: skip
                entropy = -jnp.sum(log_probs * jax.sharding.reshard(weights, spec_of(log_probs)))
                return SCALE * entropy, entropy
            return cross_entropy(
                all_gather(hidden, ("tp",)), whole, targets, jnp.float32(SCALE),
                z_loss=case.z_loss, chunk=case.chunk, tied=case.tied, vocab=VOCAB, weights=weights,
            )  # fmt: skip

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(hidden, head)

    with jax.set_mesh(mesh):
        placed = (
            jax.device_put(jnp.asarray(hidden, dtype), P(*tokens, None)),
            jax.device_put(jnp.asarray(head, dtype), head_spec),
            jax.device_put(targets, tokens),
            jax.device_put(token_weights(), tokens) if case.weighted else None,
        )
        (loss, entropy), gradients = run(*placed)
        for gradient, given in zip(gradients, placed[:2], strict=True):
            assert gradient.sharding.is_equivalent_to(given.sharding, gradient.ndim)
            assert gradient.dtype == given.dtype
    return loss, entropy, *gradients


ON_MESHES = [
    Case("dp=1,fsdp=2,tp=2,sp=2", chunk=5, z_loss=1e-2, tied=True),
    Case("dp=1,fsdp=2,tp=2,sp=2", chunk=5, weighted=True, by_token=True),
]
QUICK = [
    Case(),  # one chunk of 48 tokens
    Case(chunk=30),  # two, the last filled up
    Case(chunk=20, z_loss=1e-2, weighted=True),
    Case("dp=8,fsdp=1,tp=1,sp=1", chunk=4),
    *ON_MESHES,
]
MORE = [
    Case(chunk=20),  # three chunks, and seven
    Case(chunk=7),
    Case(chunk=16, z_loss=1e-2),
    Case(chunk=5, z_loss=1e-2, tied=True),
    Case("dp=1,fsdp=1,tp=8,sp=1", z_loss=1e-2),
    Case("dp=1,fsdp=4,tp=1,sp=2", chunk=4, tied=True),
    Case("dp=2,fsdp=2,tp=2,sp=1", chunk=5, z_loss=1e-2),
    Case("dp=1,fsdp=2,tp=2,sp=2", chunk=5, tied=True, weighted=True),
    Case(chunk=20, weighted=True, by_token=True),
    Case("dp=2,fsdp=1,tp=4,sp=1", chunk=5, tied=True, weighted=True, by_token=True),
]
SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in MORE]


@pytest.mark.parametrize("case", [*QUICK, *SLOW], ids=str)
def test_loss_entropy_and_gradients_are_those_of_all_logits_at_once(case: Case) -> None:
    found = fused(case)
    expected = in_float64(*inputs(case.tied), case)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.fixture
def as_on_tpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code that TPUs run, on whatever is here."""
    module = importlib.import_module("meshwright.ops.cross_entropy")
    monkeypatch.setattr(module, "current_platform", lambda: "tpu")


@pytest.mark.parametrize("case", [*ON_MESHES, *SLOW], ids=str)
@pytest.mark.usefixtures("as_on_tpus")
def test_the_sum_that_starts_with_zeros_is_the_same(case: Case) -> None:
    found = fused(case)
    expected = in_float64(*inputs(case.tied), case)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "case",
    [
        Case(padding=3),
        Case("dp=1,fsdp=1,tp=8,sp=1", padding=8, weighted=True, by_token=True),
        # the last of eight devices has padding alone
        Case("dp=1,fsdp=1,tp=8,sp=1", z_loss=1e-2, padding=8),
        Case("dp=1,fsdp=2,tp=4,sp=1", chunk=5, z_loss=1e-2, tied=True, padding=4),
    ],
    ids=str,
)
def test_padding_of_the_vocabulary_has_no_probability_and_no_gradient(case: Case) -> None:
    *found, of_head = fused(case)
    *expected, expected_of_head = in_float64(*inputs(case.tied), case)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    of_head = np.asarray(of_head) if case.tied else np.asarray(of_head).T
    expected_of_head = expected_of_head if case.tied else expected_of_head.T
    np.testing.assert_allclose(of_head[:VOCAB], expected_of_head, rtol=1e-5, atol=1e-6)
    assert len(of_head) == VOCAB + case.padding
    assert not of_head[VOCAB:].any()  # exactly 0


def test_the_reference_itself_is_jaxs_log_softmax() -> None:
    case = Case(z_loss=1e-2)
    hidden, head, targets = inputs(False)

    def plain(hidden: jax.Array, head: jax.Array) -> jax.Array:
        logits = hidden @ head
        entropy = -jnp.take_along_axis(
            jax.nn.log_softmax(logits), jnp.maximum(targets, 0)[..., None], -1
        )[..., 0]
        z = case.z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
        return SCALE * jnp.sum(jnp.where(targets == IGNORED, 0.0, entropy + z))

    loss, gradients = jax.jit(jax.value_and_grad(plain, argnums=(0, 1)))(hidden, head)
    expected_loss, _, *expected = in_float64(hidden, head, targets, case)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for one, other in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_bfloat16_is_within_rounding() -> None:
    case = Case("dp=2,fsdp=2,tp=2,sp=1", chunk=5)
    loss, entropy, *gradients = fused(case, jnp.bfloat16)
    hidden, head, targets = inputs(False)
    rounded = (np.asarray(jnp.asarray(x, jnp.bfloat16), "f") for x in (hidden, head))
    right_loss, right_entropy, *right = in_float64(*rounded, targets, case)
    assert loss.dtype == entropy.dtype == jnp.float32
    # logits of about 3.5 are rounded to 8 bits before the softmax
    np.testing.assert_allclose(loss, right_loss, rtol=2**-8)
    np.testing.assert_allclose(entropy, right_entropy, rtol=2**-8)
    for found, exact in zip(gradients, right, strict=True):
        assert np.linalg.norm(np.asarray(found, "f8") - exact) < 2**-6 * np.linalg.norm(exact)


def test_logits_that_would_overflow_do_not() -> None:
    with jax.set_mesh(mw.mesh("tp=4", devices=jax.devices()[:4], axis_types="explicit")):
        head = jax.device_put(np.eye(4, 8, dtype="f") * 1e4, P(None, "tp"))
        hidden = all_gather(jnp.eye(4)[None], ("tp",))
        targets = jnp.arange(4)[None]
        loss, entropy = cross_entropy(hidden, head, targets, jnp.float32(1.0))
    np.testing.assert_allclose([loss, entropy], 0)


def test_no_counted_token_is_no_loss_and_no_gradient() -> None:
    with jax.set_mesh(mw.mesh("dp=1", devices=jax.devices()[:1], axis_types="explicit")):
        targets = jnp.full((2, 3), IGNORED)

        def loss(h: jax.Array, w: jax.Array) -> Any:
            return cross_entropy(h, w, targets, jnp.float32(1.0), z_loss=1.0)

        gradient = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
        values, gradients = gradient(jnp.ones((2, 3, 4)), jnp.ones((4, 5)))
    for x in jax.tree.leaves((values, gradients)):
        np.testing.assert_array_equal(x, 0)


def lowered_gradients(embed: int, chunk: int) -> str:
    """The program of both gradients, of 48 tokens and a vocabulary of 40 on one device."""

    def loss(h: jax.Array, w: jax.Array) -> Any:
        targets = jnp.zeros((1, 48), jnp.int32)
        return cross_entropy(h, w, targets, jnp.float32(1.0), chunk=chunk)[0]

    with jax.set_mesh(mw.mesh("dp=1", devices=jax.devices()[:1], axis_types="explicit")):
        shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1, 48, embed), (embed, 40))]
        return jax.jit(jax.grad(loss, (0, 1))).lower(*shapes).as_text()


@pytest.mark.parametrize(("chunk", "loops"), [(48, 0), (47, 1), (16, 1)])
def test_one_chunk_is_no_loop_and_no_loop_starts_with_zeros_for_the_head(
    chunk: int, loops: int
) -> None:
    text = lowered_gradients(embed=8, chunk=chunk)
    assert text.count("stablehlo.while") == loops
    assert "tensor<8x40xf32>" in text  # the gradient as it is summed
    assert not re.search(r"(broadcast_in_dim|constant).*tensor<8x40xf32>$", text, re.MULTILINE)


@pytest.mark.parametrize(("chunk", "loops"), [(48, 0), (24, 1), (16, 1)])
@pytest.mark.usefixtures("as_on_tpus")
def test_on_tpus_every_chunk_is_in_the_loop(chunk: int, loops: int) -> None:
    text = lowered_gradients(embed=8, chunk=chunk)
    assert text.count("stablehlo.while") == loops
    # a chunk's logits are made in one place: a second would have memory of its own
    assert len(re.findall(rf"dot_general.*-> tensor<{chunk}x40xbf16>", text)) == 1


@pytest.mark.parametrize(("chunk", "loops"), [(48, 0), (16, 1)])
def test_of_few_tokens_the_head_has_its_gradient_by_one_matmul_and_never_in_float32(
    chunk: int, loops: int
) -> None:
    text = lowered_gradients(embed=32, chunk=chunk)
    assert text.count("stablehlo.while") == loops
    assert "tensor<32x40xf32>" not in text
    assert len(re.findall(r"dot_general.*-> tensor<32x40xbf16>", text)) == 1


def test_logits_never_exist_in_full() -> None:
    tokens, vocab = 4096, 4096
    with jax.set_mesh(mw.mesh("dp=1", devices=jax.devices()[:1], axis_types="explicit")):

        def loss(h: jax.Array, w: jax.Array, chunk: int) -> Any:
            targets = jnp.zeros((1, tokens), jnp.int32)
            return cross_entropy(h, w, targets, jnp.float32(1.0), chunk=chunk)

        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, tokens, 8), (8, vocab))]

        def memory(chunk: int) -> int:
            gradient = jax.jit(jax.grad(loss, (0, 1), has_aux=True), static_argnums=2)
            return gradient.lower(*shapes, chunk).compile().memory_analysis().temp_size_in_bytes

        assert memory(tokens) >= 4 * tokens * vocab
        assert memory(128) < 4 * tokens * vocab / 8
