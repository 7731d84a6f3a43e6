"""Optimizer state goes where its parameters go, in any optax chain."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright import MeshwrightError, PathRules

PARAMS = {
    "embed": jax.ShapeDtypeStruct((1024, 256), jnp.float32),
    "layers": [
        {
            "wq": jax.ShapeDtypeStruct((256, 256), jnp.float32),
            "w1": jax.ShapeDtypeStruct((256, 512), jnp.float32),
            "norm": jax.ShapeDtypeStruct((256,), jnp.float32),
        }
    ],
}
RULES = PathRules([("wq|w1", ("fsdp", "tp")), ("embed", ("tp", "fsdp")), ("norm", ())])
IS_MATRIX = jax.tree.map(lambda leaf: len(leaf.shape) > 1, PARAMS)
OPTIMIZERS: dict[str, Any] = {
    "adamw": optax.adamw(1e-3),
    "lion": optax.lion(1e-3),
    "adafactor": optax.adafactor(1e-3),
    "muon": optax.contrib.muon(1e-3),
    "sgd with momentum": optax.sgd(1e-3, momentum=0.9),
    "sm3": optax.sm3(1e-3),
    "lbfgs": optax.lbfgs(),
    "schedule-free": optax.contrib.schedule_free_adamw(1e-3),
    "chain": optax.chain(
        optax.clip_by_global_norm(1.0), optax.masked(optax.adamw(1e-3), IS_MATRIX), optax.ema(0.9)
    ),
    "accumulation": optax.MultiSteps(optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3), 4),
    "two kinds": optax.multi_transform(
        {"a": optax.adam(1e-3), "b": optax.adafactor(1e-3)},
        jax.tree.map(lambda matrix: "b" if matrix else "a", IS_MATRIX),
    ),
}


@pytest.fixture
def mesh(eight: list[jax.Device]) -> jax.sharding.Mesh:
    return mw.mesh("fsdp=2,tp=4", devices=eight)


def state_specs(optimizer: Any, mesh: jax.sharding.Mesh) -> dict[str, tuple[tuple[int, ...], P]]:
    state = jax.eval_shape(optimizer.init, PARAMS)
    layouts = mw.optimizer_layouts(state, PARAMS, mw.layout_tree(PARAMS, RULES, mesh=mesh))
    shapes = jax.tree_util.tree_flatten_with_path(state)[0]
    found = jax.tree.leaves(layouts, is_leaf=lambda x: isinstance(x, mw.Layout))
    return {
        jax.tree_util.keystr(path): (leaf.shape, layout.spec)
        for (path, leaf), layout in zip(shapes, found, strict=True)
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_of_a_parameters_shape_take_its_layout(name: str, mesh: jax.sharding.Mesh) -> None:
    by_parameter = {"embed": P("tp", "fsdp"), "wq": P("fsdp", "tp"), "w1": P("fsdp", "tp")}
    checked = 0
    for path, (shape, spec) in state_specs(OPTIMIZERS[name], mesh).items():
        for parameter, wanted in by_parameter.items():
            whole = PARAMS.get(parameter) or PARAMS["layers"][0][parameter]
            if f"'{parameter}'" in path and shape == whole.shape:
                assert spec == wanted, path
                checked += 1
    assert checked > 0 or name in ("adafactor", "two kinds")  # factored: see below


def test_factored_moments_keep_the_axes_of_the_dims_they_keep(mesh: jax.sharding.Mesh) -> None:
    specs = state_specs(OPTIMIZERS["adafactor"], mesh)
    found = {key.split(".")[1]: value for key, value in specs.items() if "v_" in key}
    assert found["v_row['embed']"] == ((256,), P("fsdp"))  # 1024 (tp) is averaged away
    assert found["v_col['embed']"] == ((1024,), P("tp"))
    assert found["v_row['layers'][0]['w1']"] == ((256,), P("fsdp"))
    assert found["v_col['layers'][0]['w1']"] == ((512,), P("tp"))
    # a square matrix: sizes cannot tell the dims apart, the names can
    assert found["v_row['layers'][0]['wq']"] == ((256,), P("fsdp"))
    assert found["v_col['layers'][0]['wq']"] == ((256,), P("tp"))


def test_factored_moments_lie_where_the_optimizer_computes_them(mesh: jax.sharding.Mesh) -> None:
    """The layout of v_row and v_col is checked against the values optax puts there."""
    optimizer = OPTIMIZERS["adafactor"]
    gradients = jax.tree.map(lambda leaf: jax.random.normal(jax.random.key(1), leaf.shape), PARAMS)
    state = optimizer.init(gradients)
    _, state = optimizer.update(gradients, state, gradients)
    squared = np.asarray(gradients["layers"][0]["wq"], np.float64) ** 2
    row = np.asarray(state[0].v_row["layers"][0]["wq"], np.float64)
    column = np.asarray(state[0].v_col["layers"][0]["wq"], np.float64)
    # v_row keeps the first dim (split over fsdp above), v_col the second (tp)
    assert np.corrcoef(row, squared.mean(axis=1))[0, 1] > 0.999
    assert np.corrcoef(column, squared.mean(axis=0))[0, 1] > 0.999


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_can_be_made_already_placed(name: str, mesh: jax.sharding.Mesh) -> None:
    optimizer = OPTIMIZERS[name]
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), PARAMS)
    state = jax.eval_shape(optimizer.init, params)
    layouts = mw.optimizer_layouts(state, PARAMS, mw.layout_tree(PARAMS, RULES, mesh=mesh))
    shardings = mw.shardings(state, layouts, mesh=mesh)
    made = jax.jit(optimizer.init, out_shardings=shardings)(params)
    for array, sharding in zip(jax.tree.leaves(made), jax.tree.leaves(shardings), strict=True):
        assert array.sharding.is_equivalent_to(sharding, array.ndim)


def test_a_state_of_one_array_follows_the_one_parameter(mesh: jax.sharding.Mesh) -> None:
    param = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    state = jax.eval_shape(optax.adam(1e-3).init, param)
    layouts = mw.optimizer_layouts(state, param, mw.Layout.parse("a b -> a@fsdp b@tp"))
    assert layouts[0].mu.spec == P("fsdp", "tp")
    assert layouts[0].count.spec == P()


def test_state_of_no_parameter_is_small_or_must_be_placed() -> None:
    params = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
    layouts = {"w": mw.Layout.parse("a b -> a@fsdp b@tp")}
    state = {"history": jax.ShapeDtypeStruct((4096, 2), jnp.float32), "mu": params,
             "coefficients": jax.ShapeDtypeStruct((3,), jnp.float32)}  # fmt: skip
    with pytest.raises(
        MeshwrightError, match=r"'history' of shape \(4096, 2\) follows no parameter"
    ):
        mw.optimizer_layouts(state, params, layouts)
    extra = PathRules([("history", ("fsdp",))])
    found = mw.optimizer_layouts(state, params, layouts, extra=extra)
    assert found["history"].spec == P("fsdp")
    assert found["coefficients"].spec == P()


def test_layouts_of_another_tree_are_refused() -> None:
    params = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
    with pytest.raises(MeshwrightError, match="there is no layout for 'w'"):
        mw.optimizer_layouts(params, params, {"v": mw.Layout(((), ()))})


def test_a_factored_moment_that_could_be_either_dim_must_be_placed() -> None:
    params = {"w": jax.ShapeDtypeStruct((2048, 2048), jnp.float32)}
    layouts = {"w": mw.Layout.parse("a b -> a@fsdp b@tp")}
    state = {"left": {"w": jax.ShapeDtypeStruct((2048,), jnp.float32)}}
    with pytest.raises(MeshwrightError, match="'left/w' of shape"):
        mw.optimizer_layouts(state, params, layouts)
    found = mw.optimizer_layouts(state, params, layouts, extra=PathRules([("left", ("fsdp",))]))
    assert found["left"]["w"].spec == P("fsdp")
    both_whole = mw.optimizer_layouts(state, params, {"w": mw.Layout(((), ()))})
    assert both_whole["left"]["w"].spec == P()


def test_extra_rules_that_place_nothing_are_refused() -> None:
    params = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
    with pytest.raises(MeshwrightError, match="extra=: path rule 'nothing' matches no array"):
        mw.optimizer_layouts(params, params, {"w": P("fsdp")}, extra=PathRules([("nothing", ())]))


def test_shardings_serve_as_layouts(mesh: jax.sharding.Mesh) -> None:
    state = jax.eval_shape(optax.adam(1e-3).init, PARAMS)
    by_sharding = mw.optimizer_layouts(state, PARAMS, mw.shardings(PARAMS, RULES, mesh=mesh))
    assert by_sharding[0].mu["embed"].spec == P("tp", "fsdp")


@pytest.mark.parametrize(
    "params",
    [
        (jnp.ones((8, 16)), jnp.ones((8, 16))),
        {"l": ({"w": jnp.ones((8, 16))}, {"w": jnp.ones((8, 16))})},
        {"w": jnp.ones((8, 16)), "b": None},
        {"w": jnp.ones((8, 16)), "s": ()},
        [jnp.ones((8, 16))],
    ],
)
def test_layouts_of_any_tree_of_parameters_are_followed(
    params: Any, mesh: jax.sharding.Mesh
) -> None:
    state = jax.eval_shape(optax.adam(1e-3).init, params)
    layouts = mw.layout_tree(params, PathRules([(".*", ("fsdp", "tp"))]), mesh=mesh)
    for given in (layouts, "a b -> a@fsdp b@tp", P("fsdp", "tp")):
        found = mw.optimizer_layouts(state, params, given)
        leaves = jax.tree.leaves(found[0].mu, is_leaf=lambda x: isinstance(x, mw.Layout))
        assert {leaf.spec for leaf in leaves} == {P("fsdp", "tp")}


def test_the_place_in_a_chain_is_not_taken_for_a_parameter() -> None:
    array = jax.ShapeDtypeStruct((4096,), jnp.float32)
    with pytest.raises(MeshwrightError, match="'0/sketch' of shape"):
        mw.optimizer_layouts(({"sketch": array},), [array], [P("fsdp")])


@pytest.mark.parametrize(
    ("params", "layouts", "extra", "words"),
    [
        ({"w": jnp.ones((8, 8))}, {"w": mw.Layout((("fsdp",),))}, None, "w has 2 dims"),
        ({"w": "text"}, {"w": P()}, None, "'w' is a str"),
        ({"w": jnp.ones(8)}, {"w": 3}, None, "3 at 'w' is not a layout"),
        ({"w": jnp.ones(8)}, {"w": P()}, [("a", ())], "is not mw.PathRules"),
    ],
)
def test_mistakes_are_readable(params: Any, layouts: Any, extra: Any, words: str) -> None:
    with pytest.raises(MeshwrightError, match=words):
        mw.optimizer_layouts({"mu": params}, params, layouts, extra=extra)
