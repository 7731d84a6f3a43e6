"""Audits of users' own functions, on simulated devices."""

import json
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tests.audit.programs import HIDDEN, LAYERS, WIDTH, compiled_step

import meshwright as mw
from meshwright.audit import Expected, audit, expected_of
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
    assert re.search(r"tests/audit/test_audit\.py:\d+$", row.source)
    assert found.surprises == ()  # nothing was said of what to expect


def test_a_program_without_a_mesh_needs_one() -> None:
    compiled = jax.jit(jnp.sin).lower(jax.ShapeDtypeStruct((8,), jnp.float32)).compile()
    with pytest.raises(MeshwrightError, match="found none in its shardings; give it"):
        audit(compiled)
    assert audit(compiled, MESH).rows == ()
    with pytest.raises(MeshwrightError, match=r"not PjitFunction; give jax\.jit"):
        audit(jnp.sin)


def test_arrays_with_copies_are_named_with_the_axes_they_are_whole_over() -> None:
    compiled = jax.jit(product).lower(X, W).compile()
    (copied,) = (one for one in audit(compiled).replicated if one.name.startswith("argument"))
    # half of x is 1 MiB, and held by every device along fsdp; w is smaller
    assert copied.name == "argument [0][0]"
    assert (copied.axes, copied.copies, copied.bytes) == (("fsdp",), 4, 2**20)
    smaller = audit(compiled, replicated_from=2**18).replicated
    assert {"argument [0][0]", "argument [0][1]"} <= {one.name for one in smaller}


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
    forward = audit(compiled, expected=[Expected("all-reduce", ("tp",), "forward")])
    assert forward.surprises == ()
    backward = audit(compiled, expected=[Expected("all-reduce", ("tp",), "backward")])
    assert [row.why for row in backward.surprises] == [
        "a all-reduce over tp is expected backward, this is forward"
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
    assert "expected, but not there: all-gather over fsdp" in text


def test_assert_collectives_can_demand_silence() -> None:
    assert_collectives(product, {}, array("fsdp", None), array(shape=(512, 256)))
    with pytest.raises(AssertionError, match="nothing is expected over tp"):
        assert_collectives(product, {}, X, W)


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
