"""Machines: chips of one kind, their network, and their hosts.

    >>> Machine.parse("v3:4x4").slice_shape
    (4, 4, 1, 2)

A Machine describes hardware; its devices need not exist.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.arithmetic import whole_number, whole_numbers
from meshwright.errors import MeshwrightError
from meshwright.machines.chips import Chip
from meshwright.machines.recognize import recognize
from meshwright.machines.text import MAX_DEVICES, read_machine
from meshwright.present import count


@dataclasses.dataclass(frozen=True)
class AbstractDevice:
    """A device that need not exist, with the attributes of a jax device."""

    id: int
    process_index: int
    slice_index: int
    coords: tuple[int, ...]
    core_on_chip: int
    device_kind: str
    platform: str

    @property
    def position(self) -> tuple[int, ...]:
        """Where it sits on the machine's grid: (x, y, z, core), (host, gpu) or (host, cpu)."""
        return (*self.coords, self.core_on_chip) if self.platform == "tpu" else self.coords


@dataclasses.dataclass(frozen=True, repr=False)
class Machine:
    """`shape`: chips along each torus dim (TPU), (hosts, GPUs per host), or (devices,) for CPUs."""

    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.chip, Chip):
            raise MeshwrightError(
                f"chip {self.chip!r} is not a mw.Chip; take one of mw.CHIPS, or Machine.parse"
            )
        object.__setattr__(self, "shape", whole_numbers(self.shape, "machine shape"))
        object.__setattr__(self, "slices", whole_number(self.slices, "slices"))
        wanted = {"tpu": self.chip.torus_dims, "gpu": 2, "cpu": 1}[self.chip.platform]
        if len(self.shape) != wanted or min(self.shape, default=0) < 1 or self.slices < 1:
            raise MeshwrightError(
                f"a {self.chip.name} machine takes {count(wanted, 'size')} of at least 1 and at "
                f"least one slice; got shape {self.shape}, slices {self.slices}"
            )
        if self.num_devices > MAX_DEVICES:
            raise MeshwrightError(
                f"{self.chip.name} of shape {self.shape} x {count(self.slices, 'slice')} has "
                f"{self.num_devices:,} devices; at most {MAX_DEVICES:,} are supported"
            )

    @classmethod
    def parse(cls, text: "str | Machine", own: Mapping[str, Chip] | None = None) -> "Machine":
        """Read a machine: `v5p:4x4x8`, `v5p-256`, `16*p5.48xlarge`, `2*v5e:16x16`, `here`.

        Chips of your `own`, by name, come before those of the catalogue.
        """
        if isinstance(text, Machine):
            return text
        if isinstance(text, str) and text.strip() == "here":
            return cls.here()
        return cls(*read_machine(text, own))

    @classmethod
    def here(cls) -> "Machine":
        """The machine this process runs on, from `jax.devices()`."""
        from meshwright.machines.jax_devices import all_devices

        return cls.of_devices(all_devices())

    @classmethod
    def of_devices(cls, devices: Sequence[Any]) -> "Machine":
        """The machine of a list of jax devices."""
        return cls(*recognize(devices))

    def __str__(self) -> str:
        shape = self.shape
        if self.chip.platform == "gpu" and shape[0] == 1:
            shape = shape[1:]
        one = f"{self.chip.name}:{'x'.join(map(str, shape))}"
        return f"{self.slices}*{one}" if self.slices > 1 else one

    def __repr__(self) -> str:
        return f"Machine('{self}')"

    @property
    def is_tpu(self) -> bool:
        return self.chip.platform == "tpu"

    @property
    def slice_shape(self) -> tuple[int, int, int, int]:
        """One slice as (x, y, z, cores); only a TPU has one."""
        self._needs_tpu("slice_shape")
        x, y, z = (*self.shape, 1)[:3]
        return x, y, z, self.chip.cores_per_chip

    @property
    def host_shape(self) -> tuple[int, int, int, int]:
        """The box of devices one host holds, as (x, y, z, cores)."""
        self._needs_tpu("host_shape")
        x, y, z = self.chip.host_box
        if self.shape in self.chip.single_host_shapes:
            x, y, z = (*self.shape, 1)[:3]
        gx, gy, gz, cores = self.slice_shape
        return math.gcd(x, gx), math.gcd(y, gy), math.gcd(z, gz), cores

    @property
    def grid(self) -> tuple[int, ...]:
        """The devices of one slice as a box: (x, y, z, cores), (hosts, GPUs) or (1, CPUs)."""
        if self.is_tpu:
            return self.slice_shape
        return self.shape if self.chip.platform == "gpu" else (1, *self.shape)

    @property
    def grid_names(self) -> tuple[str, ...]:
        """What the sides of `grid` are called."""
        return {"tpu": ("x", "y", "z", "core"), "gpu": ("host", "gpu"), "cpu": ("host", "cpu")}[
            self.chip.platform
        ]

    @property
    def host_grid(self) -> tuple[int, ...]:
        """The part of `grid` that one host holds."""
        return self.host_shape if self.is_tpu else (1, self.grid[1])

    @property
    def wraps(self) -> tuple[bool, bool, bool]:
        """Whether the links along x, y and z close into a ring."""
        self._needs_tpu("wraps")
        return self.chip.wraps(self.slice_shape[:3])

    @property
    def devices_per_slice(self) -> int:
        return math.prod(self.grid)

    @property
    def num_devices(self) -> int:
        return self.devices_per_slice * self.slices

    @property
    def num_chips(self) -> int:
        return math.prod(self.shape) * self.slices

    @property
    def num_hosts(self) -> int:
        return self.num_devices // self.devices_per_host

    @property
    def devices_per_host(self) -> int:
        return math.prod(self.host_grid)

    @property
    def memory_per_device(self) -> int:
        """Bytes of memory each jax device can use."""
        return self.chip.memory_bytes // self.chip.cores_per_chip

    @property
    def usable_memory(self) -> int:
        """Bytes of each jax device that programs are given."""
        return self.chip.usable_bytes

    @functools.cached_property
    def devices(self) -> tuple[AbstractDevice, ...]:
        """Every device in the order `jax.devices()` would list it: host by host, x fastest."""
        return tuple(itertools.chain.from_iterable(map(self._slice_devices, range(self.slices))))

    def _slice_devices(self, index: int) -> list[AbstractDevice]:
        first = index * self.devices_per_slice
        first_host = index * (self.num_hosts // self.slices)
        kind, platform = self.chip.device_kinds[0], self.chip.platform
        if not self.is_tpu:
            hosts, per_host = self.grid
            return [
                AbstractDevice(
                    id=first + host * per_host + i,
                    process_index=first_host + host,
                    slice_index=index,
                    coords=(host, i),
                    core_on_chip=0,
                    device_kind=kind,
                    platform=platform,
                )
                for host in range(hosts)
                for i in range(per_host)
            ]
        gx, gy, gz, cores = self.slice_shape
        lx, ly, lz, _ = self.host_shape
        hosts_box = itertools.product(range(0, gz, lz), range(0, gy, ly), range(0, gx, lx))
        return [
            AbstractDevice(
                id=first + ((z * gy + y) * gx + x) * cores + core,
                process_index=first_host + host,
                slice_index=index,
                coords=(x, y, z),
                core_on_chip=core,
                device_kind=kind,
                platform=platform,
            )
            for host, (hz, hy, hx) in enumerate(hosts_box)
            for z in range(hz, hz + lz)
            for y in range(hy, hy + ly)
            for x in range(hx, hx + lx)
            for core in range(cores)
        ]

    def _needs_tpu(self, what: str) -> None:
        if not self.is_tpu:
            raise MeshwrightError(
                f"machine '{self}' has no {what}: only TPU slices are tori; use .shape, here "
                f"{self.shape}"
            )
