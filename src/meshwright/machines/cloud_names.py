"""Clouds' names of machines: TPU slices (`v5p-256`) and instances with GPUs (`p5.48xlarge`).

`v5p-256` is 256 cores, 128 chips, wired 4x4x8. Names of v2, v3, v4, v5p and 7x count cores (two a
chip); v5e and v6e count chips. The shape is the squarest slice of so many chips.
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
# instance, in lower case -> (chip, GPUs)
INSTANCES = {
    "p4d.24xlarge": ("p4d", 8),
    "p4de.24xlarge": ("p4de", 8),
    "p5.48xlarge": ("h100", 8),
    "p5en.48xlarge": ("h200", 8),
    "p6-b200.48xlarge": ("b200", 8),
    "p6-b300.48xlarge": ("b300", 8),
    "g5.48xlarge": ("a10g", 8),
    "g6.48xlarge": ("l4", 8),
    "g6e.48xlarge": ("l40s", 8),
    "g7e.48xlarge": ("rtx-pro-6000", 8),
    "a2-highgpu-8g": ("a2-high", 8),
    "a2-ultragpu-8g": ("a2-ultra", 8),
    "a3-highgpu-8g": ("a3-high", 8),
    "a3-megagpu-8g": ("a3-mega", 8),
    "a3-ultragpu-8g": ("h200", 8),
    "a4-highgpu-8g": ("b200", 8),
    "a4x-highgpu-4g": ("gb200", 4),
    "g2-standard-96": ("l4", 8),
    "standard_nd96asr_v4": ("a100-40", 8),
    "standard_nd96amsr_a100_v4": ("a100-80", 8),
    "standard_nd96isr_h100_v5": ("h100", 8),
    "standard_nd96isr_h200_v5": ("h200", 8),
    "standard_nd96isr_mi300x_v5": ("mi300x", 8),
    "standard_nd128isr_ndr_gb200_v6": ("gb200", 4),
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


def instances_shape(name: str, number: int, per_host: int) -> tuple[str, tuple[int, int]]:
    """`("p5.48xlarge", 16, 8)` -> `("h100", (16, 8))`: so many instances, at most so many GPUs of
    which NVLink joins."""
    chip, gpus = INSTANCES[name.lower()]
    joined = max(
        n for n in range(1, number + 1) if not number % n and (n == 1 or n * gpus <= per_host)
    )
    return chip, (number // joined, joined * gpus)
