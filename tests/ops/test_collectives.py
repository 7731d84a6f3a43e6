"""All-gather and reduce-scatter: exact, and each the other's gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.audits import collectives
from meshwright.meshes import MeshSpec
from meshwright.ops import collectives as module
from meshwright.ops.collectives import (
    all_gather,
    drop_trivial_axes,
    nontrivial_axes,
    partial_sums,
    reduce_to,
    spec_of,
    stacks,
    tie_gradients,
)
from meshwright.planner.compilers import scattered_by


def mesh_of(text: str) -> jax.sharding.Mesh:
    return mw.mesh(text, devices=jax.devices()[:8], axis_types="explicit")


@pytest.mark.parametrize(
    ("layout", "onto", "left"),
    [
        (P("fsdp", "tp"), ("fsdp",), P(None, "tp")),
        (P("fsdp", "tp"), ("fsdp", "tp"), P(None, None)),
        (P(("fsdp", "sp"), "tp"), ("fsdp", "sp"), P(None, "tp")),
        (P("tp", ("fsdp", "sp")), ("sp",), P("tp", "fsdp")),
        (P("tp", None), ("fsdp", "sp"), P("tp", None)),  # held by each already
        (P(None, None), (), P(None, None)),
    ],
)
def test_all_gathering_gives_the_same_array_with_fewer_splits(
    layout: P, onto: tuple[str, ...], left: P
) -> None:
    mesh = mesh_of("fsdp=2,tp=2,sp=2")
    x = np.arange(64, dtype="f").reshape(8, 8)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, layout)
        full = all_gather(placed, onto)
        assert spec_of(full) == left
        np.testing.assert_array_equal(full, x)


def test_what_was_all_gathered_gets_its_gradient_summed_and_split_again() -> None:
    """y = (each device's tokens) @ w: the gradient of w is the sum over all tokens."""
    mesh = mesh_of("dp=2,fsdp=4")
    rng = np.random.default_rng(0)
    tokens = rng.normal(size=(16, 8)).astype("f")
    w, given = rng.normal(size=(8, 12)).astype("f"), rng.normal(size=(16, 12)).astype("f")
    over = ("dp", "fsdp")

    def apply(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.einsum("te,em->tm", x, all_gather(w, over), out_sharding=P(over, None))

    with jax.set_mesh(mesh):
        args = jax.device_put(w, P("fsdp", None)), jax.device_put(tokens, P(over, None))
        out_gradient = jax.device_put(given, P(over, None))

        def gradient(w: jax.Array, x: jax.Array, given: jax.Array) -> jax.Array:
            return jax.vjp(lambda w: apply(w, x), w)[1](given)[0]

        compiled = jax.jit(gradient).lower(*args, out_gradient).compile()
        found = compiled(*args, out_gradient)
        assert spec_of(found) == P("fsdp", None)
    np.testing.assert_allclose(found, tokens.T.astype("f8") @ given, rtol=1e-5, atol=1e-5)
    sent = {(c.operation, c.axes, c.shape) for c in collectives(compiled.as_text(), mesh)}
    # scattered over fsdp first, so that dp adds a fourth of it
    assert sent == {("reduce-scatter", ("fsdp",), (2, 12)), ("all-reduce", ("dp",), (2, 12))}


def test_on_tpus_shards_whose_gradient_would_be_all_reduced_are_stacked() -> None:
    # of a layer: [embed, mlp] over embed, and back to embed in shards of 128, 256, 384 lanes
    assert not stacks(128, is_last=False, table=False)
    assert [stacks(n, is_last=True, table=False) for n in (128, 256, 384, 512, 160)] == [
        True, False, True, False, False,
    ]  # fmt: skip
    # LM heads [embed, vocab] and embeddings [vocab, embed]
    assert stacks(256, is_last=False, table=True)
    assert [stacks(n, is_last=True, table=True) for n in (128, 256, 384, 160)] == [
        True, False, True, True,
    ]  # fmt: skip
    # what was scattered over another axis before
    assert [stacks(n, is_last=True, table=False, is_inner=True) for n in (64, 128, 256, 160)] == [
        True, True, False, True,
    ]  # fmt: skip
    assert not stacks(64, is_last=False, table=False, is_inner=True)


@pytest.mark.parametrize(
    ("on", "mesh", "scatters"),
    [
        ("v5p:4x4x4", "fsdp=64", False),
        ("v5p:4x4x4", "dp=2,fsdp=32", True),
        ("v5p:2x2x2", "fsdp=8", False),
        ("v5p:2x2x1", "fsdp=4", True),
        ("v5e:4x4", "fsdp=16", False),
        ("v5e:4x8", "fsdp=32", True),
        ("v6e:2x4", "fsdp=8", True),
    ],
)
def test_ops_and_plan_agree_on_slices_that_the_tpu_compiler_does_not_scatter_over(
    monkeypatch: pytest.MonkeyPatch, on: str, mesh: str, scatters: bool
) -> None:
    machine = mw.Machine.parse(on)
    sizes = dict(MeshSpec.parse(mesh).axes)
    abstract = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
    kind = machine.chip.device_kinds[0]
    monkeypatch.setattr(module, "current_device", lambda: ("tpu", kind))
    with jax.sharding.use_abstract_mesh(abstract):
        assert module._can_scatter("fsdp") is scatters
    assert (scattered_by(sizes["fsdp"], machine) == "reduce-scatter") is scatters


@pytest.mark.parametrize("layout", [P(None, ("fsdp", "sp")), P(("fsdp", "sp"), None)])
@pytest.mark.parametrize(
    ("axes", "table"),
    [
        ("dp=2,fsdp=2,sp=2", False),  # shards of 128 lanes, or of 2 rows
        ("dp=2,fsdp=2,sp=2", True),
        ("dp=1,fsdp=2,sp=4", False),  # of 64 lanes over sp, which are 256 over fsdp; or of 1 row
    ],
)
def test_stacked_on_tpus_or_not_it_is_the_same_array_with_the_same_gradient(
    monkeypatch: pytest.MonkeyPatch, layout: P, axes: str, table: bool
) -> None:
    mesh = mesh_of(axes)
    rng = np.random.default_rng(0)
    w = rng.normal(size=(8, 512)).astype("f")
    tokens = rng.normal(size=(16, 8)).astype("f")
    over = tuple(axis for axis, size in mesh.shape.items() if size > 1)
    found, shapes = [], []
    with jax.set_mesh(mesh):
        args = jax.device_put(w, layout), jax.device_put(tokens, P(over, None))

        def loss(w: jax.Array, x: jax.Array) -> jax.Array:
            w = all_gather(w, over, table=table)
            return jnp.sum(jnp.sin(jnp.einsum("te,em->tm", x, w, out_sharding=P(over, None))))

        for platform in ("cpu", "tpu"):
            monkeypatch.setattr(module, "current_platform", lambda name=platform: name)
            jax.clear_caches()
            compiled = jax.jit(jax.value_and_grad(loss)).lower(*args).compile()
            found.append(compiled(*args))
            rows = collectives(compiled.as_text(), mesh)
            shapes.append({len(row.shape) for row in rows if row.operation == "reduce-scatter"})
    assert shapes[0] == {2}
    assert (3 in shapes[1]) == (table or layout[1] is not None)
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("over", "target"),
    [
        (("tp",), P(None, None)),
        (("tp",), P("tp", None)),
        (("fsdp", "tp"), P("tp", None)),
        (("fsdp", "tp"), P("tp", "fsdp")),
        (("fsdp", "tp"), P(("fsdp", "tp"), None)),
        ((), P(None, None)),
    ],
)
def test_partial_sums_are_added_up(over: tuple[str, ...], target: P) -> None:
    """A product over a split dim: each device's part is a partial sum."""
    mesh = mesh_of("fsdp=2,tp=4")
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(8, 16)).astype("f"), rng.normal(size=(16, 8)).astype("f")
    with jax.set_mesh(mesh):
        axes = over or None
        left, right = jax.device_put(a, P(None, axes)), jax.device_put(b, P(axes, None))

        def product(left: jax.Array, right: jax.Array) -> jax.Array:
            parts = partial_sums(P(None, None), over)
            return reduce_to(jnp.einsum("ik,kj->ij", left, right, out_sharding=parts), over, target)

        found = jax.jit(product)(left, right)
        assert found.sharding.is_equivalent_to(jax.NamedSharding(mesh, target), 2)
    np.testing.assert_allclose(found, a.astype("f8") @ b, rtol=1e-5, atol=1e-5)


def test_adding_up_to_a_split_is_one_scatter_and_its_gradient_one_gather() -> None:
    mesh = mesh_of("fsdp=2,tp=4")

    def product(left: jax.Array, right: jax.Array) -> jax.Array:
        # as a block does: gather what is split between blocks, multiply, scatter again
        whole = all_gather(left, ("tp",))
        parts = jnp.einsum("ie,ek->ik", whole, right, out_sharding=P(None, "tp"))
        parts = jnp.einsum("ik,kj->ij", parts, right.T, out_sharding=partial_sums(P(), ("tp",)))
        return reduce_to(parts, ("tp",), P("tp", None))

    with jax.set_mesh(mesh):
        left = jax.device_put(np.ones((8, 16), "f"), P("tp", None))
        right = jax.device_put(np.ones((16, 8), "f"), P(None, "tp"))
        forward = jax.jit(product).lower(left, right).compile().as_text()
        both = jax.jit(lambda a, b: jax.vjp(lambda a: product(a, b), a)[1](a))
        backward = both.lower(left, right).compile().as_text()
    sent = [(c.operation, c.axes) for c in collectives(forward, mesh)]
    assert sorted(sent) == [("all-gather", ("tp",)), ("reduce-scatter", ("tp",))]
    sent = [(c.operation, c.axes) for c in collectives(backward, mesh)]
    assert sorted(sent) == [("all-gather", ("tp",)), ("reduce-scatter", ("tp",))]


def test_axes_of_one_device_are_left_out() -> None:
    with jax.set_mesh(mesh_of("dp=1,fsdp=8,tp=1")):
        assert nontrivial_axes() == {"fsdp"}
        assert drop_trivial_axes(P(("dp", "fsdp"), "tp"), nontrivial_axes()) == P("fsdp", None)
        x = jax.device_put(np.ones((8, 8), "f"), P("dp", "tp"))
        np.testing.assert_array_equal(all_gather(x, ("dp", "tp")), 1)


def test_bfloat16_sums_stay_within_rounding() -> None:
    mesh = mesh_of("tp=8")
    rng = np.random.default_rng(2)
    a, b = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((4, 64), (64, 4)))
    with jax.set_mesh(mesh):
        left, right = jax.device_put(a, P(None, "tp")), jax.device_put(b, P("tp", None))
        parts = jnp.einsum("ik,kj->ij", left, right, out_sharding=partial_sums(P(), ("tp",)))
        found = reduce_to(parts, ("tp",), P(None, None))
    exact = np.asarray(a, "f8") @ np.asarray(b, "f8")
    size = np.abs(np.asarray(a, "f8")) @ np.abs(np.asarray(b, "f8"))
    assert np.all(np.abs(np.asarray(found, "f8") - exact) <= 8 * 2**-8 * size)


def test_gradients_that_wait_for_each_other_are_the_same() -> None:
    def loss(x: jax.Array, w: jax.Array, together: bool) -> jax.Array:
        x, w = tie_gradients(x, w) if together else (x, w)
        return jnp.sum(jnp.sin(x) @ w)

    x, w = jnp.arange(12.0).reshape(4, 3), jnp.ones((3, 2))
    gradient = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
    for one, other in zip(gradient(x, w, True), gradient(x, w, False), strict=True):
        np.testing.assert_array_equal(one, other)
    assert "stablehlo.optimization_barrier %" in gradient.lower(x, w, True).as_text()
