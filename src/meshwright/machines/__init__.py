"""Hardware: chips with sourced figures, slices, hosts; by name, or from jax.devices()."""

from meshwright.machines.chips import CHIPS, Chip, find_chip
from meshwright.machines.host_memory import check_host_memory, host_bytes
from meshwright.machines.machine import AbstractDevice, Machine
from meshwright.machines.recognize import chip_of_kind, slice_of
from meshwright.machines.slices import check_slice, largest_slice, squarest

__all__ = [
    "CHIPS",
    "AbstractDevice",
    "Chip",
    "Machine",
    "check_host_memory",
    "check_slice",
    "chip_of_kind",
    "find_chip",
    "host_bytes",
    "largest_slice",
    "slice_of",
    "squarest",
]
