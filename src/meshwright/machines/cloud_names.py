"""Cloud TPU slice names: `v5p-256` is 256 cores, 128 chips, wired 4x4x8.

Names of v2, v3, v4, v5p and 7x count cores (two a chip); v5e and v6e count chips. The shape is the
squarest box that can be wired: in three dims, of 4x4x4 cubes once there are 64 chips.
"""

import itertools
import re

from meshwright.errors import MeshwrightError
from meshwright.machines.chips import CHIPS

# cloud prefix -> (chip, units a chip, units of the largest slice)
PREFIXES = {
    "v2": ("v2", 2, 512),
    "v3": ("v3", 2, 2048),
    "v4": ("v4", 2, 8192),
    "v5p": ("v5p", 2, 17920),
    "v5e": ("v5e", 1, 256),
    "v5litepod": ("v5e", 1, 256),
    "v6e": ("v6e", 1, 256),
    "tpu7x": ("7x", 2, 18432),
    "v7x": ("7x", 2, 18432),
    "7x": ("7x", 2, 18432),
}
_NAME = re.compile(rf"({'|'.join(PREFIXES)})-([0-9]{{1,7}})")


def is_cloud_name(name: str) -> bool:
    return _NAME.fullmatch(name.lower()) is not None


def cloud_topology(name: str, given: str) -> tuple[str, tuple[int, ...]]:
    """`"v5p-256"` -> `("v5p", (4, 4, 8))`."""
    match = _NAME.fullmatch(name.lower())
    assert match is not None
    prefix, number = match[1], int(match[2])
    chip_name, units_per_chip, largest = PREFIXES[prefix]
    chips, odd = divmod(number, units_per_chip)
    sold = chips and not odd and number <= largest
    shape = squarest(chips, CHIPS[chip_name].torus_dims) if sold else None
    if shape is None:
        unit = "cores, two a chip" if units_per_chip == 2 else "chips"
        near = sorted(_numbers(chip_name, units_per_chip, largest), key=lambda n: abs(n - number))[
            :2
        ]
        raise MeshwrightError(
            f"machine {given!r}: no {chip_name} slice has {number} ({prefix}-N counts {unit}); "
            f"nearest: {', '.join(f'{prefix}-{n}' for n in sorted(near))}. For any other shape "
            f"write it out: {chip_name}:{'4x4x8' if CHIPS[chip_name].torus_dims == 3 else '4x8'}"
        )
    return chip_name, shape


def squarest(chips: int, torus_dims: int) -> tuple[int, ...] | None:
    """The box of `chips` chips with the smallest sum of sides that the wiring allows."""
    if torus_dims == 2:
        # one chip alone, a pair never; otherwise powers of two, at most twice as long as wide
        shapes = [(2**i, 2**j) for i in range(6) for j in (i, i + 1)]
        return next((s for s in shapes if s[0] * s[1] == chips and s != (1, 2)), None)
    small = {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4)}
    if chips < 64:
        return small.get(chips)
    cubes, rest = divmod(chips, 64)
    if rest:
        return None
    boxes = [
        (a, b, cubes // (a * b))
        for a, b in itertools.combinations_with_replacement(range(1, int(cubes**0.5) + 1), 2)
        if cubes % (a * b) == 0 and cubes // (a * b) >= b
    ]
    best = min(boxes, key=sum)
    return tuple(4 * side for side in best)


def _numbers(chip_name: str, units_per_chip: int, largest: int) -> list[int]:
    dims = CHIPS[chip_name].torus_dims
    chips = range(1, largest // units_per_chip + 1)
    return [n * units_per_chip for n in chips if squarest(n, dims)]
