"""Whatever value comes in at the public edge: a result or a MeshwrightError, nothing else."""

import itertools
import pickle

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw

RULES = mw.Rules([("embed", "tp")])
PATHS = mw.PathRules([("w", ("tp",))])
VALUES = [
    None, 0, 8, -1, 2.5, True, "", "x", "dp=8", "v5e:2x4", (), (8,), (None,), ("tp",), ["tp"], [[]],
    {"a": 1}, {}, b"x", object(), np.int64(8), np.ones(3), np.array(["a"]), jnp.ones((8, 8)), P("tp"),
    RULES, PATHS, mw.MeshSpec.parse("dp=8"), mw.Machine.parse("v5e:2x4"), mw.Layout((("tp",),)),
]  # fmt: skip
EDGES = {
    "Machine.parse": lambda a, b: mw.Machine.parse(a),
    "Machine": lambda a, b: mw.Machine(a, b),
    "Machine of a chip": lambda a, b: mw.Machine(mw.CHIPS["v5e"], a, b),
    "Machine.of_devices": lambda a, b: mw.Machine.of_devices(a),
    "MeshSpec": lambda a, b: mw.MeshSpec(a),
    "MeshSpec.parse": lambda a, b: mw.MeshSpec.parse(a, b),
    "from_mp_mesh_dim": lambda a, b: mw.MeshSpec.from_mp_mesh_dim(a),
    "mesh": lambda a, b: mw.mesh(a, machine=b),
    "mesh of devices": lambda a, b: mw.mesh("dp=8", devices=a, axis_types=b),
    "tile_mesh": lambda a, b: mw.tile_mesh(a, submesh=b),
    "tile_mesh by number": lambda a, b: mw.tile_mesh("v3:4x4", num_partitions=a),
    "to_jax": lambda a, b: mw.tile_mesh("v3:2x2", num_partitions=2).to_jax(a),
    "shard a tree of two": lambda a, b: mw.shard({"x": a, "y": b}, P("tp"), mesh="tp=-1"),
    "PathRules on odd leaves": lambda a, b: mw.shard({"w": a, "v": b}, mw.PathRules([(".*", ())])),
    "optimizer_layouts of anything": lambda a, b: mw.optimizer_layouts({"mu": a}, a, b),
    "Layout": lambda a, b: mw.Layout(a, b),
    "Layout.parse": lambda a, b: mw.Layout.parse(a),
    "ArraySpec": lambda a, b: mw.ArraySpec(a, b),
    "ArraySpec dtype": lambda a, b: mw.ArraySpec((8,), "a", a),
    "Layout.slices": lambda a, b: mw.Layout((("dp",), ())).slices(a, b),
    "layout_tree": lambda a, b: mw.layout_tree(a, b, mesh="tp=4"),
    "Rules": lambda a, b: mw.Rules(a, b),
    "Rules.parse": lambda a, b: mw.Rules.parse(a),
    "Rules.spec": lambda a, b: RULES.spec(a, shape=b),
    "Rules.spec on a mesh": lambda a, b: RULES.spec("embed", mesh=a),
    "standard_rules": lambda a, b: mw.standard_rules(1, 1, a),
    "PathRules": lambda a, b: mw.PathRules(a, b),
    "PathRules of a layout": lambda a, b: mw.PathRules([("w", a)]),
    "PathRules.parse": lambda a, b: mw.PathRules.parse(a),
    "PathRules.match": lambda a, b: PATHS.match(a),
    "sharding": lambda a, b: mw.sharding(a, mesh=b),
    "sharding by numbers": lambda a, b: mw.sharding("x -> x*", ndim=a, shape=b),
    "shard": lambda a, b: mw.shard(jnp.ones((8, 8)), a, mesh=b),
    "shard anything": lambda a, b: mw.shard(a, b),
    "shard a tree": lambda a, b: mw.shard({"a": jnp.ones(8), "b": jnp.ones(8)}, {"a": a, "b": b}),
    "explain": lambda a, b: mw.explain(a, b, "tp=4"),
    "explain loosely": lambda a, b: str(mw.explain(a, b, "tp=4", strict=False)),
    "optimizer_layouts": lambda a, b: mw.optimizer_layouts(
        {"w": jnp.ones(8)}, {"w": jnp.ones(8)}, a
    ),
}


@pytest.mark.parametrize("edge", EDGES)
def test_any_value_gives_a_result_or_a_meshwright_error(edge: str) -> None:
    for a, b in itertools.product(VALUES, VALUES):
        try:
            EDGES[edge](a, b)
        except mw.MeshwrightError as error:
            assert len(str(error)) > 10
        except Exception as error:
            raise AssertionError(
                f"{edge}({a!r}, {b!r}): {type(error).__name__}: {error}"
            ) from error


def test_what_is_said_can_be_sent_to_another_process() -> None:
    said = [
        RULES, PATHS, mw.standard_rules(2, 2), mw.MeshSpec.parse("1,-1,4,1"),
        mw.Machine.parse("v5p-256"), mw.Layout.parse("a b -> a@fsdp b"), mw.ArraySpec((8,), "a"),
    ]  # fmt: skip
    assert pickle.loads(pickle.dumps(said)) == said
    mesh = mw.mesh("fsdp=4,tp=4", machine="v5e:4x4")
    again = pickle.loads(pickle.dumps(mesh))
    assert [d.position for d in again.devices.flat] == [d.position for d in mesh.devices.flat]


def test_lists_and_tuples_describe_the_same_machine_and_layout() -> None:
    assert mw.Machine(mw.CHIPS["v5e"], [2, 4]) == mw.Machine.parse("v5e:2x4")  # type: ignore[arg-type]
    assert mw.Layout([["tp"], []]) == mw.Layout((("tp",), ()))  # type: ignore[arg-type]
    assert mw.Layout(("fsdp", None)).spec == P("fsdp")  # type: ignore[arg-type]
