"""shard where jax makes it hard: tuples of arrays, inside transformations, explicit and manual axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright import ArraySpec, MeshwrightError

LAYOUT = "x y -> x@fsdp y@tp"


@pytest.fixture
def mesh(eight: list[jax.Device]) -> Mesh:
    return mw.mesh("fsdp=2,tp=4", devices=eight)


def specs(tree: object) -> object:
    return jax.tree.map(lambda array: array.sharding.spec, tree)


def test_a_tuple_is_one_layout_or_one_for_each_as_the_arrays_say(mesh: Mesh) -> None:
    x = np.ones((8, 8), np.float32)
    assert specs(mw.shard((x, x), (("fsdp",), ("tp",)), mesh=mesh)) == (P("fsdp"), P("tp"))
    assert specs(mw.shard((x, x), (("fsdp",), None), mesh=mesh)) == (P("fsdp"), P())
    assert specs(mw.shard((x, x), (P("fsdp"), "a b -> a b@tp"), mesh=mesh)) == (
        P("fsdp"),
        P(None, "tp"),
    )
    assert specs(mw.shard((x, x), P("fsdp", "tp"), mesh=mesh)) == (P("fsdp", "tp"),) * 2
    assert specs(mw.shard([x, x], ("fsdp", "tp"), mesh=mesh)) == [P("fsdp", "tp")] * 2
    assert specs(mw.shard(x, ("fsdp", "tp"), mesh=mesh)) == P("fsdp", "tp")
    with pytest.raises(MeshwrightError, match=r"'fsdp' at '0' is not a layout.*use P\(…\) for all"):
        mw.shard((x, x), ("fsdp", "tp"), mesh=mesh)


def test_inside_jit_concrete_arrays_are_constrained_too(mesh: Mesh) -> None:
    x = jnp.ones((8, 8))
    assert jax.jit(lambda: mw.shard(x, LAYOUT, mesh=mesh))().sharding.spec == P("fsdp", "tp")
    with jax.set_mesh(mesh):
        tree = jax.jit(lambda a: mw.shard({"a": a, "b": x}, LAYOUT))(x)
    assert specs(tree) == {"a": P("fsdp", "tp"), "b": P("fsdp", "tp")}


def test_gradients_scans_and_vmaps_pass_through(mesh: Mesh) -> None:
    x = mw.shard(jnp.arange(64.0).reshape(8, 8), LAYOUT, mesh=mesh)

    def loss(x: jax.Array) -> jax.Array:
        return mw.shard(x * x, LAYOUT, mesh=mesh).sum()

    np.testing.assert_allclose(jax.jit(jax.grad(loss))(x), 2 * np.asarray(x))
    stepped, _ = jax.lax.scan(
        lambda c, _: (mw.shard(c + 1, LAYOUT, mesh=mesh), None), x, None, length=3
    )
    np.testing.assert_allclose(stepped, np.asarray(x) + 3)
    batched = jax.vmap(lambda a: mw.shard(a, LAYOUT, mesh=mesh))(jnp.ones((3, 8, 8)))
    assert batched.shape == (3, 8, 8)


def test_text_means_the_current_mesh(eight: list[jax.Device]) -> None:
    explicit = mw.mesh("fsdp=2,tp=4", devices=eight, axis_types="explicit")
    with jax.set_mesh(explicit):
        y = jax.jit(lambda: mw.shard(jnp.ones((8, 8)), LAYOUT, mesh="fsdp=2,tp=4"))()
    assert y.sharding.mesh == explicit


def test_an_explicit_mesh_must_be_current(eight: list[jax.Device]) -> None:
    explicit = mw.mesh("fsdp=2,tp=4", devices=eight, axis_types="explicit")
    with pytest.raises(MeshwrightError, match=r"with jax\.set_mesh"):
        jax.jit(lambda: mw.shard(jnp.ones((8, 8)), LAYOUT, mesh=explicit))()


def test_inside_shard_map_it_is_refused(mesh: Mesh) -> None:
    def body(a: jax.Array) -> jax.Array:
        return mw.shard(a, LAYOUT, mesh=mesh)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"))
    with pytest.raises(MeshwrightError, match="inside shard_map fsdp, tp are manual"):
        jax.jit(mapped)(jnp.ones((8, 8)))


def test_dims_are_for_logical_rules_and_must_agree() -> None:
    spec = ArraySpec((8, 8), "embed mlp")
    rules = mw.Rules([("embed", "tp"), ("mlp", None)])
    with pytest.raises(MeshwrightError, match="dims= names the dims of arrays for logical rules"):
        mw.explain(spec, "a b -> a@tp b", "tp=4", dims="x y")
    with pytest.raises(MeshwrightError, match="dims= says"):
        mw.explain(spec, rules, "tp=4", dims="mlp embed")
    with pytest.raises(MeshwrightError, match="in another order"):
        mw.explain(spec, "mlp embed -> mlp@tp embed", "tp=4")
    assert mw.explain(spec, "x y -> x@tp y", "tp=4").rows[0].layout.spec == P("tp")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda d: mw.shard(np.ones((8, 8)), P("tp"), devices=d), ["'tp' but no mesh is given"]),
        (lambda d: mw.shard(np.ones((8, 8)), mw.Layout((("tp",), ())), devices=d), ["'tp' but no mesh"]),
        (lambda d: mw.shard(np.ones((8, 8)), P("tp"), mesh=mw.mesh("dp:4,mp:2", devices=d)), ["name one of its axes, or add tp=1"]),
        (lambda d: mw.shard(np.ones((8, 8)), ["tp", None], mesh=mw.mesh("tp=8", devices=d)), ["is a list; write a tuple"]),
        (lambda d: mw.shard(np.array(["a"] * 8), "a -> a*", devices=d), ["is not an array"]),
        (lambda d: mw.shard(np.ones(8), P(unreduced={"tp"}), mesh=mw.mesh("tp=8", devices=d)), ["partial sums"]),
        (lambda d: mw.mesh("dp=8", devices=[d[0]] * 8), ["twice"]),
        (lambda d: mw.mesh("dp=8", devices=8), ["devices=8 is not a list"]),
        (lambda d: mw.sharding("x -> x*", shape=8, devices=d), ["shape 8 is not a tuple"]),
        (lambda d: mw.sharding("x -> x*", shape=(8.0,), devices=d), ["whole numbers"]),
    ],
)  # fmt: skip
def test_mistakes_are_readable(call: object, words: list[str], eight: list[jax.Device]) -> None:
    with pytest.raises(MeshwrightError) as caught:
        call(eight)  # type: ignore[operator]
    for word in words:
        assert word in str(caught.value)


def test_in_a_partly_manual_shard_map_the_other_axes_can_be_constrained(mesh: Mesh) -> None:
    mapped = jax.shard_map(
        lambda x: mw.shard(x * 2, "x y -> x y@tp"),
        mesh=mesh,
        in_specs=P("fsdp"),
        out_specs=P("fsdp"),
        axis_names={"fsdp"},
    )
    assert jax.jit(mapped)(jnp.ones((8, 16))).sharding.spec == P("fsdp", "tp")


def test_a_constraint_on_a_mesh_without_devices_is_refused() -> None:
    abstract = mw.mesh("fsdp=2,tp=4", machine="v5e:2x4")
    for absent in (abstract, abstract.abstract_mesh):
        with pytest.raises(MeshwrightError, match="would do nothing"):
            jax.jit(lambda x, absent=absent: mw.shard(x, LAYOUT, mesh=absent))(jnp.ones((8, 16)))


def test_under_explicit_axes_a_mesh_alike_is_the_current_one_and_another_is_refused(
    mesh: Mesh, eight: list[jax.Device]
) -> None:
    explicit = mw.mesh("fsdp=2,tp=4", devices=eight, axis_types="explicit")
    other = mw.mesh("dp=2,tp=4", devices=eight)
    with jax.set_mesh(explicit):
        y = jax.jit(lambda x: mw.shard(x, LAYOUT, mesh=mesh))(jnp.ones((8, 16)))
        assert y.sharding.spec == P("fsdp", "tp")
        with pytest.raises(MeshwrightError, match=r"which is \(fsdp=2,tp=4\), not \(dp=2,tp=4\)"):
            jax.jit(lambda x: mw.shard(x, "x y -> x y@tp", mesh=other))(jnp.ones((8, 16)))


def test_axes_of_two_kinds_are_told_apart(eight: list[jax.Device]) -> None:
    kinds = (AxisType.Explicit, AxisType.Auto)
    mixed = jax.make_mesh((2, 4), ("fsdp", "tp"), devices=eight, axis_types=kinds)
    with jax.set_mesh(mixed), pytest.raises(MeshwrightError, match="one kind at a time"):
        jax.jit(lambda x: mw.shard(x * 2, LAYOUT))(np.ones((8, 16), np.float32))


def test_a_current_abstract_mesh_is_used() -> None:
    wanted = AbstractMesh((2, 4), ("fsdp", "tp"))
    struct = jax.ShapeDtypeStruct((8, 16), jnp.float32, weak_type=True)
    with jax.sharding.use_abstract_mesh(wanted):
        placed = mw.shard(struct, LAYOUT)
    assert placed.sharding.mesh == wanted
    assert placed.weak_type


def test_shardings_place_a_tree_as_layouts_do(mesh: Mesh) -> None:
    tree = {"w": np.ones((8, 16), np.float32), "b": np.ones(16, np.float32)}
    rules = mw.PathRules([("w", ("fsdp", "tp")), ("b", ())])
    wanted = mw.shardings(tree, rules, mesh=mesh)
    assert specs(mw.shard(tree, wanted, mesh=mesh)) == {"w": P("fsdp", "tp"), "b": P()}


def test_path_rules_keep_arrays_whole_without_a_mesh(eight: list[jax.Device]) -> None:
    tree = {"w": np.ones((8, 16), np.float32), "b": np.ones(16, np.float32)}
    for whole in ((), None, P(), "... -> ..."):
        rules = mw.PathRules([("w", "x y -> x y*"), (".*", whole)])
        placed = mw.shard(tree, rules, devices=eight)
        assert placed["w"].sharding.shard_shape((8, 16)) == (8, 2)
        assert placed["b"].sharding.is_fully_replicated


def test_what_is_no_array_is_found_beside_arrays(mesh: Mesh) -> None:
    with pytest.raises(MeshwrightError, match="'s' is a str"):
        mw.shard({"n": 3.0, "s": "hi"}, mw.PathRules([(".*", ())]), mesh=mesh)
    with pytest.raises(MeshwrightError, match="'b' is a <U1"):
        mw.shard({"a": np.ones(8), "b": np.array(["x"] * 8)}, P("fsdp"), mesh=mesh)


def test_a_tuple_with_more_entries_than_dims_is_refused(mesh: Mesh) -> None:
    with pytest.raises(MeshwrightError, match="names 3 dims, the array has 2"):
        mw.shard(np.ones((8, 16)), ("fsdp", None, None), mesh=mesh)
    assert specs(mw.shard(np.ones((8, 16)), ("fsdp",), mesh=mesh)) == P("fsdp")


def test_lists_of_axes_inside_a_tuple_are_taken(mesh: Mesh) -> None:
    x = np.ones((8, 16), np.float32)
    assert specs(mw.shard(x, (["fsdp", "tp"], None), mesh=mesh)) == P(("fsdp", "tp"))


def test_a_mismatch_deep_in_the_tree_is_named_with_its_path(mesh: Mesh) -> None:
    layer = {"k": np.ones(8), "b": np.ones(8)}
    layouts = {"l": {"0": {"k": P(), "b": P()}, "1": {"k": P()}}}
    with pytest.raises(MeshwrightError, match="there is no layout for 'l/1/b'"):
        mw.shard({"l": {"0": layer, "1": layer}}, layouts, mesh=mesh)
    with pytest.raises(MeshwrightError, match="there is no layout for '2'"):
        mw.shard([np.ones(8)] * 3, ["x -> x@fsdp", "x -> x@tp"], mesh=mesh)
