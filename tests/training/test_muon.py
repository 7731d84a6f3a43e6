"""Muon against optax's own, on layers whole and split."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshwright as mw
from meshwright.layouts import ArraySpec
from meshwright.models.decoder import decoder_rules
from meshwright.training.optimizer import OptimizerConfig, make_optimizer

CONFIG = OptimizerConfig("muon", learning_rate=0.01, warmup_steps=0, schedule="constant")


def arrays_of(layers: int) -> Any:
    return {
        "embedding": ArraySpec((32, 64), "vocab embed", inputs=1),
        "norm": ArraySpec((layers, 64), "layers norm"),
        "wk": ArraySpec((layers, 64, 8, 4), "layers embed kv_heads head_dim", inputs=1),
        "wo": ArraySpec((layers, 8, 16, 64), "layers heads head_dim embed", inputs=2),
        "up": ArraySpec((layers, 64, 96), "layers embed mlp", inputs=1),
    }


def values(arrays: Any, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda spec: rng.normal(size=spec.shape).astype("f"), arrays)


def optaxs() -> optax.GradientTransformation:
    dims = optax.contrib.MuonDimensionNumbers
    numbers = {
        "embedding": None, "norm": None,
        "wk": dims(1, (2, 3)), "wo": dims((1, 2), 3), "up": dims(1, 2),
    }  # fmt: skip
    return optax.contrib.muon(
        optax.constant_schedule(0.01), weight_decay=0.1, adam_b1=0.9, adam_b2=0.95,
        muon_weight_dimension_numbers=numbers, consistent_rms=0.2,
    )  # fmt: skip


def steps(tx: optax.GradientTransformation, params: Any, arrays: Any, **extra: Any) -> Any:
    """Parameters and state after two steps."""

    def update(gradient: Any, state: Any, params: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, state = tx.update(gradient, state, params, **extra)
            return optax.apply_updates(params, updates), state

    jitted, state = jax.jit(update), jax.jit(tx.init)(params)
    where = jax.tree.map(lambda x: x.sharding, params)
    for seed in (1, 2):
        params, state = jitted(jax.device_put(values(arrays, seed), where), state, params)
    return params, state


def assert_same(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)

    def close(path: Any, a: jax.Array, b: jax.Array) -> None:
        assert a.dtype == b.dtype, path
        distance = np.linalg.norm(np.asarray(a, "f8") - np.asarray(b, "f8"))
        assert distance <= 1e-6 * np.linalg.norm(np.asarray(b, "f8")), path

    jax.tree_util.tree_map_with_path(close, found, wanted)


@functools.cache
def wanted(layers: int) -> Any:
    arrays = arrays_of(layers)
    return steps(optaxs(), jax.tree.map(jnp.asarray, values(arrays, 0)), arrays)


def test_parameters_and_state_are_those_of_optax() -> None:
    arrays = arrays_of(6)
    ours, _ = make_optimizer(CONFIG, 10, arrays)
    found = steps(ours, jax.tree.map(jnp.asarray, values(arrays, 0)), arrays)
    assert_same(found, wanted(6))


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("dp=2,fsdp=2,tp=2,sp=1", 6),  # does not divide
        pytest.param("dp=1,fsdp=8,tp=1,sp=1", 8, marks=pytest.mark.slow),
        pytest.param("dp=1,fsdp=4,tp=2,sp=1", 3, marks=pytest.mark.slow),  # fewer than devices
        pytest.param("dp=1,fsdp=2,tp=2,sp=2", 8, marks=pytest.mark.slow),
        pytest.param("dp=1,fsdp=1,tp=8,sp=1", 9, marks=pytest.mark.slow),
    ],
)
def test_on_a_mesh_they_are_too(text: str, layers: int) -> None:
    arrays = arrays_of(layers)
    mesh = mw.mesh(text, devices=jax.devices()[:8])
    shardings = mw.shardings(arrays, decoder_rules(sp=True), mesh=mesh)
    ours, _ = make_optimizer(CONFIG, 10, arrays)
    with jax.set_mesh(mesh):
        params = jax.device_put(values(arrays, 0), shardings)
        assert_same(steps(ours, params, arrays, shardings=shardings), wanted(layers))
