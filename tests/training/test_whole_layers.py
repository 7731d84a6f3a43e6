"""Whole layers, each on one device, of stacks that are kept split."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.audits import collectives, instructions
from meshwright.training.whole_layers import map_layers

SHAPE = (16, 8, 4)  # of a layer


def function(layer: jax.Array, shared: jax.Array) -> jax.Array:
    """Needs the whole layer, and knows every element's place in it."""
    places = jnp.arange(layer.size, dtype=layer.dtype).reshape(layer.shape)
    return shared * layer + places * jnp.sum(layer * (places % 7 - 3))


def expected(stack: np.ndarray) -> np.ndarray:
    places = np.arange(math.prod(SHAPE), dtype="f8").reshape(SHAPE)
    sums = np.sum(stack * (places % 7 - 3), axis=(1, 2, 3), keepdims=True)
    return 3.0 * stack + places * sums


def values(layers: int) -> np.ndarray:
    """Small whole numbers: every sum of them is exact in float32, in whatever order."""
    return np.random.default_rng(layers).integers(-8, 9, (layers, *SHAPE)).astype("f")


def compiled(mesh: jax.sharding.Mesh, layers: int, spec: P) -> Any:
    def mapped(stack: jax.Array) -> jax.Array:
        return map_layers(function, stack, spec, jnp.float32(3.0))

    sharding = jax.NamedSharding(mesh, spec)
    described = jax.ShapeDtypeStruct((layers, *SHAPE), jnp.float32, sharding=sharding)
    with jax.set_mesh(mesh):
        return jax.jit(mapped, out_shardings=sharding).lower(described).compile()


@pytest.mark.parametrize(
    ("spec", "layers"),
    [
        (P(None, "fsdp"), 8),
        (P(None, "fsdp", "tp"), 8),
        (P(None, "fsdp", "tp"), 3),  # fewer than devices
        (P(None, "tp", None, "fsdp"), 9),  # does not divide
        (P(None, ("fsdp", "sp"), "tp"), 11),
        (P(None, "tp", ("sp", "fsdp"), None), 8),
        (P("sp", "tp", "fsdp"), 6),
        (P("fsdp", None, None), 4),
        (P(), 2),
    ],
    ids=str,
)
def test_each_layer_is_as_if_it_were_alone(spec: P, layers: int) -> None:
    assert_alone("auto", spec, layers)


@pytest.mark.parametrize("layers", [3, 8])
def test_explicit_axes_work_too(layers: int) -> None:
    assert_alone("explicit", P(None, ("fsdp", "sp"), "tp", None), layers)


def assert_alone(axis_types: Any, spec: P, layers: int) -> None:
    mesh = mw.mesh("dp=2,fsdp=2,tp=2,sp=2", devices=jax.devices()[:16], axis_types=axis_types)
    stack = values(layers)
    found = compiled(mesh, layers, spec)(jax.device_put(stack, jax.NamedSharding(mesh, spec)))
    np.testing.assert_array_equal(found, expected(stack))
    assert found.sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), 4)


@pytest.mark.parametrize("layers", [3, 8, 19, 24])
@pytest.mark.parametrize(
    ("text", "axes"), [("fsdp=8,tp=1", ("fsdp",)), ("fsdp=4,tp=2", ("fsdp", "tp"))]
)
def test_a_round_sends_each_byte_once_each_way_and_holds_one_layer(
    text: str, axes: tuple[str, ...], layers: int
) -> None:
    mesh = mw.mesh(text, devices=jax.devices()[:8])
    program = compiled(mesh, layers, P(None, "fsdp", "tp")).as_text()
    found = collectives(program, mesh)
    rounds, layer = math.ceil(layers / 8), math.prod(SHAPE)
    assert {(c.operation, c.axes) for c in found} == {("all-to-all", axes)}
    assert sum(c.bytes * c.times for c in found) == 2 * rounds * 4 * layer
    assert {c.loops for c in found} == {(rounds,) if rounds > 1 else ()}
    sizes = {
        (math.prod(shape), shape[0])
        for one in instructions(program)
        for _, shape in one.arrays
        if shape
    }
    # a device's part of all layers, padded to full rounds, is as large as one layer a round
    assert max(size for size, _ in sizes) <= rounds * layer
    # and the only arrays larger than a layer are such parts
    assert {leading for size, leading in sizes if size > layer} <= {layers, rounds, rounds * 8}
