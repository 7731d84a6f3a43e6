"""Rings along a mesh axis: which hops are one link, and what else stays as it was."""

import dataclasses
import itertools
import logging
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshwright as mw
from meshwright import CHIPS, Machine, MeshwrightError
from meshwright.meshes.arrange import arrange
from meshwright.meshes.boxes import closes, read_shares
from meshwright.meshes.rings import box_orders, groups_along, lay_rings, ring_in_words, ring_order

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


ONE_LINK = [
    ("v4:8x8x8", "dp=1,fsdp=1,tp=4,sp=128"),
    ("v4:8x8x8", "dp=1,fsdp=8,tp=16,sp=4"),
    ("v4:8x8x8", "dp=1,fsdp=1,tp=16,sp=32"),
    ("v5e:2x4", "sp=8"),
    ("v5e:2x4", "dp=2,sp=4"),
    ("v5e:4x4", "sp=16"),
    ("v5e:4x4", "tp=2,sp=8"),
    ("v5p:4x4x4", "sp=64"),
    ("v5p:4x4x4", "fsdp=4,sp=16"),
    ("v5p:4x4x4", "fsdp=8,sp=8"),
    ("v5p:4x4x4", "fsdp=16,sp=4"),
    ("v5p:4x4x12", "tp=4,sp=48"),
    ("v6e:16x16", "fsdp=16,sp=16"),
    ("v6e:16x16", "sp=256"),
    ("v6e:16x16", "fsdp=4,sp=64"),
    ("v3:4x4", "sp=32"),
    ("v3:4x4", "fsdp=4,sp=8"),
    ("7x:4x4x4", "fsdp=4,sp=32"),
    ("2*v5e:4x4", "dp=2,fsdp=2,sp=8"),
]


@pytest.mark.parametrize(("machine", "text"), ONE_LINK)
def test_every_hop_is_one_link(machine: str, text: str) -> None:
    mesh = mw.mesh(text, machine=machine)
    axis = mesh.axis_names.index("sp")
    counted = hops(mesh.devices, axis, mesh.machine)
    assert max(map(max, counted)) == 1
    assert mesh.ring_hops("sp") == tuple(max(each) for each in zip(*counted, strict=True))


def test_the_two_cores_of_a_chip_follow_one_another() -> None:
    mesh = mw.mesh("sp=32", machine="v3:4x4")
    assert mesh.ring_hops("sp").count(0) == 16


def test_a_row_of_two_core_chips_is_walked_out_on_one_core_and_back_on_the_other() -> None:
    mesh = mw.mesh("sp=8", machine=Machine(CHIPS["v3"], (4, 1)))
    assert [place[0] for place in mesh.coords] == [0, 0, 1, 2, 3, 3, 2, 1]
    assert [place[3] for place in mesh.coords] in (
        [0, 1, 1, 1, 1, 0, 0, 0],
        [1, 0, 0, 0, 0, 1, 1, 1],
    )


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
def test_only_the_order_along_sp_changes_and_it_changes_alike_in_every_group(
    text: str, data: st.DataObject
) -> None:
    mesh = random_mesh(text, data)
    axis = mesh.axis_names.index("sp")
    before = np.moveaxis(jax_order(mesh), axis, 0)
    after = np.moveaxis(mesh.devices, axis, 0)
    assert {d.id for d in after.flat} == set(range(mesh.size))
    if len(after) <= 2:
        assert (before == after).all()
        return
    if mesh.axis_extent("sp") != dataclasses.replace(mesh, devices=jax_order(mesh)).axis_extent(
        "sp"
    ):
        assert max(mesh.ring_hops("sp")) == 1  # sp got another box, for a ring that closes
        return
    groups = [{d.id for d in layer.flat} for layer in before]
    order = [groups.index({d.id for d in layer.flat}) for layer in after]
    assert (before[order] == after).all()
    assert order[0] == 0


@given(st.sampled_from(SLICES), st.data())
def test_no_mesh_has_more_long_hops_than_in_jaxs_order(text: str, data: st.DataObject) -> None:
    mesh = random_mesh(text, data)
    axis = mesh.axis_names.index("sp")
    if not mesh.ring_hops("sp"):
        return

    def long(devices: np.ndarray) -> int:
        return sum(n > 1 for group in hops(devices, axis, mesh.machine) for n in group)

    assert long(mesh.devices) <= long(jax_order(mesh))
    if axis == 3:
        assert list(box_orders(groups_along(mesh.devices, axis)[:, 0]))  # of the last axis, a box


@given(st.tuples(*[st.integers(1, 6)] * 3), st.sampled_from(["v5p", "v3", "v5e"]))
def test_a_whole_slice_is_a_ring_wherever_a_grid_has_one(
    shape: tuple[int, int, int], chip: str
) -> None:
    sides = shape if chip == "v5p" else shape[:2]
    machine = Machine(CHIPS[chip], sides)
    size = machine.num_devices
    if size <= 2:
        return
    mesh = mw.mesh(f"sp={size}", machine=machine)
    long = [n for n in mesh.ring_hops("sp") if n > 1]
    dims = [n for n in sides if n > 1]
    rows_close = machine.chip.cores_per_chip > 1 or machine.wraps[0]
    if rows_close or (len(dims) > 1 and size % 2 == 0):
        assert not long
    else:  # a grid is coloured like a chessboard: an odd number cannot alternate, a row must return
        assert len(long) == 1
    assert hops(mesh.devices, 0, machine)[0] == list(mesh.ring_hops("sp"))


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("7x:2x2x2", (4, 4)), ("7x:2x2x4", (8, 4)), ("v5e:2x4", (4, 2)), ("v5e:4x4", (8, 2)), ("v5e:4x4", (4, 4)), ("v5p:2x2x4", (4, 2, 2)), ("v5p:3x2x2", (6, 2)),
     ("v5e:1x7", (7, 1)), ("v3:4x1", (4, 2)), ("v5p:4x4x4", (4, 2, 8)), ("v5p:2x4x2", (8, 2))],
)  # fmt: skip
def test_no_order_has_fewer_long_hops(text: str, sizes: tuple[int, ...]) -> None:
    machine = box(text)
    placed = arrange(sizes, machine.devices)  # sp first: its places are a stride apart
    chosen = placed[ring_order(groups_along(placed, 0), machine)]
    group = placed.reshape(sizes[0], -1)[:, 0]
    apart = [[links_between(a.coords, b.coords, machine) > 1 for b in group] for a in group]
    fewest = min(
        sum(apart[a][b] for a, b in itertools.pairwise((0, *order, 0)))
        for order in itertools.permutations(range(1, sizes[0]))
    )
    assert sum(n > 1 for n in hops(chosen, 0, machine)[0]) == fewest


def test_a_row_that_cannot_close_keeps_jaxs_order_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="meshwright"):
        mesh = mw.mesh("fsdp=4,sp=4", machine="v5e:4x4")
    assert (mesh.devices == jax_order(mesh)).all()
    assert mesh.ring_hops("sp") == (1, 1, 1, 3)
    assert "mesh axis sp on 'v5e:4x4': ring of 4, 1 of 4 hops takes 3 links" in caplog.text


def strides(devices: np.ndarray, axis: int, machine: Machine) -> dict[int, int]:
    """Along each torus dim an axis covers, how far apart its neighbours are."""
    line = np.moveaxis(devices, axis, 0).reshape(devices.shape[axis], -1)[:, 0]
    values = {dim: sorted({device.coords[dim] for device in line}) for dim in range(3)}
    return {dim: each[1] - each[0] for dim, each in values.items() if len(each) > 1}


def test_sp_gets_a_square_where_a_row_would_not_close_and_no_axis_pays() -> None:
    mesh = mw.mesh("dp=1,fsdp=8,tp=16,sp=4", machine="v4:8x8x8")
    before = jax_order(mesh)
    assert strides(before, 3, mesh.machine) == {0: 1}
    assert mesh.axis_extent("sp") == {"x": 2, "y": 2}
    # fsdp is where it was; of tp's groups two share a link, on jax's mesh four do
    assert strides(mesh.devices, 1, mesh.machine) == strides(before, 1, mesh.machine) == {2: 1}
    assert strides(before, 2, mesh.machine) == {0: 4, 1: 1}
    assert strides(mesh.devices, 2, mesh.machine) == {0: 2, 1: 2}


@given(st.sampled_from(["v4:8x8x8", "v5p:4x8x8", "v5p:4x4x16", "v6e:16x16"]), st.data())
def test_a_box_is_exchanged_only_for_a_ring_that_closes(text: str, data: st.DataObject) -> None:
    mesh = random_mesh(text, data)
    before = dataclasses.replace(mesh, devices=jax_order(mesh))
    moved = [a for a in AXES if mesh.axis_extent(a) != before.axis_extent(a)]
    if not moved:
        return
    axis = mesh.axis_names.index("sp")
    assert max(map(max, hops(mesh.devices, axis, mesh.machine))) == 1
    for other in set(moved) - {"sp"}:
        index = mesh.axis_names.index(other)
        now = strides(mesh.devices, index, mesh.machine).values()
        # two groups that go round a dim share it as one does that goes to and fro on part of it
        assert max(now) <= max(2, *strides(before.devices, index, mesh.machine).values())
        whole = {"xyz"[d]: n for d, n in enumerate(mesh.machine.slice_shape[:3])}
        kept = before.axis_extent(other).items()
        assert any(whole[dim] != n for dim, n in kept), "an axis on whole dims is never moved"


@given(st.sampled_from(SLICES[:-2]), st.data())
def test_what_is_said_to_close_closes(text: str, data: st.DataObject) -> None:
    mesh = random_mesh(text, data)
    axis = mesh.axis_names.index("sp")
    shares = read_shares(jax_order(mesh), mesh.machine)
    if shares is None or not mesh.ring_hops("sp"):
        return
    assert tuple(map(math.prod, shares)) == mesh.axis_sizes
    placed = jax_order(mesh)
    closed = np.take(placed, ring_order(groups_along(placed, axis), mesh.machine), axis=axis)
    longest = max(map(max, hops(closed, axis, mesh.machine)))
    assert closes(shares, axis, mesh.machine) == (longest <= 1)


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
def test_meshes_without_a_ring_on_a_torus_keep_jaxs_order(machine: str, text: str) -> None:
    mesh = mw.mesh(text, machine=machine)
    assert (mesh.devices == jax_order(mesh)).all()
    if "sp" in mesh.axis_names:
        assert mesh.ring_hops("sp") == ()


def test_an_exclamation_mark_keeps_the_order_listed() -> None:
    mesh = mw.mesh("!sp=8", machine="v5e:2x4")
    assert [d.id for d in mesh.devices] == [d.id for d in mesh.machine.devices]


def test_other_axes_can_be_rings() -> None:
    machine = Machine.parse("v5p:4x4x4")
    placed = arrange((16, 4), machine.devices)
    ringed = lay_rings(placed, ("cp", "tp"), machine, ring_axes=("cp",))
    assert max(map(max, hops(ringed, 0, machine))) == 1
    assert max(map(max, hops(placed, 0, machine))) > 1


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
