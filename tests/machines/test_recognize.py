"""Machines found from lists of devices."""

import dataclasses

import pytest

from meshwright import Machine, MeshwrightError


@pytest.mark.parametrize(
    "text", ["v3:4x4", "v4:2x2x4", "v5p:4x4x4", "v5e:4x8", "2*v6e:4x4", "7x:2x2x2", "h100:4x8"]
)
def test_the_devices_of_a_machine_are_found_to_be_that_machine(text: str) -> None:
    machine = Machine.parse(text)
    assert Machine.of_devices(machine.devices) == machine


def test_an_unknown_kind_is_named() -> None:
    device = dataclasses.replace(Machine.parse("h100:1").devices[0], device_kind="NVIDIA H101")
    with pytest.raises(
        MeshwrightError, match=r"'NVIDIA H101' is not in the catalogue.*did you mean"
    ):
        Machine.of_devices([device])


def test_devices_that_leave_a_hole_are_refused() -> None:
    with pytest.raises(MeshwrightError, match="do not fill the box"):
        Machine.of_devices(Machine.parse("v5p:2x2x2").devices[:7])


def test_devices_of_several_kinds_are_refused() -> None:
    mixed = [*Machine.parse("h100:2").devices, *Machine.parse("h200:2").devices]
    with pytest.raises(MeshwrightError, match="several kinds"):
        Machine.of_devices(mixed)


def test_no_devices_are_refused() -> None:
    with pytest.raises(MeshwrightError, match="at least one"):
        Machine.of_devices([])


def test_uneven_hosts_are_refused() -> None:
    with pytest.raises(MeshwrightError, match="different numbers of GPUs"):
        Machine.of_devices(Machine.parse("h100:2x8").devices[:12])
