"""Padding comes on and goes off without a bit changed, and no device holds more for it."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright import MeshwrightError
from meshwright.layouts import create, fit, stored


def abstract(shape: tuple[int, ...], spec: P, mesh: str) -> jax.ShapeDtypeStruct:
    count = math.prod(mw.MeshSpec.parse(mesh).sizes)
    placed = mw.mesh(mesh, devices=jax.devices()[:count], axis_types="explicit")
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(placed, spec))


def test_what_is_stored_is_split_as_finely_along_another_dim() -> None:
    target = abstract((260, 64), P("tp", "fsdp"), "fsdp=2,tp=4")
    on_disk = stored(target, (257, 64))
    assert on_disk.shape == (257, 64)
    assert on_disk.sharding.spec == P(None, ("fsdp", "tp"))


def test_what_no_other_dim_can_take_is_stored_whole() -> None:
    assert stored(abstract((260,), P("tp"), "tp=4"), (257,)).sharding.spec == P(None)
    both = stored(abstract((260, 2), P("tp", "fsdp"), "fsdp=2,tp=4"), (257, 2))
    assert both.sharding.spec == P(None, "fsdp")


def test_an_array_without_padding_is_stored_as_it_is() -> None:
    target = abstract((260, 64), P("tp", "fsdp"), "fsdp=2,tp=4")
    assert stored(target, (260, 64)) is target


@pytest.mark.parametrize(
    ("padded", "spec", "shape"),
    [
        ((260, 64), P("tp", "fsdp"), (257, 64)),
        ((64, 264), P(None, ("fsdp", "tp")), (64, 257)),
        ((16,), P("tp"), (9,)),  # one device has padding alone
    ],
)
def test_padding_goes_off_and_on_without_a_bit_changed(
    padded: tuple[int, ...], spec: P, shape: tuple[int, ...]
) -> None:
    target = abstract(padded, spec, "fsdp=2,tp=4")
    on_disk = stored(target, shape)
    values = np.random.default_rng(0).normal(size=shape).astype("f")
    there = fit({"w": jax.device_put(values, on_disk.sharding)}, {"w": target})["w"]
    assert (there.shape, there.sharding) == (padded, target.sharding)
    inside = tuple(map(slice, shape))
    np.testing.assert_array_equal(np.asarray(there)[inside], values)
    assert np.count_nonzero(there) == np.count_nonzero(values)
    back = fit({"w": there}, {"w": on_disk})["w"]
    np.testing.assert_array_equal(back, values)
    assert back.sharding == on_disk.sharding


def test_initial_values_do_not_depend_on_padding() -> None:
    target = abstract((260, 64), P("tp", "fsdp"), "fsdp=2,tp=4")
    init = mw.Normal(0.02)
    padded = mw.ArraySpec((260, 64), "vocab embed", init=init, unpadded=(257, 64))
    found = np.asarray(create({"w": padded}, {"w": target.sharding})["w"])
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    alone = create({"w": mw.ArraySpec((257, 64), "vocab embed", init=init)}, {"w": one})["w"]
    np.testing.assert_array_equal(found[:257], alone)
    assert not found[257:].any()


def test_a_table_counts_elements_without_padding_and_bytes_with_it() -> None:
    spec = mw.ArraySpec((258, 64), "vocab embed", unpadded=(257, 64))
    table = mw.explain({"w": spec}, mw.Rules([("vocab", "tp"), ("embed", None)]), "tp=2")
    assert table.num_elements == 257 * 64
    assert table.bytes_per_device == 4 * 129 * 64


@pytest.mark.parametrize("unpadded", [(258, 64), (257,)])
def test_an_array_is_not_smaller_than_its_values(unpadded: tuple[int, ...]) -> None:
    with pytest.raises(MeshwrightError, match=r"is larger than shape=\(257, 64\)"):
        mw.ArraySpec((257, 64), "vocab embed", unpadded=unpadded)
