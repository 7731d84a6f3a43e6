"""Which TPU slices exist.

    >>> nearest_slices("v6e", (32, 32))
    [(16, 16)]
    >>> nearest_slices("v5p", (4, 8, 4))
    [(4, 4, 8)]

From Google Cloud's page of each generation (docs.cloud.google.com/tpu/docs/v5p and its neighbours),
"TPU configurations", "Plan TPUs in GKE" and the topologies that xpk knows. Slices of v4, v5p and 7x
from 64 chips on are built of 4x4x4 cubes; their sides are written smallest first.
"""

import functools
import itertools
import math

from meshwright.errors import MeshwrightError, one_of
from meshwright.machines.chips import Chip

Shape = tuple[int, ...]

# v5e, v6e: 1x1 to 16x16; v2 and v3: from a host of 2x2 to the pod
_SQUARES: dict[str, tuple[Shape, ...]] = {
    "v2": ((2, 2), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)),
    "v3": ((2, 2), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16), (16, 32), (32, 32)),
    "v5e": ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)),
    "v6e": ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)),
}
_HOSTS: tuple[Shape, ...] = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))  # less than a cube
# the slices smaller than a cube, and the chips of the largest: v5p schedules 6,144 of a pod's 8,960
_CUBES: dict[str, tuple[tuple[Shape, ...], int]] = {
    "v4": (_HOSTS, 4096),
    "v5p": (((1, 1, 1), *_HOSTS), 6144),
    "7x": (((1, 1, 1), *_HOSTS), 9216),
}


@functools.cache
def slice_shapes(chip: str) -> tuple[Shape, ...]:
    """Every slice of a chip in the catalogue; none of another chip."""
    if chip not in _CUBES:
        return _SQUARES.get(chip, ())
    small, most = _CUBES[chip]
    cubes = most // 64
    sides = itertools.combinations_with_replacement(range(1, cubes + 1), 2)
    boxes = (
        (4 * a, 4 * b, 4 * c)
        for a, b in sides if a * b * b <= cubes
        for c in range(b, cubes // (a * b) + 1)
    )  # fmt: skip
    return (*small, *sorted(boxes, key=lambda shape: (math.prod(shape), shape)))


def squarest(chip: str, chips: int) -> Shape | None:
    """The slice of so many chips with the smallest sum of sides; None if there is none."""
    alike = [shape for shape in slice_shapes(chip) if math.prod(shape) == chips]
    return min(alike, key=sum, default=None)


def largest_slice(chip: str) -> int | None:
    """Chips of the largest slice of a chip in the catalogue."""
    return max(map(math.prod, slice_shapes(chip)), default=None)


def nearest_slices(chip: str, shape: Shape) -> list[Shape]:
    """The slices most like a shape: the same sides in order, else the nearest sizes."""
    known = slice_shapes(chip)
    ordered = tuple(sorted(shape))
    if ordered in known:
        return [ordered]
    if math.prod(shape) >= math.prod(known[-1]):
        return [known[-1]]

    def unlike(other: Shape) -> float:
        """How far the chips are apart, and, counted half, the sides."""
        sides = zip(ordered, sorted(other), strict=True)
        apart = sum(abs(math.log(one / another)) for one, another in sides)
        return abs(math.log(math.prod(shape) / math.prod(other))) + apart / 2

    return sorted(sorted(known, key=unlike)[:2], key=math.prod)


def check_slice(chip: Chip, shape: Shape, slices: int, given: str) -> None:
    """That a catalogue's TPU has such a slice; a MeshwrightError names the nearest that exist."""
    known = slice_shapes(chip.kind)
    if not known or shape in known:
        return

    def text(number: int, one: Shape) -> str:
        return f"{number}*" * (number > 1) + f"{chip.name}:{'x'.join(map(str, one))}"

    texts = [text(slices, one) for one in nearest_slices(chip.kind, shape)]
    several, rest = divmod(math.prod(shape), math.prod(known[-1]))
    if several > 1 and not rest:  # as many chips, in more slices
        texts.append(text(several * slices, known[-1]))
    raise MeshwrightError(
        f"machine {given!r}: there is no such {chip.name} slice; nearest: {one_of(texts)}. "
        f"{_rule(chip.kind)} To describe a machine that does not exist, in Python: "
        f"mw.Machine(mw.CHIPS['{chip.name}'], {shape})"
    )


def _rule(chip: str) -> str:
    """Which slices there are, in a sentence."""
    if chip in _CUBES:
        small, most = _CUBES[chip]
        shapes = ", ".join("x".join(map(str, shape)) for shape in small)
        return (
            f"{chip} slices are {shapes}, or have sides that are multiples of 4, smallest first, "
            f"and at most {most:,} chips."
        )
    return f"{chip} slices are {', '.join('x'.join(map(str, one)) for one in _SQUARES[chip])}."
