"""Hardware: chips with sourced figures and prices, slices, hosts; by name, or from jax."""

from typing import TYPE_CHECKING

from meshwright.lazy import import_when_used
from meshwright.machines.catalogue import Catalogue, read_catalogue
from meshwright.machines.chips import CHIPS, FIGURES, Chip, find_chip
from meshwright.machines.cloud_names import INSTANCES
from meshwright.machines.compiled_for import COMPILED_GPUS, is_compiled_for
from meshwright.machines.host_memory import check_host_memory, free_host_memory
from meshwright.machines.machine import AbstractDevice, Machine
from meshwright.machines.prices import PRICES, Price
from meshwright.machines.recognize import chip_of_kind, slice_of
from meshwright.machines.sizes import larger, machine_sizes
from meshwright.machines.slices import check_slice, slice_shapes

if TYPE_CHECKING:
    from meshwright.machines.jax_devices import host_bytes

__all__ = [
    "CHIPS", "COMPILED_GPUS", "FIGURES", "INSTANCES", "PRICES", "AbstractDevice", "Catalogue",
    "Chip", "Machine", "Price", "check_host_memory", "check_slice", "chip_of_kind", "find_chip",
    "free_host_memory", "host_bytes", "is_compiled_for", "larger", "machine_sizes",
    "read_catalogue", "slice_of", "slice_shapes",
]  # fmt: skip

import_when_used(__name__)
