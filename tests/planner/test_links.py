"""Where axes lie without placing a device, against the mesh that places them; and how fast that is."""

import math
import random
from collections.abc import Mapping

import pytest

import meshwright as mw
from meshwright.arithmetic import divisors
from meshwright.machines import Machine
from meshwright.meshes import STANDARD_AXES
from meshwright.planner.links import Link, over, place_axes
from meshwright.present import mesh_text

MACHINES = [
    "v4:4x4x4", "v4:2x4x4", "v5p:4x4x8", "v5e:4x8", "v6e:8x16", "v5e:16x16", "2*v5e:4x8",
    "2*v5p:4x4x4", "7x:4x4x4", "v5p:2x2x4", "h100:4x8", "h200:8", "cpu:8",
]  # fmt: skip


def meshes_of(machine: Machine, many: int) -> list[dict[str, int]]:
    n = machine.num_devices
    sizes = [
        (dp, fsdp, tp, n // (dp * fsdp * tp))
        for dp in divisors(n)
        for fsdp in divisors(n // dp)
        for tp in divisors(n // (dp * fsdp))
    ]
    chosen = random.Random(str(machine)).sample(sizes, min(many, len(sizes)))
    return [dict(zip(STANDARD_AXES, one, strict=True)) for one in chosen]


def placed(machine: Machine, sizes: Mapping[str, int]) -> mw.MachineMesh:
    return mw.mesh(mesh_text(sizes), machine=machine)


@pytest.mark.parametrize("text", MACHINES)
def test_each_axis_reaches_as_far_as_on_the_mesh_itself(text: str) -> None:
    machine = Machine.parse(text)
    for sizes in meshes_of(machine, 6):
        mesh, laid = placed(machine, sizes), place_axes(machine, sizes)
        for axis, share, slices in zip(laid.axes, laid.shares, laid.across, strict=True):
            reach = dict(zip(machine.grid_names, share, strict=True)) | {"slice": slices}
            found = {name: extent for name, extent in reach.items() if extent > 1}
            assert found == mesh.axis_extent(axis), (sizes, axis)


@pytest.mark.parametrize("text", ["v5p:4x4x4", "v5e:8x8", "h100:8x8", "2*v5e:4x8"])
def test_experts_and_stages_are_axes_like_the_others(text: str) -> None:
    machine = Machine.parse(text)
    sizes = {"pp": 2, "fsdp": 4, "ep": 4, "tp": 2}
    mesh, laid = placed(machine, sizes), place_axes(machine, sizes)
    for axis, share, slices in zip(laid.axes, laid.shares, laid.across, strict=True):
        reach = dict(zip(machine.grid_names, share, strict=True)) | {"slice": slices}
        assert {name: n for name, n in reach.items() if n > 1} == mesh.axis_extent(axis)
    assert over(laid, ("ep",)).devices == 4
    assert over(laid, ("pp", "ep")).devices == 8


def link(text: str, sizes: tuple[int, ...], *axes: str) -> Link:
    named = dict(zip(STANDARD_AXES, sizes, strict=True))
    return over(place_axes(Machine.parse(text), named), axes)


@pytest.mark.parametrize(
    ("text", "sizes", "axes", "gigabytes", "words"),
    [
        # v5p: 90 GB/s a link; two whole closed dims, both ways
        ("v5p:4x4x8", (1, 16, 8, 1), ("fsdp",), 360, "ICI x4+y4, closed"),
        ("v5p:4x4x8", (1, 16, 8, 1), ("tp",), 180, "ICI z8, closed"),
        # a quarter of a ring of v5e is a line; fsdp's four places along it are four links apart
        ("v5e:16x16", (1, 64, 4, 1), ("tp",), 45, "ICI x4, open"),
        ("v5e:16x16", (1, 64, 4, 1), ("fsdp",), 90 + 2 * 45 / 4, "ICI x4+y16, closed"),
        # not a pod: no links back
        ("v5e:8x8", (1, 8, 8, 1), ("tp",), 45, "ICI x8, open"),
        # both axes together are the whole torus
        ("v4:8x8x8", (1, 8, 16, 4), ("fsdp", "tp", "sp"), 270, "ICI x8+y8+z8, closed"),
        # 18 links of 25 GB/s; 400 GB/s of a host shared by its 8 groups, or one group's alone
        ("h100:16x8", (1, 16, 8, 1), ("tp",), 450, "NVLink of 8"),
        ("h100:16x8", (1, 16, 8, 1), ("fsdp",), 50, "host network, 16 hosts"),
        ("h100:16x8", (1, 128, 1, 1), ("fsdp",), 400, "host network, 16 hosts x 8 by NVLink"),
        # 25 GB/s of a host of four chips
        ("2*v5p:4x4x4", (2, 64, 1, 1), ("dp",), 6.25, "data-center network, 2 slices"),
    ],
)
def test_bandwidth_is_that_of_the_links(
    text: str, sizes: tuple[int, ...], axes: tuple[str, ...], gigabytes: float, words: str
) -> None:
    found = link(text, sizes, *axes)
    assert found.bandwidth == pytest.approx(gigabytes * 1e9)
    assert found.words == words
    assert found.devices == math.prod(sizes[STANDARD_AXES.index(axis)] for axis in axes)


def test_an_all_reduce_takes_twice_a_gather_and_a_small_message_only_latency() -> None:
    tp = link("v5p:4x4x8", (1, 16, 8, 1), "tp")
    assert tp.seconds("all-reduce", 1e9) == pytest.approx(2 * tp.seconds("all-gather", 1e9))
    assert tp.seconds("all-gather", 1e9) == pytest.approx(1e9 * 7 / 8 / (180e9 * 0.85), rel=0.01)
    assert tp.seconds("all-gather", 8) == pytest.approx(tp.latency, rel=0.01)
    # a hop goes one way only
    hop = tp.seconds("collective-permute", 1e9)
    assert hop == pytest.approx(1e9 / (90e9 * 0.85), rel=0.01)


def test_a_sum_over_slices_crosses_their_network_with_a_devices_part_only() -> None:
    sizes, size = (8, 16, 1, 1), 1e9
    dp = link("2*v5e:8x8", sizes, "dp")
    inside = link("v5e:8x8", (4, 16, 1, 1), "dp")
    # a v5e chip has a quarter of its host's 12.5 GB/s; two slices exchange half of a quarter each
    between = 2 * (size / 4) * (1 / 2) / (3.125e9 * 0.70)
    within = inside.seconds("reduce-scatter", size) + inside.seconds("all-gather", size)
    assert dp.devices == 8
    assert dp.seconds("all-reduce", size) == pytest.approx(between + within, rel=0.01)
    assert dp.seconds("all-gather", size) == pytest.approx((between + within) / 2, rel=0.01)


def test_four_thousand_chips_take_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "devices", property(lambda _: pytest.fail("devices were made")))
    machine = Machine.parse("v5p:16x16x16")
    for sizes in meshes_of(machine, 100):
        assert over(place_axes(machine, sizes), STANDARD_AXES).devices == 4096
