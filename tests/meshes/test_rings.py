"""Rings along a mesh axis: how many links each hop takes."""

import dataclasses
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshwright as mw
from meshwright import CHIPS, Machine, MeshwrightError
from meshwright.meshes.arrange import arrange
from meshwright.meshes.rings import ring_in_words

AXES = ("dp", "fsdp", "tp", "sp")


def links_between(one: tuple[int, ...], other: tuple[int, ...], machine: Machine) -> int:
    """Links on the shortest way between two chips: along each dim, or around it where it wraps."""
    links = 0
    for dim in range(3):
        apart = abs(one[dim] - other[dim])
        if machine.wraps[dim]:
            apart = min(apart, machine.slice_shape[dim] - apart)
        links += apart
    return links


def hops(devices: np.ndarray, axis: int, machine: Machine) -> list[list[int]]:
    """For each group along the axis, the links of each hop, counted one by one."""
    groups = np.moveaxis(devices, axis, -1).reshape(-1, devices.shape[axis])
    return [
        [
            links_between(here.coords, there.coords, machine)
            for here, there in zip(group, [*group[1:], group[0]], strict=True)
        ]
        for group in groups
    ]


def jax_order(mesh: mw.MachineMesh) -> np.ndarray:
    return arrange(mesh.axis_sizes, mesh.machine.devices)


SLICES = ["v3:2x2", "v3:4x8", "v4:2x2x4", "v5e:4x4", "v5e:2x4", "v5p:4x4x8", "v5p:2x2x2", "v6e:4x8",
          "7x:2x2x2", "7x:4x4x4", "v5p:4x4x12", "v5p:3x6x3", "2*v5e:4x4", "3*v5p:2x2x3"]  # fmt: skip


def box(text: str) -> Machine:
    """A machine of any shape, also one that cannot be had: `3*v5p:2x2x3`."""
    slices, _, rest = text.rpartition("*")
    chip, _, sides = rest.partition(":")
    return Machine(CHIPS[chip], tuple(map(int, sides.split("x"))), int(slices or 1))


def random_mesh(text: str, data: st.DataObject) -> mw.MachineMesh:
    machine = box(text)
    sizes, left = [1, 1, 1, 1], machine.num_devices
    while left > 1:
        prime = next(p for p in range(2, left + 1) if left % p == 0)
        # sp, the one in question, gets as much as the others together
        sizes[data.draw(st.sampled_from([0, 1, 2, 3, 3, 3]))] *= prime
        left //= prime
    order = data.draw(st.sampled_from([AXES, AXES, ("dp", "sp", "fsdp", "tp")]))
    size = dict(zip(AXES, sizes, strict=True))
    return mw.mesh(",".join(f"{axis}={size[axis]}" for axis in order), machine=machine)


@given(st.sampled_from(SLICES), st.data())
def test_the_order_is_jaxs_and_each_hop_is_that_of_the_slowest_group(
    text: str, data: st.DataObject
) -> None:
    mesh = random_mesh(text, data)
    assert (mesh.devices == jax_order(mesh)).all()
    axis = mesh.axis_names.index("sp")
    if mesh.shape["sp"] > 2 and "slice" not in mesh.axis_extent("sp"):
        counted = hops(mesh.devices, axis, mesh.machine)
        assert mesh.ring_hops("sp") == tuple(max(each) for each in zip(*counted, strict=True))


@pytest.mark.parametrize(
    ("machine", "text", "counts"),
    [
        ("v6e:16x16", "fsdp=16,sp=16", {1: 16}),
        ("v5e:4x4", "fsdp=4,sp=4", {1: 3, 3: 1}),  # a row that does not wrap around
        ("v4:8x8x8", "dp=1,fsdp=1,tp=4,sp=128", {1: 64, 2: 56, 3: 8}),
        ("7x:4x4x4", "fsdp=4,sp=32", {0: 16, 1: 12, 2: 4}),  # two cores a chip
    ],
)
def test_the_links_of_known_rings(machine: str, text: str, counts: dict[int, int]) -> None:
    assert Counter(mw.mesh(text, machine=machine).ring_hops("sp")) == counts


@pytest.mark.parametrize(
    ("machine", "text"),
    [
        ("v5p:4x4x4", "dp=8,fsdp=4,tp=1,sp=2"),
        ("v5p:4x4x4", "fsdp=16,tp=4"),
        ("h100:4x8", "dp=4,sp=8"),
        ("cpu:8", "sp=8"),
        ("2*v5e:4x4", "sp=32"),
    ],
)
def test_meshes_without_a_ring_on_a_torus_have_no_hops(machine: str, text: str) -> None:
    mesh = mw.mesh(text, machine=machine)
    assert (mesh.devices == jax_order(mesh)).all()
    if "sp" in mesh.axis_names:
        assert mesh.ring_hops("sp") == ()


def test_an_exclamation_mark_keeps_the_order_listed() -> None:
    mesh = mw.mesh("!sp=8", machine="v5e:2x4")
    assert [d.id for d in mesh.devices] == [d.id for d in mesh.machine.devices]


@pytest.mark.parametrize("text", ["v5p:4x4x4", "v5e:2x4", "v6e:2x4", "v3:4x4", "2*v5e:4x4"])
def test_the_ring_planned_is_the_ring_built(text: str) -> None:
    machine = Machine.parse(text)
    planned = mw.mesh("fsdp=-1,sp=8", machine=machine)
    for kind in machine.chip.device_kinds:
        real = [dataclasses.replace(d, device_kind=kind) for d in machine.devices]
        random.Random(0).shuffle(real)
        built = mw.mesh("fsdp=-1,sp=8", devices=real)
        assert [d.id for d in built.devices.flat] == [d.id for d in planned.devices.flat]


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ([1] * 8, "ring of 8, every hop one link"),
        ([1, 0] * 4, "ring of 8, every hop one link or inside a chip"),
        ([1, 1, 1, 3], "ring of 4, 1 of 4 hops takes 3 links"),
        ([1, 2, 1, 2, 1, 3], "ring of 6, 2 of 6 hops take 2 links, 1 takes 3"),
    ],
)
def test_a_ring_in_words(lengths: list[int], words: str) -> None:
    assert ring_in_words(lengths) == words


def test_the_hops_of_an_axis_that_is_not_there_are_refused() -> None:
    with pytest.raises(MeshwrightError, match="'pp' is not one of sp"):
        mw.mesh("sp=8", machine="v5e:2x4").ring_hops("pp")
