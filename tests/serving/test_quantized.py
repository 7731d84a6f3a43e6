"""Weights of 8 bits: what they compute, and how far that is from the model's own weights."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.serving.models import BASE
from tests.serving.test_engine import GREEDY, PROMPTS, on_demand

from meshwright.errors import MeshwrightError
from meshwright.models.decoder import DecoderConfig
from meshwright.models.decoder.serving import serving_weights
from meshwright.ops import einsum, quantize, scaled
from meshwright.serving import EngineConfig, Model, Request
from meshwright.serving.source import generation_mesh

RandomModel = Callable[..., Model]
EXPERTS = dataclasses.replace(BASE, experts=4, experts_per_token=2)
MATRICES = {"wq": 1, "wk": 1, "wv": 1, "wo": 2, "gate": 1, "up": 1, "down": 1}


@pytest.mark.parametrize(("name", "most"), [("int8", 0.5 / 127), ("fp8", 1 / 16)])
def test_a_channel_is_rounded_relative_to_its_largest_number(name: str, most: float) -> None:
    weight = np.random.default_rng(0).normal(size=(64, 3, 5)).astype(np.float32)
    weight[:, 1, 2] = 0
    found = quantize(jnp.asarray(weight), 1, name)
    assert found.scale.shape == (3, 5)
    values = np.moveaxis(np.asarray(found.values).astype(np.float32), -1, 0)
    error = np.abs(values * np.asarray(found.scale) - weight)
    assert (error.max(0) <= most * 1.001 * np.abs(weight).max(0)).all()
    assert error[:, 1, 2].max() == 0


@pytest.mark.parametrize(
    ("dims", "of_x", "of_weight", "inputs"),
    [
        ("ble,ekgd->blkgd", (1, 17, 64), (64, 2, 3, 8), 1),
        ("blhd,hde->ble", (1, 17, 4, 16), (4, 16, 32), 2),
    ],
)
def test_activations_of_fp8_meet_weights_of_fp8(
    dims: str, of_x: tuple[int, ...], of_weight: tuple[int, ...], inputs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    rng = np.random.default_rng(1)
    x, weight = (rng.normal(size=shape).astype(np.float32) for shape in (of_x, of_weight))
    x[0, 3] *= 1000  # a token of its own size
    x[0, 4] = 0
    monkeypatch.setattr("meshwright.ops.quantized.current_device", lambda: ("gpu", "NVIDIA H200"))
    found = quantize(jnp.asarray(weight), inputs, "fp8")
    with jax.set_mesh(generation_mesh()):
        product = scaled(einsum(dims, jnp.asarray(x), found), found)
        few = scaled(einsum(dims, jnp.asarray(x[:, :9]), found), found)
    values = np.moveaxis(
        np.asarray(found.values.astype(jnp.float32)), range(-inputs, 0), range(inputs)
    )
    weight_of_8_bits = values * np.asarray(found.scale)
    np.testing.assert_allclose(
        few, np.einsum(dims, x[:, :9], weight_of_8_bits), rtol=1e-4, atol=1e-3
    )
    exact = np.einsum(dims, x, weight)
    # each factor is rounded by up to 1/16; the errors of a sum have random signs
    size = np.sqrt(np.einsum(dims, x**2, weight**2))
    assert (np.abs(product - exact) <= 4 / 16 * size + 1e-6).all()
    assert np.abs(product - exact).max() > 1e-3
    assert product.dtype == jnp.float32


def rounded(params: Any, name: str) -> Any:
    """The same parameters with matrices as their 8 bits say."""

    def matrix(weight: jax.Array, inputs: int) -> jax.Array:
        if weight.ndim == 3 and inputs == 1 and weight.shape[0] == EXPERTS.experts:
            return jnp.stack([matrix(of_expert, 1) for of_expert in weight])
        found = quantize(weight, inputs, name)
        outputs = weight.ndim - inputs
        order = (*range(outputs, weight.ndim), *range(outputs))
        return (
            jnp.transpose(found.values.astype(jnp.float32), order) * found.scale[(None,) * inputs]
        )

    layers = {
        block: {
            key: jnp.stack([matrix(each, MATRICES[key]) for each in w]) if key in MATRICES else w
            for key, w in arrays.items()
        }
        for block, arrays in params["layers"].items()
    }
    return {**params, "layers": layers, "output": matrix(params["output"], 1)}


@pytest.mark.parametrize(
    ("name", "mesh", "most", "config"),
    [
        pytest.param("int8", "tp=1", 0.1, BASE, marks=pytest.mark.slow),
        ("fp8", "tp=1", 0.8, BASE),
        ("int8", "fsdp=2,tp=2", 0.1, BASE),
        ("int8", "tp=2,ep=2", 0.3, EXPERTS),
        pytest.param("fp8", "tp=1", 0.8, EXPERTS, marks=pytest.mark.slow),
    ],
)
def test_an_engine_computes_with_the_rounded_weights(
    name: str, mesh: str, most: float, config: DecoderConfig, random_model: RandomModel
) -> None:
    model = random_model(config, generation_mesh(mesh))
    alone = random_model(config, generation_mesh())
    with jax.set_mesh(alone.mesh):
        reference = dataclasses.replace(alone, params=rounded(alone.params, name))
    request = Request(PROMPTS[0], GREEDY, 4, logprobs=20, prompt_logprobs=1)

    def scores(model: Model, weights: str | None) -> np.ndarray:
        with on_demand(model, weights=weights, batch_buckets=None) as engine:
            [done] = engine.generate([request])
        return np.array([each.logprob for each in done.prompt_logprobs if each])

    quantized = scores(model, name)
    np.testing.assert_allclose(quantized, scores(reference, None), rtol=0, atol=1e-4)
    difference = np.abs(quantized - scores(alone, None)).max()
    assert 1e-4 < difference < most


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(MeshwrightError, match="weights='int4' must be int8 or fp8"):
        EngineConfig(weights="int4")


def test_release_leaves_no_array_that_was_quantized(random_model: RandomModel) -> None:
    model = random_model(BASE, generation_mesh())
    with jax.set_mesh(model.mesh):
        found = serving_weights(model.params, model.config, "int8", release=True)
    kept = [x for x in jax.tree.leaves(model.params) if not x.is_deleted()]
    in_use = {id(x) for x in jax.tree.leaves(found)}
    assert all(id(x) in in_use for x in kept)
    assert model.params["output"].is_deleted()
    assert not any(x.is_deleted() for x in jax.tree.leaves(found))
