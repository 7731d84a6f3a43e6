"""A T5's loss and gradients are the same on every mesh, with packed and padded examples."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.ops.attention.programs import QUICKLY

import meshwright as mw
from meshwright.models import Compute, LossConfig, padded_vocab
from meshwright.models.t5 import T5Config, abstract_arrays, loss, t5_rules, t5x_rules

# a vocabulary that tp=4 does not divide
CONFIG = T5Config(
    50, 2, 2, 16, 4, 4, 24, activation="gelu", gated=True,
    tied_embeddings=False, scaled_output=False, buckets=8, max_distance=20,
)  # fmt: skip
TIED = dataclasses.replace(
    CONFIG, activation="relu", gated=False, tied_embeddings=True, scaled_output=True
)


def batch() -> dict[str, jax.Array]:
    """Two examples packed into each of 8 sequences, the second of them padded."""
    rng = np.random.default_rng(0)
    segments = {}
    for name, length in (("encoder_segments", 16), ("segments", 8)):
        cut = rng.integers(2, length - 3, (8, 1))
        end = rng.integers(length - 2, length + 1, (8, 1))
        at = np.arange(length)[None]
        segments[name] = np.where(at < cut, 1, np.where(at < end, 2, 0))
    tokens = rng.integers(0, 50, (8, 9))
    targets = np.where(segments["segments"] > 0, tokens[:, 1:], -1)
    arrays = {
        "encoder_tokens": rng.integers(0, 50, (8, 16)), "tokens": tokens[:, :-1],
        "targets": targets, **segments,
    }  # fmt: skip
    return {name: jnp.asarray(x, jnp.int32) for name, x in arrays.items()}


def some_values(arrays: Any) -> Any:
    """Like initial values, padding zero; made here, which is faster than compiled."""
    rng = np.random.default_rng(1)

    def values(spec: Any) -> np.ndarray:
        shape = spec.unpadded_shape
        std = 0.3 if spec.inputs else 0.5
        drawn = rng.normal(size=shape, scale=std) + (spec.dims[-1] == "norm")
        return np.pad(drawn, [(0, n - m) for n, m in zip(spec.shape, shape, strict=True)]).astype(
            "f"
        )

    return jax.tree.map(values, arrays)


def loss_and_gradients(config: T5Config, mesh_text: str, rules: Any, **options: Any) -> Any:
    size = math.prod(mw.MeshSpec.parse(mesh_text).sizes)
    mesh = mw.mesh(mesh_text, devices=jax.devices()[:size], axis_types="explicit")
    with jax.set_mesh(mesh):
        vocab = padded_vocab(config, rules, mesh.shape)
        arrays = abstract_arrays(config, vocab=vocab)
        shardings = mw.shardings(arrays, rules, mesh=mesh)
        params = jax.tree.map(jax.device_put, some_values(arrays), shardings)
        compute = Compute(rules, **options)

        def total(params: Any) -> Any:
            scale = jnp.float32(1 / 50)
            sums = loss(params, batch(), scale, config, compute, LossConfig(z_loss=1e-3, chunk=16))
            return sums.total(scale), sums.metrics["loss"].sum

        step = jax.jit(jax.value_and_grad(total, has_aux=True), compiler_options=QUICKLY)
        (value, entropy), gradients = step(params)
        kept = jax.tree.map(
            lambda g, p: g.sharding.is_equivalent_to(p.sharding, g.ndim), gradients, params
        )
        assert jax.tree.all(kept)

        def unpadded(x: jax.Array, spec: Any) -> np.ndarray:
            return np.asarray(x)[tuple(slice(size) for size in spec.unpadded_shape)]

        return float(value), float(entropy), jax.tree.map(unpadded, gradients, arrays)


@functools.cache
def on_one_device(config: T5Config) -> Any:
    return loss_and_gradients(config, "dp=1,fsdp=1,tp=1,sp=1", t5_rules())


def check(config: T5Config, mesh: str, rules: Any, **options: Any) -> None:
    value, entropy, gradients = loss_and_gradients(config, mesh, rules, **options)
    right_value, right_entropy, right = on_one_device(config)
    assert abs(value - right_value) < 1e-5
    assert abs(entropy - right_entropy) < 1e-3  # summed over some 50 tokens
    scale = max(np.abs(x).max() for x in jax.tree.leaves(right))
    jax.tree.map(
        lambda g, r: np.testing.assert_allclose(g, r, rtol=0, atol=1e-5 * scale), gradients, right
    )


CASES: dict[str, tuple[T5Config, str, Any, dict[str, Any]]] = {
    "dp": (CONFIG, "dp=4,fsdp=1,tp=1,sp=1", t5_rules(), {}),
    "fsdp": (TIED, "dp=1,fsdp=8,tp=1,sp=1", t5_rules(), {"remat": "full"}),
    "tp": (CONFIG, "dp=1,fsdp=1,tp=4,sp=1", t5_rules(), {"remat": "elementwise"}),
    "fsdp and tp": (CONFIG, "dp=2,fsdp=2,tp=2,sp=1", t5_rules(), {"scan": False, "remat": "mlp"}),
    "tied": (TIED, "dp=1,fsdp=2,tp=4,sp=1", t5_rules(), {"remat": "offload"}),
    "sequence parallel": (
        CONFIG, "dp=1,fsdp=2,tp=4,sp=1", t5_rules(sequence_parallel=True), {"mlp_chunk": 3}
    ),
    "sp": (CONFIG, "dp=1,fsdp=2,tp=2,sp=2", t5_rules(sp=True), {}),
    "sp and sequence parallel": (
        TIED, "dp=1,fsdp=1,tp=2,sp=2", t5_rules(sp=True, sequence_parallel=True), {}
    ),
    **{
        f"T5X {a}, {p}": (CONFIG, "dp=2,fsdp=2,tp=2,sp=1", t5x_rules(a, p), {"remat": remat})
        for a, p, remat in ((1, 1, "none"), (1, 2, "none"), (2, 1, "none"), (2, 2, "mlp"))
    },
}  # fmt: skip


SLOW = (
    "dp", "fsdp", "tp", "fsdp and tp", "tied", "sp", "sp and sequence parallel", "T5X 1, 1", "T5X 1, 2",
    "T5X 2, 1", "sequence parallel",
)  # fmt: skip


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES]
)
def test_loss_and_gradients_are_those_of_one_device(case: str) -> None:
    config, mesh, rules, options = CASES[case]
    check(config, mesh, rules, **options)


def test_the_backward_pass_computes_the_keys_of_encoded_tokens_again() -> None:
    """They come of weights and of what is no argument of a layer, which must be held apart too."""
    mesh = mw.mesh("dp=1,fsdp=1,tp=1,sp=1", devices=jax.devices()[:1], axis_types="explicit")
    with jax.set_mesh(mesh):
        compute = Compute(t5_rules(), remat="full", scan=False)

        def total(params: Any) -> jax.Array:
            scale = jnp.float32(1 / 50)
            return loss(params, batch(), scale, CONFIG, compute, LossConfig()).total(scale)

        params = some_values(abstract_arrays(CONFIG))
        text = jax.jit(jax.grad(total)).lower(params).as_text()
    encoded, weight = "tensor<8x16x16xf32>", "tensor<16x4x4xf32>"
    barriers = [line for line in text.splitlines() if "optimization_barrier" in line]
    held = [line for line in barriers if encoded in line and weight in line]
    assert len(held) >= CONFIG.decoder_layers
