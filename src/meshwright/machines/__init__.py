"""What hardware is: chips and their figures, slices, hosts; named, or found from jax.devices()."""

from meshwright.machines.chips import CHIPS, Chip
from meshwright.machines.machine import DescribedDevice, Machine
from meshwright.machines.recognize import slice_of

__all__ = ["CHIPS", "Chip", "DescribedDevice", "Machine", "slice_of"]
