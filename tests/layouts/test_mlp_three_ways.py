"""einshard's tutorial, a two-layer MLP, by each notation: the same placement, the right numbers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw

DIMS = {"w1": "embed mlp", "w2": "mlp embed"}
NOTATIONS = {
    "numbers": {"w1": "x y -> x y*", "w2": "y z -> y* z"},
    "named": {"w1": "x y -> x y@tp", "w2": "y z -> y@tp z"},
    "path rules": mw.PathRules([("w1", (None, "tp")), ("w2", ("tp",))]),
    "logical rules": mw.Rules([("mlp", "tp"), ("embed", None)]),
}


def mlp(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    return jax.nn.relu(x @ w["w1"]) @ w["w2"]


@pytest.fixture
def arrays() -> tuple[np.ndarray, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    make = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return make(16, 32), {"w1": make(32, 64), "w2": make(64, 32)}


def place(weights: dict[str, np.ndarray], notation: str, devices: list[jax.Device]) -> dict:
    if notation == "numbers":
        return mw.shard(weights, NOTATIONS[notation], devices=devices)
    mesh = mw.mesh("tp=8", devices=devices)
    dims = DIMS if notation == "logical rules" else None
    return mw.shard(weights, NOTATIONS[notation], mesh=mesh, dims=dims)


def collectives(compiled: jax.stages.Compiled) -> list[str]:
    pattern = r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\("
    return re.findall(pattern, compiled.as_text() or "")


@pytest.mark.parametrize("notation", NOTATIONS)
def test_columns_then_rows_cost_one_all_reduce_and_give_the_right_numbers(
    notation: str, arrays: tuple[np.ndarray, dict[str, np.ndarray]], eight: list[jax.Device]
) -> None:
    x, weights = arrays
    placed = place(weights, notation, eight)
    assert placed["w1"].sharding.shard_shape((32, 64)) == (32, 8)
    assert placed["w2"].sharding.shard_shape((64, 32)) == (8, 32)
    x_everywhere = mw.shard(x, "... -> * ...", devices=eight)
    compiled = jax.jit(mlp).lower(x_everywhere, placed).compile()
    assert collectives(compiled) == ["all-reduce"]
    expected = np.maximum(x @ weights["w1"], 0) @ weights["w2"]
    np.testing.assert_allclose(compiled(x_everywhere, placed), expected, rtol=2e-5, atol=2e-4)


def test_all_notations_give_one_placement(
    arrays: tuple[np.ndarray, dict[str, np.ndarray]], eight: list[jax.Device]
) -> None:
    _, weights = arrays
    placed = [place(weights, notation, eight) for notation in NOTATIONS]
    for name in weights:
        maps = [p[name].sharding.devices_indices_map(p[name].shape) for p in placed]
        assert all(each == maps[0] for each in maps)


def test_a_free_axis_split_is_data_parallel_and_sends_nothing(
    arrays: tuple[np.ndarray, dict[str, np.ndarray]], eight: list[jax.Device]
) -> None:
    x, weights = arrays
    by_row = mw.shard(x, "batch x -> batch* x", devices=eight)
    everywhere = mw.shard(weights, "... -> * ...", devices=eight)
    compiled = jax.jit(mlp).lower(by_row, everywhere).compile()
    assert collectives(compiled) == []
    assert jnp.asarray(compiled(by_row, everywhere)).shape == (16, 32)
