"""Which part of a machine each mesh axis gets, what connects the devices along axes, how fast.

>>> from meshwright.machines import Machine
>>> placement = place_axes(Machine.parse("v5p:4x4x8"), {"fsdp": 16, "tp": 8})
>>> placement.shares
((4, 4, 1, 1), (1, 1, 8, 1))
>>> link = over(placement, ("fsdp",))
>>> link.words, link.bandwidth / 1e9
('ICI x4+y4, closed', 360.0)

Bandwidth is of one device, in bytes a second, for ring collectives: a device's share of a gather
over n devices, (n-1)/n of the whole, divided by it, is the time. On a torus every dim that the
axes cover carries a part, in both directions where its links close into a ring. A part of a dim is
a line: what goes round it must come back over the same links. Groups that lie a stride apart share
their links.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping

from meshwright.arithmetic import divisors
from meshwright.machines import Machine
from meshwright.meshes import axes_across_slices
from meshwright.planner import efficiency

Share = tuple[int, ...]  # of one axis, along x, y, z and core, or host and GPU
Shares = tuple[Share, ...]  # one share an axis


@dataclasses.dataclass(frozen=True)
class Link:
    words: str
    network: str  # ICI, NVLink, Infinity Fabric, PCIe, host network, data-center network
    devices: int
    bandwidth: float  # of a device, in collectives that use all links
    neighbour: float  # of a device, from each to the next of a ring
    usable: float  # of those, what large messages get
    latency: float  # seconds of one collective of no bytes
    hop: float  # seconds of one hop of no bytes
    crossing: float = 1.0  # all to all: how often a byte goes over a link, for one sent
    stages: "tuple[Link, Link] | None" = None  # within a slice, and between slices

    def seconds(self, operation: str, size: float) -> float:
        """Of one collective of `size` bytes: of the whole array, as Collective.bytes counts."""
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


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """Axes on a machine: how each divides x, y, z and core (or host and GPU), and slices.

    There is one for each machine and sizes, so it is told from others by identity.
    """

    machine: Machine
    axes: tuple[str, ...]
    shares: Shares
    across: tuple[int, ...]  # of each axis, how many slices it spans
    links: dict[tuple[str, ...], Link] = dataclasses.field(default_factory=dict)  # found so far


def over(placement: Placement, axes: tuple[str, ...]) -> Link:
    """The link between the devices along these axes together."""
    if axes not in placement.links:
        numbers = tuple(placement.axes.index(axis) for axis in axes)
        far = math.prod(placement.across[axis] for axis in numbers)
        link = _on_torus if placement.machine.is_tpu else _on_hosts
        near = link(placement, numbers)
        placement.links[axes] = near if far == 1 else _across_slices(near, far, placement.machine)
    return placement.links[axes]


def _on_torus(placement: Placement, axes: tuple[int, ...]) -> Link:
    machine, shares = placement.machine, placement.shares
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
    cores = math.prod(shares[axis][-1] for axis in axes)
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


def _on_hosts(placement: Placement, axes: tuple[int, ...]) -> Link:
    hosts = math.prod(placement.shares[axis][0] for axis in axes)
    inside = math.prod(placement.shares[axis][1] for axis in axes)
    return _between_hosts(placement.machine, hosts, inside)


@functools.lru_cache(maxsize=4096)
def _between_hosts(machine: Machine, hosts: int, inside: int) -> Link:
    """Between `inside` devices of each of so many hosts."""
    chip = machine.chip
    fast = chip.link_bandwidth * chip.links
    linked = "Infinity Fabric" if chip.device_kinds[0].startswith("AMD") else "NVLink"
    name = linked if chip.links > 1 else "PCIe" if chip.platform == "gpu" else "memory"
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


def place_axes(machine: Machine, sizes: Mapping[str, int]) -> Placement:
    """The shares of axes of these sizes, in the mesh's order.

    meshwright.mesh places devices; here the same answer comes without any, for machines of
    thousands of chips and hundreds of meshes. Tests hold both together. Not the same: slices of 4
    or 8 chips and all of v2 and v3, which jax orders by hand; here they are laid out like the
    others.
    """
    return placement_of(machine, tuple(sizes.items()))


@functools.lru_cache(maxsize=4096)
def placement_of(machine: Machine, axes: tuple[tuple[str, int], ...]) -> Placement:
    names, sizes = zip(*axes, strict=True)
    across = tuple(axes_across_slices(sizes, machine.slices))
    within = tuple(size // far for size, far in zip(sizes, across, strict=True))
    if machine.is_tpu:
        box = machine.slice_shape
        shares = _whole_dims(within, box) or _split_dims(within, box)
    else:
        shares = _in_listed_order(within, machine.grid)
    return Placement(machine, names, shares, across)


def _in_listed_order(sizes: tuple[int, ...], grid: tuple[int, ...]) -> Shares:
    """GPUs and CPUs in the order listed: the last axes inside a host."""
    left = grid[1]
    found: list[Share] = []
    for size in reversed(sizes):
        inside = math.gcd(size, left)
        left //= inside
        found.append((size // inside, inside))
    return tuple(reversed(found))


def _whole_dims(sizes: tuple[int, ...], box: Share) -> Shares | None:
    """The last axis first, each on as many whole dims as make up its size."""
    free = list(box)
    found: list[Share] = []
    for size in reversed(sizes):
        share = [1] * len(box)
        if size > 1:
            combinations = (
                dims
                for many in range(len(box), 0, -1)
                for dims in itertools.combinations(range(len(box)), many)
                if math.prod(free[dim] for dim in dims) == size
            )
            chosen = next(combinations, None)
            if chosen is None:
                return None
            for dim in chosen:
                share[dim], free[dim] = free[dim], 0
        found.append(tuple(share))
    return tuple(reversed(found))


def _split_dims(sizes: tuple[int, ...], box: Share) -> Shares:
    """The last axis first, each on the best part of what is left: whole dims before parts."""
    used = [1] * len(box)
    found: list[Share] = []
    for size in reversed(sizes):
        left = tuple(side // taken for side, taken in zip(box, used, strict=True))
        chosen = max(
            _shares_of(size, left), key=functools.partial(_worth, box=box, used=tuple(used))
        )
        used = [taken * n for taken, n in zip(used, chosen, strict=True)]
        found.append(chosen)
    return tuple(reversed(found))


def _worth(share: Share, box: Share, used: Share) -> tuple[object, ...]:
    """Whole dims, then many of them, then parts of dims that others have begun."""
    whole = [n for n, side in zip(share, box, strict=True) if n == side]
    begun = [n for n, taken in zip(share, used, strict=True) if taken > 1]
    return math.prod(whole), sum(n > 1 for n in whole), math.prod(begun), share


@functools.lru_cache(maxsize=65536)
def _shares_of(size: int, box: Share) -> tuple[Share, ...]:
    """Every share of this size that divides a box."""
    if not box:
        return ((),) if size == 1 else ()
    return tuple(
        (first, *rest)
        for first in divisors(box[0])
        if size % first == 0
        for rest in _shares_of(size // first, box[1:])
    )
