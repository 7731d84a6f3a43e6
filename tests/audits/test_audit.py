"""Audits of users' own functions, on simulated devices."""

import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tests.audits.programs import HIDDEN, LAYERS, WIDTH, compiled_step

import meshwright as mw
from meshwright.audits import Collective, audit, expected_of
from meshwright.errors import MeshwrightError
from meshwright.testing import assert_collectives

MESH = mw.mesh("fsdp=4,tp=2", devices=jax.devices()[:8])


def array(*spec: str | None, shape: tuple[int, ...] = (1024, 512)) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(MESH, P(*spec)))


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w  # its first argument is split along what is summed


X, W = array(None, "tp"), array("tp", None, shape=(512, 256))


def test_the_mesh_is_that_of_the_shardings() -> None:
    found = audit(jax.jit(product).lower(X, W).compile())
    assert dict(found.mesh) == {"fsdp": 4, "tp": 2}
    ((row,),) = (found.rows,)
    assert (row.operation, row.axes, row.bytes) == ("all-reduce", ("tp",), 4 * 1024 * 256)
    assert re.search(r"tests/audits/test_audit\.py:\d+$", row.source)
    assert found.surprises == ()  # no expectations


def test_only_a_program_that_sends_needs_a_mesh() -> None:
    compiled = jax.jit(jnp.sin).lower(jax.ShapeDtypeStruct((8,), jnp.float32)).compile()
    assert audit(compiled).rows == () == audit(compiled, MESH).rows
    assert str(audit(compiled)).startswith("no mesh: 0 collectives")
    text = jax.jit(product).lower(X, W).compile().as_text()
    with pytest.raises(MeshwrightError, match="found none in its shardings; give it: mesh='fsdp=4"):
        audit(text)


def test_what_no_compiler_has_seen_is_a_mistake() -> None:
    with pytest.raises(MeshwrightError, match=r"not PjitFunction; give jax\.jit"):
        audit(jnp.sin)
    with pytest.raises(MeshwrightError, match=r"a Lowered, .* call \.compile\(\) first"):
        audit(jax.jit(product).lower(X, W))
    with pytest.raises(MeshwrightError, match=r"a Traced, .* call \.lower\(\)\.compile\(\) first"):
        audit(jax.jit(product).trace(X, W))


def test_the_mesh_may_be_said_in_several_ways() -> None:
    text = jax.jit(product).lower(X, W).compile().as_text()
    ways = ("fsdp=4,tp=2", mw.MeshSpec.parse("fsdp=4,tp=2"), {"fsdp": 4, "tp": 2}, MESH)
    assert {audit(text, way).rows[0].axes for way in ways} == {("tp",)}
    for wrong, message in (
        (8, "int is not a mesh"),
        (["fsdp", "tp"], "list is not a mesh"),
        ({}, "names with sizes from 1"),
        ({"fsdp": "4"}, "names with sizes from 1"),
        ("fsdp=-1", "give every size"),
        (jnp.ones(8), "is not a mesh"),
    ):
        with pytest.raises(MeshwrightError, match=message):
            audit(text, wrong)


def test_a_mesh_in_the_wrong_order_is_found_out() -> None:
    text = jax.jit(product).lower(X, W).compile().as_text()
    with pytest.raises(MeshwrightError) as mistake:
        audit(text, "tp=2,fsdp=4")
    assert str(mistake.value) == (
        "mesh 'tp=2,fsdp=4' is not the mesh it was compiled for: 1 of 1 collectives go between 2 "
        "devices where fsdp has 4; in the order 'fsdp=4,tp=2' all fit"
    )
    with pytest.raises(MeshwrightError, match="go between 2 devices where fsdp has 8; give that"):
        audit(text, "fsdp=8")
    with pytest.raises(MeshwrightError, match="that has 8 devices, this 16"):
        audit(text, "fsdp=8,tp=2")


def test_a_collective_over_half_an_axis_says_so() -> None:
    """Its groups are two of the four devices along fsdp; the mesh is its own, and right."""

    def halves(x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x, "fsdp", axis_index_groups=[[0, 1], [2, 3]], tiled=True)

    mapped = jax.shard_map(halves, mesh=MESH, in_specs=P("fsdp"), out_specs=P("fsdp"))
    compiled = jax.jit(mapped).lower(array("fsdp", None)).compile()
    found = audit(compiled, expected=expected_of({"fsdp": ["all-gather"]}))
    (row,) = found.surprises
    assert (row.axes, row.devices, row.part_of_axes, row.over) == (
        ("fsdp",), 2, True, "part of fsdp",
    )  # fmt: skip
    assert row.why == "groups of 2 devices are not all those along fsdp"
    assert "all-gather over part of fsdp of f32[512,512]" in str(found)
    assert found.by_axis()[0].part_of_axes
    assert audit(compiled, MESH).rows[0].part_of_axes  # no mistake where it is the program's own


def test_arrays_with_copies_are_named_with_the_axes_they_are_whole_over() -> None:
    compiled = jax.jit(product).lower(X, W).compile()
    (copied,) = (one for one in audit(compiled).replicated if one.name.startswith("argument"))
    # half of x is 1 MiB, and held by every device along fsdp; w is smaller
    assert copied.name == "argument [0][0]"
    assert (copied.axes, copied.copies, copied.bytes) == (("fsdp",), 4, 2**20)
    smaller = audit(compiled, replicated_from=2**18).replicated
    assert {"argument [0][0]", "argument [0][1]"} <= {one.name for one in smaller}


def test_copies_are_named_right_beside_arguments_that_are_not_used() -> None:
    compiled = jax.jit(lambda key, unused, x, w: product(x, w)).lower(
        jax.random.key(0), {"a": None, "b": W}, X, W
    )
    (copied,) = (
        one for one in audit(compiled.compile()).replicated if one.name.startswith("argument")
    )
    assert copied.name == "argument [0][2]"


def test_an_output_forced_whole_is_a_surprise_with_its_line() -> None:
    whole = NamedSharding(MESH, P())

    def scaled(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(2 * x, whole)

    line = scaled.__code__.co_firstlineno + 1
    compiled = jax.jit(scaled).lower(array("fsdp", None)).compile()
    found = audit(compiled, expected=expected_of({"tp": ["all-reduce"]}))
    (row,) = found.surprises
    assert (row.operation, row.axes, row.why) == (
        "all-gather", ("fsdp",), "nothing is expected over fsdp",
    )  # fmt: skip
    assert row.source.endswith(f"test_audit.py:{line}")
    assert f"test_audit.py:{line}" in str(found)


def test_data_is_plain_json() -> None:
    expected = expected_of({"tp": ["all-reduce"]})
    found = audit(jax.jit(product).lower(X, W).compile(), expected=expected)
    data = json.loads(json.dumps(found.data()))
    assert data["rows"][0]["wire_bytes"] == 4 * 1024 * 256
    assert data["by_axis"][0]["operation"] == "all-reduce"
    assert (data["surprises"], data["missing"]) == (0, [])
    assert found.markdown().count("\n| tp | all-reduce | 1 |") == 1


# ---- expectations


def test_a_phase_that_is_said_must_be_right() -> None:
    compiled = jax.jit(product).lower(X, W).compile()
    forward = audit(compiled, expected=[Collective("all-reduce", ("tp",), phase="forward")])
    assert forward.surprises == ()
    backward = audit(compiled, expected=[Collective("all-reduce", ("tp",), phase="backward")])
    assert [row.why for row in backward.surprises] == [
        "an all-reduce over tp is expected backward, this is forward"
    ]


def test_small_arrays_are_bookkeeping_only_over_axes_that_are_used() -> None:
    def total(x: jax.Array) -> jax.Array:
        return jnp.sum(x)

    compiled = jax.jit(total).lower(array("fsdp", None)).compile()
    used = audit(compiled, expected=expected_of({"fsdp": ["all-gather"]}))
    assert [row.why for row in used.rows] == ["bookkeeping"]
    other = audit(compiled, expected=expected_of({"tp": ["all-gather"]}))
    assert len(other.surprises) == 1
    strict = audit(compiled, expected=expected_of({"fsdp": ["all-gather"]}), bookkeeping=0)
    assert len(strict.surprises) == 1


def test_a_limit_of_size_is_said_in_words() -> None:
    compiled = jax.jit(product).lower(X, W).compile()
    small = Collective("all-reduce", ("tp",), bytes=1024)
    (row,) = audit(compiled, expected=[small], bookkeeping=0).surprises
    assert row.why == (
        "an all-reduce over tp is expected of arrays of up to 1.0 KiB, this is 1.0 MiB"
    )
    named = Collective("all-reduce", ("tp",), what="norms", bytes=2048)
    (row,) = audit(compiled, expected=[small, named], bookkeeping=0).surprises
    assert "expected of norms of up to 2.0 KiB" in row.why


def test_several_kinds_that_are_expected_are_listed() -> None:
    compiled = jax.jit(product).lower(X, W).compile()
    others = expected_of({"tp": ["all-gather", "all-to-all"]})
    assert [row.why for row in audit(compiled, expected=others).surprises] == [
        "over tp only all-gather and all-to-all are expected"
    ]


def test_what_nothing_was_said_of_is_not_judged() -> None:
    compiled = jax.jit(product).lower(X, W).compile()
    assert not audit(compiled).judged
    assert "not judged" in str(audit(compiled)).splitlines()[0]
    assert audit(compiled, expected=[]).judged
    assert "1 surprise" in str(audit(compiled, expected=[])).splitlines()[0]


@pytest.mark.parametrize(
    ("operations", "bookkeeping", "counts"),
    [
        # surprises, rewritten, missing
        (["reduce-scatter"], 0, (1, 0, 1)),
        (["reduce-scatter/all-reduce"], 0, (0, 1, 0)),
        (["reduce-scatter/all-to-all"], 0, (1, 0, 1)),
        (["reduce-scatter/all-reduce", "all-reduce"], 0, (0, 0, 1)),  # the plain one wins
        (["reduce-scatter/all-reduce"], 2**20, (0, 0, 1)),  # small: bookkeeping
    ],
)
def test_a_rewrite_is_neither_planned_as_it_is_nor_a_surprise(
    operations: list[str], bookkeeping: int, counts: tuple[int, int, int]
) -> None:
    compiled = jax.jit(product).lower(X, W).compile()
    found = audit(compiled, expected=expected_of({"tp": operations}), bookkeeping=bookkeeping)
    assert (len(found.surprises), len(found.rewritten), len(found.missing)) == counts
    assert found.data()["rewritten"] == counts[1]
    assert ("all-reduce ~" in str(found)) == bool(counts[1])
    assert ("all-reduce !" in str(found)) == bool(counts[0])
    if counts[1]:
        (row,) = found.rewritten
        assert row.planned
        assert row.data()["rewritten"] == "reduce-scatter over tp"
        assert (
            str(found)
            .splitlines()[0]
            .endswith(
                "no surprises; 1 rewritten by the compiler: "
                "all-reduce in place of reduce-scatter over tp, twice the bytes"
            )
        )
        assert "all-reduce (1 rewritten)" in found.markdown()


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"fsdp": ["all-gathr"]}, "not a collective; did you mean 'all-gather'"),
        ({"fsdp": "all-gather"}, r"write a list, \['all-gather'\]"),
    ],
)
def test_a_mistake_in_what_is_expected_is_explained(said: dict, message: str) -> None:
    with pytest.raises(MeshwrightError, match=message):
        expected_of(said)


# ---- for users' tests


def test_assert_collectives_passes_for_what_is_expected() -> None:
    found = assert_collectives(product, {"tp": ["all-reduce"]}, X, W)
    assert len(found.rows) == 1
    assert_collectives(jax.jit(product).lower(X, W).compile(), {"tp": ["all-reduce"]})
    both = {"tp": ["all-reduce"], "fsdp": ["all-gather"]}
    assert_collectives(jax.jit(product), both, X, W, allow_missing=True)


def test_assert_collectives_fails_readably() -> None:
    with pytest.raises(AssertionError) as failure:
        assert_collectives(product, {"fsdp": ["all-gather"]}, X, W)
    text = str(failure.value)
    assert "1 surprise:" in text
    assert re.search(r"all-reduce over tp of f32\[1024,256\], 1 time, .*test_audit\.py:\d+", text)
    assert "expected, but missing: all-gather over fsdp" in text


def test_assert_collectives_can_demand_silence() -> None:
    assert_collectives(product, {}, array("fsdp", None), array(shape=(512, 256)))
    with pytest.raises(AssertionError, match="nothing is expected over tp"):
        assert_collectives(product, {}, X, W)
    # without a mesh, too
    assert_collectives(jnp.sin, {}, jnp.ones(8))
    with pytest.raises(AssertionError, match="missing: all-gather over fsdp"):
        assert_collectives(jnp.sin, {"fsdp": ["all-gather"]}, jnp.ones(8))


def test_assert_collectives_must_be_told_what_to_expect() -> None:
    for nothing in (None, ["all-gather"]):
        with pytest.raises(MeshwrightError, match="not a mapping from axes to operations"):
            assert_collectives(product, nothing, X, W)  # type: ignore[arg-type]


def test_assert_collectives_takes_what_is_compiled() -> None:
    lowered = jax.jit(product).lower(X, W)
    with pytest.raises(MeshwrightError, match=r"call \.compile\(\) first"):
        assert_collectives(lowered, {"tp": ["all-reduce"]})
    with pytest.raises(MeshwrightError, match=r"call \.lower\(\)\.compile\(\) first"):
        assert_collectives(jax.jit(product).trace(X, W), {"tp": ["all-reduce"]})
    assert_collectives(lowered.compile(), {"tp": ["all-reduce"]}, mesh="fsdp=4,tp=2")


def test_assert_collectives_knows_the_axes() -> None:
    with pytest.raises(MeshwrightError, match="no axis 'tpp'; did you mean 'tp'"):
        assert_collectives(product, {"tpp": ["all-reduce"]}, X, W)
    with pytest.raises(MeshwrightError, match="a function or a compiled program, not int"):
        assert_collectives(3, {})


def test_what_automatic_partitioning_makes_of_fsdp_is_found_out() -> None:
    mesh = mw.mesh("fsdp=8", devices=jax.devices()[:8])
    with pytest.raises(AssertionError, match="an all-reduce where a reduce-scatter over fsdp does"):
        assert_collectives(compiled_step(mesh), {"fsdp": ["all-gather", "reduce-scatter"]})
    found = audit(compiled_step(mesh))
    added = [row for row in found.rows if row.operation == "all-reduce" and len(row.shape) > 1]
    assert sum(row.bytes * row.times for row in added) % (LAYERS * WIDTH * HIDDEN) == 0


def test_axes_may_be_given_as_a_tuple() -> None:
    both = array(("fsdp", "tp"), None, shape=(512, 256))  # type: ignore[arg-type]
    row = array(None, ("fsdp", "tp"))  # type: ignore[arg-type]
    assert_collectives(product, {("fsdp", "tp"): ["all-reduce"]}, row, both)
    assert_collectives(product, {("tp",): ["all-reduce"]}, X, W)
    assert expected_of({("fsdp", "sp"): ["all-gather"]}) == expected_of({"fsdp,sp": ["all-gather"]})


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({("all-reduce", "tp"): ["x"]}, r"keys are axes, .*\{'tp': \['all-reduce'\]\}"),
        ({3: ["all-reduce"]}, "keys are axes of the mesh"),
        ({("tp", 3): ["all-reduce"]}, "keys are axes of the mesh"),
        ({(): ["all-reduce"]}, "keys are axes of the mesh"),
        ({"tp": 3}, "3 is not a list of operations"),
        ({"tp": [3]}, r"\[3\] is not a list of operations"),
        ({("tp", "spp"): ["all-reduce"]}, "no axis 'spp'"),
    ],
)
def test_a_wrong_key_or_value_is_a_mistake_in_one_line(said: dict, message: str) -> None:
    with pytest.raises(MeshwrightError, match=message) as caught:
        assert_collectives(product, said, X, W)
    assert "\n" not in str(caught.value)


def test_what_nnx_jit_compiles_is_read() -> None:
    nnx = pytest.importorskip("flax.nnx")

    class Product(nnx.Module):
        def __init__(self) -> None:
            weight = jnp.ones((512, 256), jnp.float32)
            self.w = nnx.Param(jax.device_put(weight, W.sharding))

    @nnx.jit
    def step(model: Product, x: jax.Array) -> jax.Array:
        return product(x, model.w[...])

    assert_collectives(step, {"tp": ["all-reduce"]}, Product(), X)
    lowered = step.lower(Product(), X)
    assert len(audit(lowered.compile()).rows) == 1
    assert_collectives(lowered.compile(), {"tp": ["all-reduce"]})
    with pytest.raises(MeshwrightError, match=r"call \.compile\(\) first"):
        audit(lowered)


class Wrapped:
    """A stage of jax's inside another library's, as equinox has them: no text of its own."""

    def __init__(self, **stage: Any) -> None:
        self.__dict__ |= stage

    def compile(self) -> "Wrapped":
        return Wrapped(compiled=self.lowered.compile())

    def __call__(self, *arguments: Any) -> Any:
        raise AssertionError("a compiled program is not to be compiled again")


class FilterJit:
    def lower(self, *arguments: Any) -> Wrapped:
        return Wrapped(lowered=jax.jit(product).lower(*arguments))

    def __call__(self, *arguments: Any) -> Any:
        return product(*arguments)


def test_what_another_library_wraps_is_read() -> None:
    assert_collectives(FilterJit(), {"tp": ["all-reduce"]}, X, W)
    compiled = FilterJit().lower(X, W).compile()
    assert_collectives(compiled, {"tp": ["all-reduce"]})
    assert len(audit(compiled).rows) == 1


def test_what_eqx_filter_jit_compiles_is_read() -> None:
    eqx = pytest.importorskip("equinox")
    # abstract arrays are no arrays for equinox, and would be static
    arrays = [jax.device_put(np.ones(x.shape, np.float32), x.sharding) for x in (X, W)]
    assert_collectives(eqx.filter_jit(product), {"tp": ["all-reduce"]}, *arrays)


def test_a_program_for_cpus_says_that_it_sends_bfloat16_as_float32() -> None:
    def narrow(one: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(one.shape, jnp.bfloat16, sharding=one.sharding)

    compiled = jax.jit(product).lower(narrow(X), narrow(W)).compile()
    for found in (audit(compiled), audit(compiled.as_text(), "fsdp=4,tp=2")):
        assert found.rows[0].dtype == "f32"
        assert "which send bfloat16 as float32" in found.notes[0]
        assert found.notes[0] in str(found)
        assert found.data()["notes"] == list(found.notes)
    assert not audit(jax.jit(product).lower(X, W).compile()).notes


def test_experts_are_an_axis_like_the_others() -> None:
    mesh = mw.mesh("ep=2,tp=4", devices=jax.devices()[:8])
    weights = {"experts": jax.ShapeDtypeStruct((4, 16, 32), jnp.float32)}
    layout = "expert embed mlp -> expert@ep embed mlp@tp"
    placed = mw.shard(weights, layout, mesh=mesh)
    assert placed["experts"].sharding.spec == P("ep", None, "tp")
    table = mw.explain(weights, layout, mesh)
    assert "ep=2,tp=4" in table.summary()
    assert table.data()["arrays"][0]["bytes_per_device"] == 4 * 4 * 16 * 32 // 8
    summed = jax.jit(lambda tree: tree["experts"].sum(0), out_shardings=NamedSharding(mesh, P()))
    found = audit(summed.lower(placed).compile())
    assert {row.axes for row in found.rows} == {("ep",), ("tp",)}
