"""Recognize the machine of a list of jax devices."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.machines.chips import CHIPS, Chip


def recognize(devices: Sequence[Any]) -> tuple[Chip, tuple[int, ...], int]:
    """The chip, the shape of a slice and the number of slices that `devices` make up."""
    try:
        devices = list(devices)
        kinds = sorted({device.device_kind for device in devices})
    except (TypeError, AttributeError):
        raise MeshwrightError(f"{devices!r} is not a list of jax devices") from None
    if not devices:
        raise MeshwrightError("no devices were given; a machine has at least one")
    if len(kinds) > 1:
        raise MeshwrightError(
            f"the devices are of several kinds ({', '.join(kinds)}); a machine has one: pass "
            "devices= of one kind"
        )
    chip = chip_of_kind(kinds[0], devices[0].platform)
    if chip.platform == "cpu":
        return chip, (len(devices),), 1
    if chip.platform == "gpu":
        # jax gives each group of linked GPUs its own slice_index; hosts are more useful
        hosts = Counter(device.process_index for device in devices)
        if len(set(hosts.values())) > 1:
            raise MeshwrightError(
                f"the hosts hold different numbers of GPUs ({dict(hosts)}); pass devices= with "
                "the same number from each"
            )
        return chip, (len(hosts), len(devices) // len(hosts)), 1
    slices = Counter(slice_of(device) for device in devices)
    if len(set(slices.values())) > 1:
        raise MeshwrightError(
            f"the slices have different numbers of devices ({dict(slices)}); a machine's slices "
            "are alike: pass devices= of equal slices"
        )
    first = [device for device in devices if slice_of(device) == min(slices)]
    coords = [tuple(device.coords) for device in first]
    box = tuple(max(c[i] for c in coords) - min(c[i] for c in coords) + 1 for i in range(3))
    if math.prod(box) * chip.cores_per_chip != len(first):
        raise MeshwrightError(
            f"{len(devices)} {chip.name} devices do not fill the box of their coordinates, "
            f"{'x'.join(map(str, box))} with {chip.cores_per_chip} devices a chip; pass devices= "
            "that do, or prefix the mesh with '!' to ignore the topology"
        )
    return chip, box[: chip.torus_dims], len(slices)


def slice_of(device: Any) -> int:
    """Which slice a device is in; 0 where the runtime knows no slices."""
    return getattr(device, "slice_index", None) or 0


def chip_of_kind(kind: str, platform: str) -> Chip:
    """The catalogue's chip for a jax `device_kind`."""
    if platform == "cpu":
        return CHIPS["cpu"]
    exact = [chip for chip in CHIPS.values() if kind in chip.device_kinds]
    if exact:
        return exact[0]
    raise MeshwrightError(
        f"device kind {kind!r} is not in the catalogue"
        f"{did_you_mean(kind, [k for chip in CHIPS.values() for k in chip.device_kinds])} "
        "Describe it yourself: mw.Machine(mw.Chip(...), shape)"
    )
