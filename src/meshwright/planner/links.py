"""What the devices along mesh axes are connected by, and how fast that is.

>>> from meshwright.machines import Machine
>>> from meshwright.planner.shares import place_axes
>>> link = over(place_axes(Machine.parse("v5p:4x4x8"), (1, 16, 8, 1)), ("fsdp",))
>>> link.words, link.bandwidth / 1e9
('ICI x4+y4, closed', 360.0)

Bandwidth is of one device, in bytes a second, for ring collectives: a device's share of a gather
over n devices, (n-1)/n of the whole, divided by it, is the time. On a torus every dim that the
axes cover carries a part, in both directions where its links close into a ring. A part of a dim is
a line: what goes round it must come back over the same links. Groups that lie a stride apart share
their links.
"""

import dataclasses
import math

from meshwright.machines import Machine
from meshwright.planner import efficiency
from meshwright.planner.shares import AXES, Placement


@dataclasses.dataclass(frozen=True)
class Link:
    words: str
    network: str  # ICI, NVLink, PCIe, host network, data-center network
    devices: int
    bandwidth: float  # of a device, in collectives that use all links
    neighbour: float  # of a device, from each to the next of a ring
    usable: float  # of those, what large messages get
    latency: float  # seconds of one collective of no bytes
    hop: float  # seconds of one hop of no bytes
    crossing: float = 1.0  # all to all: how often a byte goes over a link, for one sent
    stages: "tuple[Link, Link] | None" = None  # within a slice, and between slices

    def seconds(self, operation: str, size: float) -> float:
        """Of one collective of `size` bytes: of the whole array, as Transfer.bytes counts."""
        n = self.devices
        if self.stages is not None and operation in WITHIN_SLICES:
            within, between = self.stages
            before, after = WITHIN_SLICES[operation]
            part = between.seconds(operation, size / within.devices)
            return part + sum(within.seconds(each, size) for each in (*before, *after))
        if operation == "collective-permute":
            return self.hop + size / (self.neighbour * self.usable)
        wire = size * (n - 1) / n
        if operation == "all-reduce":
            return 2 * self.latency + 2 * wire / (self.bandwidth * self.usable)
        if operation == "all-to-all":
            wire *= self.crossing
        return self.latency + wire / (self.bandwidth * self.usable)


# of a collective over several slices, what is done within them before and after; between them each
# device does the operation with its part
WITHIN_SLICES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "all-reduce": (("reduce-scatter",), ("all-gather",)),
    "all-gather": ((), ("all-gather",)),
    "reduce-scatter": (("reduce-scatter",), ()),
}


def over(laid: Placement, axes: tuple[str, ...]) -> Link:
    """The link between the devices along these axes together."""
    found: Link | None = laid.links.get(axes)
    if found is None:
        found = laid.links[axes] = _over(laid, tuple(AXES.index(axis) for axis in axes))
    return found


def _over(laid: Placement, axes: tuple[int, ...]) -> Link:
    far = math.prod(laid.across[axis] for axis in axes)
    near = _on_torus(laid, axes) if laid.machine.is_tpu else _on_hosts(laid, axes)
    return near if far == 1 else _across_slices(near, far, laid.machine)


def _on_torus(laid: Placement, axes: tuple[int, ...]) -> Link:
    machine, shares = laid.machine, laid.shares
    *sides, _ = machine.slice_shape
    one = machine.chip.link_bandwidth
    bandwidth = neighbour = 0.0
    hops, longest = 0, 1
    words, closed = [], True
    for dim, (side, wraps) in enumerate(zip(sides, machine.wraps, strict=True)):
        extent = math.prod(shares[axis][dim] for axis in axes)
        if extent == 1:
            continue
        last = max(axis for axis in axes if shares[axis][dim] > 1)
        # places of other axes that lie between: their groups use the same links
        apart = math.prod(shares[other][dim] for other in range(last + 1, len(shares)))
        first = min(axis for axis in axes if shares[axis][dim] > 1)
        between = [other for other in range(first, last) if other not in axes]
        apart *= math.prod(shares[other][dim] for other in between)
        reach = extent * apart
        round_about = wraps and reach == side and side > 2
        bandwidth += (2 if round_about else 1) * one / apart
        neighbour = max(neighbour, one / apart)
        longest = max(longest, extent)
        hops += reach // 2 if round_about else reach - apart
        words.append(f"{machine.grid_names[dim]}{extent}")
        closed = closed and round_about
    cores = math.prod(shares[axis][3] for axis in axes)
    devices = math.prod(math.prod(shares[axis]) for axis in axes)
    if not words:  # between the cores of a chip: through its memory
        between_cores = machine.chip.memory_bandwidth / machine.chip.cores_per_chip / 2
        return _link("cores of a chip", "ICI", devices, between_cores, between_cores, 0, machine)
    # a chip's links serve all its cores: those outside the group send as much themselves
    shared = machine.chip.cores_per_chip // cores
    name = f"ICI {'+'.join(words)}, {'closed' if closed else 'open'}"
    link = _link(name, "ICI", devices, bandwidth / shared, neighbour / shared, hops, machine)
    # all to all, a byte goes a quarter of the way round on average
    return dataclasses.replace(link, crossing=max(1.0, longest / 4 * devices / (devices - 1)))


def _on_hosts(laid: Placement, axes: tuple[int, ...]) -> Link:
    machine = laid.machine
    chip = machine.chip
    hosts = math.prod(laid.shares[axis][0] for axis in axes)
    inside = math.prod(laid.shares[axis][1] for axis in axes)
    fast = chip.link_bandwidth * chip.links
    name = "NVLink" if chip.links > 1 else "PCIe" if chip.platform == "gpu" else "memory"
    devices = hosts * inside
    if hosts == 1:
        return _link(f"{name} of {inside}", name, devices, fast, fast, 1, machine)
    # every group of a host sends through the host's network
    network = _host_network(machine) * inside / machine.grid[1]
    words = f"host network, {hosts} hosts" + (f" x {inside} by {name}" if inside > 1 else "")
    slow = min(fast, network)
    link = _link(words, "host network", devices, slow, slow, hosts - 1, machine)
    return dataclasses.replace(link, usable=efficiency.host_network(chip, hosts))


def _across_slices(near: Link, far: int, machine: Machine) -> Link:
    """What lies in one slice sends through all its hosts at once, each device its part."""
    chip = machine.chip
    per_device = _host_network(machine) / chip.chips_per_host / chip.cores_per_chip
    latency = efficiency.START_TPU + (far - 1) * efficiency.HOP_DATA_CENTER
    between = Link(
        words=f"data-center network, {far} slices",
        network="data-center network",
        devices=far,
        bandwidth=per_device,
        neighbour=per_device,
        usable=efficiency.DATA_CENTER,
        latency=latency,
        hop=efficiency.START_TPU + efficiency.HOP_DATA_CENTER,
    )
    if near.devices == 1:
        return between
    together = min(per_device * near.devices, near.bandwidth * near.usable / between.usable)
    return dataclasses.replace(
        between,
        words=f"{between.words} x {near.devices} by {near.words}",
        devices=near.devices * far,
        bandwidth=together,
        neighbour=together,
        latency=near.latency + latency,
        hop=near.hop + efficiency.HOP_DATA_CENTER,
        stages=(near, between),
    )


def _host_network(machine: Machine) -> float:
    return machine.chip.host_network_bandwidth or efficiency.UNKNOWN_HOST_NETWORK


def _link(
    words: str, network: str, devices: int, bandwidth: float, neighbour: float, hops: int,
    machine: Machine,
) -> Link:  # fmt: skip
    if machine.is_tpu:
        usable, start, each = efficiency.ICI, efficiency.START_TPU, efficiency.HOP_TPU
    else:
        start, each, usable = efficiency.START_GPU, efficiency.HOP_GPU, efficiency.NVLINK
        if network == "host network":
            each = efficiency.HOP_HOST_NETWORK
            hops = max(1, hops.bit_length())  # trees between hosts
    return Link(
        words, network, devices, bandwidth, neighbour, usable, start + hops * each, start + each
    )
