"""Cloud TPU slice names: `v5p-256` is 256 cores, 128 chips, wired 4x4x8.

Names of v2, v3, v4, v5p and 7x count cores (two a chip); v5e and v6e count chips. The shape is the
squarest slice of so many chips.
"""

import math
import re

from meshwright.errors import MeshwrightError
from meshwright.machines.slices import slice_shapes, squarest

# cloud prefix -> (chip, units a chip)
PREFIXES = {
    "v2": ("v2", 2),
    "v3": ("v3", 2),
    "v4": ("v4", 2),
    "v5p": ("v5p", 2),
    "v5e": ("v5e", 1),
    "v5litepod": ("v5e", 1),
    "v6e": ("v6e", 1),
    "tpu7x": ("7x", 2),
    "v7x": ("7x", 2),
    "7x": ("7x", 2),
}
_NAME = re.compile(rf"({'|'.join(PREFIXES)})-([0-9]{{1,7}})")


def is_cloud_name(name: str) -> bool:
    return _NAME.fullmatch(name.lower()) is not None


def cloud_topology(name: str, given: str) -> tuple[str, tuple[int, ...]]:
    """`"v5p-256"` -> `("v5p", (4, 4, 8))`."""
    match = _NAME.fullmatch(name.lower())
    assert match is not None
    prefix, number = match[1], int(match[2])
    chip_name, units_per_chip = PREFIXES[prefix]
    chips, odd = divmod(number, units_per_chip)
    shape = None if odd else squarest(chip_name, chips)
    if shape is None:
        unit = "cores, two a chip" if units_per_chip == 2 else "chips"
        sizes = {units_per_chip * math.prod(shape) for shape in slice_shapes(chip_name)}
        near = sorted(sorted(sizes, key=lambda n: abs(n - number))[:2])
        raise MeshwrightError(
            f"machine {given!r}: no {chip_name} slice has {number} ({prefix}-N counts {unit}); "
            f"nearest: {', '.join(f'{prefix}-{n}' for n in near)}"
        )
    return chip_name, shape
