"""What the TPU compiler is told beyond its defaults."""

from collections.abc import Mapping
from typing import Literal

from meshwright.machines import Chip

Overlap = Literal["auto", "on", "off"]

# libtpu makes all-gathers asynchronous by itself only on v5e and 7x. With these options the
# compiler starts the next all-gather of a loop during matmuls that do not need it
_OVERLAP = {
    "xla_enable_async_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
}
# chips on which every step compiled both ways is faster with them (benchmarks/RESULTS.md)
_FASTER = ("v4", "v5p", "v6e")
_MEASURED = (*_FASTER, "v5e", "7x")


def overlap_choice(setting: Overlap, chip: Chip | None) -> tuple[bool, str]:
    """Whether the compiler is told to overlap on this chip, if it is a known one, and why."""
    if setting != "auto":
        return setting == "on", "as asked"
    if chip is None or chip.kind not in _MEASURED:
        return False, "no step was compiled for this chip both ways"
    told = chip.kind in _FASTER
    why = "compiled steps are faster with it" if told else "its compiler does so by itself"
    return told, f"{chip.name}: {why}"


def overlap_text(setting: Overlap, chip: Chip | None) -> str:
    """A line that says what was chosen, why, and which setting changes it."""
    told, why = overlap_choice(setting, chip)
    how, other = ("asked for", "off") if told else ("not asked for", "on")
    return f"all-gathers during compute: {how} ({why}); --compute.overlap {other} changes it"


def compiler_options(platform: str, overlap: bool) -> Mapping[str, str]:
    """For jax.jit, on a mesh of devices of this platform."""
    return _OVERLAP if overlap and platform == "tpu" else {}
