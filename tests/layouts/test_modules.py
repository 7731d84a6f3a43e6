"""Names that Flax keeps beside arrays are read, and modules of Equinox are placed as they are."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import meshwright as mw

PAIRS = [("embed", "fsdp"), ("mlp", "tp")]
RULES = mw.Rules(PAIRS)
MESH = "fsdp=4,tp=4"
BY_PATH = mw.PathRules([("weight", ("tp", None)), ("bias", ("tp",))])


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        bias = nn.with_logical_partitioning(nn.initializers.zeros, ("mlp",))
        return nn.Dense(16, kernel_init=kernel, bias_init=bias)(x)


def test_names_in_boxes_of_linen_place_as_flax_itself_does() -> None:
    def init() -> dict[str, object]:
        return Dense().init(jax.random.key(0), jnp.ones((2, 8)))

    specs = nn.logical_to_mesh(nn.get_partition_spec(jax.eval_shape(init)), PAIRS)
    placed = nn.meta.unbox(mw.shard(init(), RULES, mesh=MESH))
    abstract = nn.meta.unbox(mw.shard(jax.eval_shape(init), RULES, mesh=MESH))
    for name in ("kernel", "bias"):
        wanted = specs["params"]["Dense_0"][name]
        assert placed["params"]["Dense_0"][name].sharding.spec == wanted
        assert abstract["params"]["Dense_0"][name].sharding.spec == wanted
    assert "embed@fsdp mlp@tp" in str(mw.explain(init(), RULES, MESH))


@pytest.mark.parametrize("kind", ["module", "state"])
def test_names_in_variables_of_nnx_are_read(kind: str) -> None:
    kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
    bias = nnx.with_partitioning(nnx.initializers.zeros_init(), ("mlp",))
    with nnx.use_eager_sharding(False):
        module = nnx.Linear(8, 16, kernel_init=kernel, bias_init=bias, rngs=nnx.Rngs(0))
        tree = module if kind == "module" else nnx.state(module)
        placed = mw.shard(tree, RULES, mesh=MESH)
        assert placed is not tree
        assert type(placed) is type(tree)
        kernels = [array for array in jax.tree.leaves(placed) if array.ndim == 2]
        assert [array.sharding.spec for array in kernels] == [P("fsdp", "tp")]


def test_a_module_of_equinox_keeps_what_is_no_array() -> None:
    key = jax.random.key(0)
    module = eqx.nn.Sequential([
        eqx.nn.Linear(8, 16, key=key), eqx.nn.Lambda(jax.nn.relu), eqx.nn.Dropout(0.5, inference=True),
    ])  # fmt: skip
    placed = mw.shard(module, BY_PATH, mesh="tp=16")
    assert placed is not module
    assert placed.layers[0].weight.sharding.spec == P("tp")
    assert len(module.layers[0].weight.sharding.device_set) == 1  # it is not changed
    assert placed.layers[2].p == 0.5
    assert isinstance(placed.layers[2].p, float)
    np.testing.assert_allclose(placed(jnp.ones(8)), module(jnp.ones(8)), rtol=1e-6)


def test_modules_of_equinox_are_explained_and_may_stand_in_trees() -> None:
    tree = {"a": eqx.nn.MLP(16, 16, 16, 1, key=jax.random.key(0)), "b": [np.zeros((16, 16))]}
    rules = mw.PathRules([("weight", ("tp", None)), ("bias", ("tp",)), ("b", (None, "tp"))])
    assert "5 arrays" in str(mw.explain(tree, rules, "tp=16"))
    placed = mw.shard(tree, rules, mesh="tp=16")
    assert placed["b"][0].sharding.spec == P(None, "tp")
    assert placed["a"].activation is tree["a"].activation
    wanted = mw.shardings(tree, rules, mesh="tp=16")
    assert wanted["a"].layers[0].weight == placed["a"].layers[0].weight.sharding
