"""Ring exchanges on a torus: how many links each hop along a mesh axis takes."""

from collections.abc import Sequence

import numpy as np

from meshwright.machines import Machine

RING_AXES = ("sp",)  # axes with ring exchanges


def ring_hops(devices: np.ndarray, index: int, machine: Machine) -> tuple[int, ...]:
    """Links from each position of a mesh axis to the next, and from the last to the first.

    `devices` has one dim for each mesh axis. Groups of the axis exchange at the same time, so each
    hop counts the most links of any group. Empty if the axis crosses slices.
    """
    groups = np.moveaxis(devices, index, 0).reshape(devices.shape[index], -1)
    slices = np.array([[device.slice_index for device in row] for row in groups])
    if (slices != slices[0]).any():
        return ()
    places = np.array([[device.position[:3] for device in row] for row in groups])
    distance = np.abs(places - np.roll(places, -1, axis=0))  # [position, group, (x, y, z)]
    around = np.array(machine.slice_shape[:3]) - distance
    links = np.where(machine.wraps, np.minimum(distance, around), distance).sum(axis=-1)
    return tuple(links.max(axis=1).tolist())


def ring_in_words(hops: Sequence[int]) -> str:
    """`"ring of 8, every hop one link"`, `"ring of 4, 1 of 4 hops takes 3 links"`."""
    long = [(hops.count(links), links) for links in sorted(set(hops)) if links > 1]
    if not long:
        inside = " or inside a chip" if 0 in hops else ""
        return f"ring of {len(hops)}, every hop one link{inside}"
    times, links = long[0]
    parts = [f"{times} of {len(hops)} hops {_takes(times)} {links} links"]
    parts += [f"{times} {_takes(times)} {links}" for times, links in long[1:]]
    return f"ring of {len(hops)}, {', '.join(parts)}"


def _takes(times: int) -> str:
    return "takes" if times == 1 else "take"
