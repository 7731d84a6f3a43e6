"""Rows in zig-zag order against NumPy's indexing, and what it costs to bring them there."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tests.ops.attention.reference import zigzag

import meshwright as mw
from meshwright.audits import collectives
from meshwright.errors import MeshwrightError
from meshwright.ops.attention import from_zigzag, to_zigzag

LAYOUTS = {
    "sp=2": P(None, "sp"),
    "sp=3": P(None, "sp"),
    "sp=4": P(None, "sp"),
    "sp=8": P(None, "sp"),
    "dp=2,sp=4": P("dp", "sp"),
    "sp=2,tp=2,fsdp=2": P("fsdp", ("tp", "sp")),  # over two axes, in another order than the mesh's
}


def mesh(text: str) -> jax.sharding.Mesh:
    sizes = [int(part[-1]) for part in text.split(",")]
    return mw.mesh(text, devices=jax.devices()[: int(np.prod(sizes))], axis_types="explicit")


def ways(text: str) -> int:
    axes = LAYOUTS[text][1]
    return int(np.prod([mesh(text).shape[a] for a in ([axes] if isinstance(axes, str) else axes)]))


@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("rest", [(), (3, 2)], ids=["tokens", "activations"])
def test_each_device_holds_a_chunk_and_its_mirror(text: str, rest: tuple[int, ...]) -> None:
    length = 48
    x = np.arange(4 * length * int(np.prod(rest)), dtype="i").reshape(4, length, *rest)
    with jax.set_mesh(mesh(text)):
        placed = jax.device_put(x, P(*LAYOUTS[text], *(None for _ in rest)))
        there, back = jax.jit(lambda x: (to_zigzag(x), from_zigzag(to_zigzag(x))))(placed)
        away = jax.jit(from_zigzag)(placed)
    places = zigzag(length, ways(text))
    np.testing.assert_array_equal(there, x[:, places])
    np.testing.assert_array_equal(away, x[:, np.argsort(places)])
    np.testing.assert_array_equal(back, x)
    for one in (there, back, away):
        assert one.sharding.is_equivalent_to(placed.sharding, x.ndim)


def test_gradients_go_back_the_way_values_came() -> None:
    x, given = np.random.default_rng(0).normal(size=(2, 2, 16)).astype("f")
    with jax.set_mesh(mesh("sp=4")):
        placed, gradient = (jax.device_put(one, P(None, "sp")) for one in (x, given))
        _, backward = jax.vjp(to_zigzag, placed)
        (found,) = backward(gradient)
    np.testing.assert_array_equal(found, given[:, np.argsort(zigzag(16, 4))])


@pytest.mark.parametrize("order", [to_zigzag, from_zigzag])
def test_it_is_two_permutes_of_half_a_part_and_nothing_is_gathered(order: Any) -> None:
    here = mesh("dp=2,sp=4")
    with jax.set_mesh(here):
        shape = jax.ShapeDtypeStruct(
            (2, 40), jnp.int32, sharding=jax.NamedSharding(here, P("dp", "sp"))
        )
        text = jax.jit(order).lower(shape).compile().as_text()
    found = collectives(text, here)
    assert [(c.operation, c.axes, c.shape) for c in found] == [
        ("collective-permute", ("sp",), (1, 5))
    ] * 2


def test_rows_that_are_whole_stay_as_they_are() -> None:
    with jax.set_mesh(mesh("dp=2,sp=4")):
        x = jax.device_put(np.arange(14, dtype="i").reshape(2, 7), P("dp", None))
        np.testing.assert_array_equal(to_zigzag(x), x)


def test_sequences_without_two_chunks_a_device_are_an_error() -> None:
    with (
        jax.set_mesh(mesh("sp=4")),
        pytest.raises(
            MeshwrightError, match=r"sequences of 12 tokens over 4 devices .*; 8 or 16 would fit"
        ),
    ):
        to_zigzag(jax.device_put(np.zeros((1, 12), "i"), P(None, "sp")))
