"""Meshes over devices that are here and over machines that are not."""

import dataclasses
import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import mesh_utils
from jax.sharding import AxisType

import meshwright as mw
from meshwright import CHIPS, Machine, MeshwrightError
from meshwright.meshes.arrange import arrange, axes_across_slices


def ids(mesh: jax.sharding.Mesh) -> np.ndarray:
    return np.vectorize(lambda device: device.id)(mesh.devices)


def test_the_order_written_is_the_order_of_the_axes(eight: list[jax.Device]) -> None:
    mesh = mw.mesh("mp:2,fsdp:-1,dp:1", devices=eight)
    assert mesh.axis_names == ("mp", "fsdp", "dp")
    # mp is the slowest axis: its groups are {0, 4}, {1, 5} …
    assert ids(mesh)[:, :, 0].T.tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_axes_of_size_one_stay(eight: list[jax.Device]) -> None:
    assert dict(mw.mesh("1,-1,4,1", devices=eight).shape) == {"dp": 1, "fsdp": 2, "tp": 4, "sp": 1}


def test_all_devices_are_taken_by_default() -> None:
    assert mw.mesh("dp=-1").size == len(jax.devices())


def test_axis_types_can_be_explicit(eight: list[jax.Device]) -> None:
    assert mw.mesh("dp=8", devices=eight).axis_types == (AxisType.Auto,)
    explicit = mw.mesh("dp=8", devices=eight, axis_types="explicit")
    assert explicit.axis_types == (AxisType.Explicit,)
    with pytest.raises(MeshwrightError, match="'auto', 'explicit'"):
        mw.mesh("dp=8", devices=eight, axis_types="manual")  # type: ignore[call-overload]


SLICES = ["v3:2x2", "v4:2x2x4", "v5e:4x4", "v5e:2x4", "v5p:4x4x8", "v5p:2x2x2", "v6e:4x8",
          "7x:2x2x2", "7x:4x4x4", "v5p:4x4x12"]  # fmt: skip


@given(st.sampled_from(SLICES), st.data())
def test_no_mesh_that_fits_the_device_count_is_refused(text: str, data: st.DataObject) -> None:
    machine = Machine.parse(text)
    sizes = random_sizes(data, machine.num_devices)
    spec = ",".join(f"a{i}={size}" for i, size in enumerate(sizes))
    mesh = mw.mesh(spec, machine=machine, axes=[f"a{i}" for i in range(len(sizes))])
    assert mesh.axis_sizes == tuple(sizes)
    assert {d.id for d in mesh.devices.flat} == set(range(machine.num_devices))


def random_sizes(data: st.DataObject, number: int) -> list[int]:
    """A random way to write `number` as a product of up to four sizes."""
    sizes = [1, 1, 1, 1]
    while number > 1:
        prime = next(p for p in range(2, number + 1) if number % p == 0)
        sizes[data.draw(st.integers(0, 3))] *= prime
        number //= prime
    return sizes


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("v5p:4x4x8", (4, 4, 8)), ("v5p:4x4x8", (16, 8)), ("v4:4x4x4", (64, 1)), ("v5e:16x16", (16, 16)),
     ("v3:2x2", (4, 2)), ("v5e:2x4", (2, 4)), ("7x:4x4x4", (8, 16))],
)  # fmt: skip
def test_where_jax_finds_an_order_without_splitting_ours_is_the_same(
    text: str, sizes: tuple[int, ...]
) -> None:
    devices = Machine.parse(text).devices
    assert (arrange(sizes, devices) == mesh_utils.create_device_mesh(sizes, devices)).all()


def test_a_mesh_that_jax_refuses_without_splitting_is_laid_out() -> None:
    machine = Machine.parse("v5p:4x4x8")
    with pytest.raises(NotImplementedError):
        mesh_utils.create_device_mesh((2, 64, 1), machine.devices)
    mesh = mw.mesh("2,64,1", machine=machine)
    assert mesh.shape == {"dp": 2, "fsdp": 64, "tp": 1}
    assert math.prod(mesh.axis_extent("fsdp").values()) == 64


def test_the_last_axis_gets_neighbours() -> None:
    mesh = mw.mesh("fsdp=32,tp=4", machine="v5p:4x4x8")
    for line in mesh.coords.reshape(-1, 4):
        steps = [sum(map(abs, np.subtract(a, b))) for a, b in itertools.pairwise(line)]
        assert steps == [1, 1, 1]


def test_an_exclamation_mark_ignores_the_topology() -> None:
    machine = Machine.parse("v5e:4x4")
    plain = mw.mesh("!fsdp=4,tp=4", machine=machine)
    assert [d.id for d in plain.devices.flat] == [d.id for d in machine.devices]
    assert [d.id for d in mw.mesh("fsdp=4,tp=4", machine=machine).devices.flat] != [
        d.id for d in machine.devices
    ]


@pytest.mark.parametrize(
    ("sizes", "slices", "across"),
    [([2, 256], 2, [2, 1]), ([1, 512], 2, [1, 2]), ([2, 128, 4], 4, [2, 2, 1]), ([3, 8], 4, [1, 4]),
     ([6, 4], 4, [2, 2])],
)  # fmt: skip
def test_slices_join_along_the_first_axes_that_can_hold_them(
    sizes: list[int], slices: int, across: list[int]
) -> None:
    assert axes_across_slices(sizes, slices) == across


def test_only_the_first_axis_crosses_slices_and_the_others_stay_inside() -> None:
    mesh = mw.mesh("dp=2,fsdp=32,tp=4", machine="2*v5e:8x16")
    slice_index = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    assert (slice_index[0] == 0).all()
    assert (slice_index[1] == 1).all()
    assert "slice" in mesh.axis_extent("dp")
    assert "slice" not in mesh.axis_extent("fsdp") | mesh.axis_extent("tp")


def test_gpus_keep_the_last_axis_inside_a_host() -> None:
    mesh = mw.mesh("fsdp=16,tp=8", machine="h100:16x8")
    assert mesh.axis_extent("tp") == {"gpu": 8}
    assert mesh.axis_extent("fsdp") == {"host": 16}
    assert mesh.coords[3][5] == (3, 5)


def test_real_devices_can_be_laid_out_as_an_absent_machine(eight: list[jax.Device]) -> None:
    planned = mw.mesh("fsdp=2,tp=4", machine="v5e:2x4")
    mesh = mw.mesh("fsdp=2,tp=4", machine="v5e:2x4", devices=eight)
    listed = {d.id: i for i, d in enumerate(planned.machine.devices)}
    expected = [listed[d.id] for d in planned.devices.flat]
    assert ids(mesh).ravel().tolist() == expected


def test_tpu_devices_are_matched_by_their_coordinates() -> None:
    planned = mw.mesh("fsdp=4,tp=4", machine="v5e:4x4")
    shuffled = list(reversed(planned.machine.devices))
    mesh = planned.to_jax(shuffled)
    assert [d.coords for d in mesh.devices.flat] == [d.coords for d in planned.devices.flat]
    with pytest.raises(MeshwrightError, match="they are v5e:2x8"):
        planned.to_jax(Machine(CHIPS["v5e"], (2, 8)).devices)


@pytest.mark.parametrize("text", ["v5p:2x2x2", "v5e:2x4", "v6e:2x4", "v3:4x4", "2*v5e:4x4"])
def test_the_mesh_planned_is_the_mesh_built_whatever_the_chip_is_called(text: str) -> None:
    machine = Machine.parse(text)
    planned = mw.mesh("fsdp=-1,tp=4", machine=machine)
    for kind in machine.chip.device_kinds:
        real = [dataclasses.replace(d, device_kind=kind) for d in machine.devices]
        built = mw.mesh("fsdp=-1,tp=4", devices=real)
        assert [d.id for d in built.devices.flat] == [d.id for d in planned.devices.flat]


def test_a_machine_mesh_keeps_its_axis_types(eight: list[jax.Device]) -> None:
    planned = mw.mesh("fsdp=2,tp=4", machine="v5e:2x4", axis_types="explicit")
    assert planned.to_jax(eight).axis_types == (AxisType.Explicit,) * 2
    assert planned.abstract_mesh.axis_types == (AxisType.Explicit,) * 2


def test_devices_that_leave_a_hole_still_make_a_mesh(caplog: pytest.LogCaptureFixture) -> None:
    devices = Machine.parse("v5p:2x2x2").devices[:6]
    assert arrange((3, 2), devices).shape == (3, 2)
    assert "no topology-aware order" in caplog.text


def test_too_few_devices_for_the_machine_are_refused(eight: list[jax.Device]) -> None:
    with pytest.raises(MeshwrightError, match="'v5e:4x4' has 16 devices, 8 were given"):
        mw.mesh("fsdp=16", machine="v5e:4x4", devices=eight)


def test_a_machine_that_does_not_fit_is_named() -> None:
    with pytest.raises(MeshwrightError, match=r"needs 8 devices, 16 are in 'v5e:4x4'"):
        mw.mesh("fsdp=8", machine="v5e:4x4")


def test_asking_for_an_axis_that_is_not_there_says_which_are() -> None:
    with pytest.raises(MeshwrightError, match="'pp' is not one of fsdp, tp"):
        mw.mesh("fsdp=4,tp=4", machine="v5e:4x4").axis_extent("pp")


def test_several_slices_are_joined_as_jax_joins_them() -> None:
    machine = Machine.parse("4*v5e:4x4")
    for sizes, across in [((4, 16), (4, 1)), ((2, 32), (2, 2)), ((8, 2, 4), (4, 1, 1))]:
        within = [size // factor for size, factor in zip(sizes, across, strict=True)]
        expected = mesh_utils.create_hybrid_device_mesh(
            within, across, machine.devices, allow_split_physical_axes=True
        )
        assert (arrange(sizes, machine.devices) == expected).all()
        plain = np.asarray(machine.devices, dtype=object).reshape(sizes)
        assert (arrange(sizes, machine.devices) != plain).any()


def test_gpus_of_several_hosts_are_one_machine_whatever_their_slice_index() -> None:
    machine = Machine.parse("h100:4x6")
    real = [dataclasses.replace(d, slice_index=d.process_index) for d in machine.devices]
    assert Machine.of_devices(real) == machine
    built = mw.mesh("dp=6,tp=4", devices=real)
    planned = mw.mesh("dp=6,tp=4", machine=machine)
    assert [d.id for d in built.devices.flat] == [d.id for d in planned.devices.flat]


def test_a_box_away_from_the_origin_is_a_machine_too() -> None:
    whole = Machine.parse("v5p:4x4x4").devices
    corner = [d for d in whole if all(c >= 2 for c in d.coords)]
    mesh = mw.mesh("fsdp=2,tp=4", devices=corner)
    twin = mw.mesh("fsdp=2,tp=4", machine="v5p:2x2x2")
    moved = [tuple(c - 2 for c in d.coords) for d in mesh.devices.flat]
    assert moved == [d.coords for d in twin.devices.flat]


def test_a_part_of_a_mesh_is_along_the_axes_named() -> None:
    mesh = mw.mesh("dp=2,fsdp=2,tp=2", machine="h100:8")
    assert [device.id for device in mesh["dp"].devices] == [0, 4]
    assert [device.id for device in mesh["tp"].devices] == [0, 1]
    both = mesh["tp", "dp"]
    assert both.shape == {"tp": 2, "dp": 2}
    assert [[device.id for device in line] for line in both.devices] == [[0, 4], [1, 5]]
    with pytest.raises(mw.MeshwrightError, match="'pd' is not one of dp, fsdp, tp; did you mean"):
        mesh["pd"]
