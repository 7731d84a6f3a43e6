"""Device order: the device at each position of a logical mesh.

It treats real jax devices and abstract devices of an absent machine alike, so a mesh planned for an
absent machine is the mesh that machine will build.
"""

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshwright.arithmetic import first_repeated
from meshwright.errors import MeshwrightError
from meshwright.machines import slice_of

logger = logging.getLogger("meshwright")


def arrange(sizes: Sequence[int], devices: Sequence[Any], plain: bool = False) -> np.ndarray:
    """`devices` as an object array of shape `sizes`; sizes must multiply to len(devices).

    `plain`: row-major, as listed. Otherwise the last axes get the nearest neighbours: logical axes
    are mapped to physical torus dims, splitting a physical dim where no complete one fits, and
    slices are joined along the first axes that can hold them.
    """
    assert math.prod(sizes) == len(devices), (sizes, len(devices))
    if plain or devices[0].platform != "tpu":
        on_gpu = devices[0].platform == "gpu"  # whose order of jax is not that of the network
        ordered = sorted(devices, key=lambda d: d.id) if on_gpu and not plain else devices
        return np.asarray(ordered, dtype=object).reshape(sizes)
    from meshwright.meshes.jax_mesh import torus_order

    slices = {slice_of(device) for device in devices}
    across = axes_across_slices(sizes, len(slices))
    within = [size // factor for size, factor in zip(sizes, across, strict=True)]
    try:
        return torus_order(within, across, devices)
    except (AssertionError, NotImplementedError, ValueError) as reason:
        # e.g. devices that do not fill a box, so there is no torus
        logger.warning(
            "no topology-aware order for mesh sizes %s: using the order listed (%s)",
            tuple(sizes),
            str(reason).split("\n")[0][:200],
        )
        return np.asarray(devices, dtype=object).reshape(sizes)


def axes_across_slices(sizes: Sequence[int], slices: int) -> list[int]:
    """The part of each axis that crosses slices (the slower network): the first axes that can.

    >>> axes_across_slices([2, 128, 4], 4)
    [2, 2, 1]
    """
    across = []
    for size in sizes:
        factor = math.gcd(size, slices)
        across.append(factor)
        slices //= factor
    assert slices == 1, "slices divide the product of the sizes, so the factors use them up"
    return across


def device_list(devices: Any) -> list[Any]:
    """The devices of a list or an array of them; each once."""
    flat = list(devices.flat) if isinstance(devices, np.ndarray) else devices
    try:
        flat = list(flat)
    except TypeError:
        flat = []
    if not flat or not all(hasattr(device, "device_kind") for device in flat):
        raise MeshwrightError(
            f"devices={devices!r} is not a list of devices; give some of jax.devices()"
        )
    twice = first_repeated(flat)
    if twice is not None:
        raise MeshwrightError(f"devices= contains {twice} twice; give each device once")
    return flat
