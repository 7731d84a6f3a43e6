"""The sizes in which a chip can be rented."""

import math
from collections.abc import Iterator

from meshwright.machines.chips import Chip
from meshwright.machines.machine import Machine
from meshwright.machines.slices import largest_slice, slice_shapes, squarest


def machine_sizes(chip: Chip, most: int) -> Iterator[Machine]:
    """From one chip to at most so many, each about twice the one before."""
    shape = {"gpu": (1, 1), "cpu": (1,)}.get(chip.platform) or slice_shapes(chip.kind)[0]
    smallest = Machine(chip, shape)
    yield smallest
    yield from larger(smallest, most)


def larger(machine: Machine, most: int) -> Iterator[Machine]:
    """Twice as many devices again and again, as they can be had: slices, then several of them."""
    chip, shape, slices = machine.chip, list(machine.shape), machine.slices
    largest = largest_slice(chip.kind)  # None: a chip that is not in the catalogue
    chips = math.prod(shape)
    while math.prod(shape) * slices * 2 <= most:
        if chip.platform != "tpu":  # until a host is full, then by hosts
            is_full = len(shape) == 1 or 2 * shape[1] > chip.chips_per_host
            shape[0 if is_full else 1] *= 2
        elif largest is None:
            shape[shape.index(min(shape))] *= 2
        elif chips * 2 > largest:
            slices *= 2
        else:
            chips *= 2
            shape = list(squarest(chip.kind, chips) or ())
            if not shape:
                shape = list(machine.shape)  # no slice has so many; the next doubling may be one
                continue
        yield Machine(chip, tuple(shape), slices)
