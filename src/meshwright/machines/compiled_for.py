"""The chips that a compiler knows where there is none of them."""

from collections.abc import Mapping

from meshwright.machines.chips import CHIPS, Chip

# what the GPU compiler asks about a chip beyond the catalogue: compute capability, multiprocessors,
# clock (GHz), L2 (MiB), shared memory of a multiprocessor and of a block that asks for it (KiB).
# NVIDIA's architecture white papers and the CUDA programming guide's table of compute capabilities.
COMPILED_GPUS: Mapping[str, tuple[tuple[int, int], int, float, int, int, int]] = {
    "a100-40": ((8, 0), 108, 1.41, 40, 164, 163),
    "a100-80": ((8, 0), 108, 1.41, 40, 164, 163),
    **dict.fromkeys(("h100", "a3-high", "a3-mega", "h100-500w"), ((9, 0), 132, 1.98, 50, 228, 227)),
    "h200": ((9, 0), 132, 1.98, 60, 228, 227),
    "b200": ((10, 0), 148, 1.965, 126, 228, 227),
    "l4": ((8, 9), 58, 2.04, 48, 100, 99),
}


def is_compiled_for(chip: Chip) -> bool:
    """Whether there is a compiler that needs none of these chips; of a user's own, as its kind."""
    return chip.kind in (COMPILED_GPUS if chip.platform == "gpu" else CHIPS)
