"""How attention is done over a split length: which strategy, and in which order the row lies.

>>> over = Split(ways=8, length=65536, heads=32, kv_heads=8, head_dim=128, mask=Mask())
>>> choose_strategy(over, "ring")
'ring'
>>> sequence_order(over, "ring"), sequence_order(over, "ulysses")
('zigzag', 'contiguous')
"""

import dataclasses
import functools
import logging

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.ops.attention.mask import Mask
from meshwright.ops.attention.ring_steps import ring_steps_of
from meshwright.present import count, nearest_multiples

_log = logging.getLogger("meshwright")

STRATEGIES = ("ring", "allgather", "ulysses")
ORDERS = ("contiguous", "zigzag")


@dataclasses.dataclass(frozen=True)
class ContextParallel:
    """How attention is computed where the length is split."""

    strategy: str = "auto"
    order: str = "contiguous"  # of each sequence over the devices: see sequence_order, to_zigzag


# FLOP/s of a chip for each byte/s of a link to its neighbour, where the chip is not known: TPU v5p
# has 5,100, H200 over NVLink 2,200
FLOPS_PER_BYTE = 5000.0


@dataclasses.dataclass(frozen=True)
class Split:
    """An attention whose rows are split over `ways` devices."""

    ways: int
    length: int  # of a whole row
    heads: int  # on a device
    kv_heads: int
    head_dim: int
    mask: Mask
    flops_per_byte: float = FLOPS_PER_BYTE  # of the machine, between neighbours along the axis
    biased: bool = False  # a bias is added to the scores

    @property
    def part(self) -> int:
        """Tokens of a row on a device."""
        return self.length // self.ways


def choose_strategy(split: Split, strategy: str = "auto") -> str:
    """The strategy, with every reason it cannot be checked; auto's choice is logged once."""
    if strategy == "auto":
        return explain_strategy(split)[0]
    if strategy not in STRATEGIES:
        raise MeshwrightError(
            f"context_parallel={strategy!r} is not a strategy"
            f"{did_you_mean(strategy, ['auto', *STRATEGIES])}"
        )
    why = refusal(split, strategy)
    if why is not None:
        able = [name for name in STRATEGIES if refusal(split, name) is None]
        can = f"; {' and '.join(able)} can" if able else ""
        raise MeshwrightError(f"context_parallel={strategy!r} cannot serve this: {why}{can}")
    return strategy


def refusal(split: Split, strategy: str) -> str | None:
    """Why a strategy cannot serve, None if it can."""
    if split.ways == 1:
        return None
    if strategy == "ulysses":
        for name, heads in (("heads", split.heads), ("kv_heads", split.kv_heads)):
            if heads % split.ways:
                return (
                    f"it gives each of sp={split.ways} devices its own heads, and {heads} {name} "
                    f"on a device are not divisible by {split.ways}"
                )
        parts = split.ways
    else:
        if split.biased:
            return "it adds no bias to the scores of its steps"
        offset = split.mask.offset
        if offset:
            return f"its masks begin at the first key, not {offset} places behind it"
        parts = split.ways * (2 if sequence_order(split, strategy) == "zigzag" else 1)
    if split.length % parts:
        chunks = " (two chunks a device, to balance a causal mask)" if parts > split.ways else ""
        return (
            f"seq={split.length} is not divisible by {parts}{chunks}; seq="
            f"{nearest_multiples(split.length, parts)} would fit"
        )
    return None


def sequence_order(split: Split, strategy: str) -> str:
    """How a row lies over the devices: zigzag where that balances a causal mask."""
    mask = split.mask
    if split.ways == 1 or strategy == "ulysses" or not mask.causal or mask.window is not None:
        return "contiguous"
    if mask.block is not None and split.length % (2 * split.ways * mask.block):
        return "contiguous"
    return "zigzag"


def _hops(split: Split) -> int:
    """How far keys travel around a ring."""
    return ring_steps_of(split.mask, sequence_order(split, "ring"), split.ways, split.part).hops


@functools.lru_cache(maxsize=256)
def explain_strategy(split: Split) -> tuple[str, str]:
    """The strategy auto takes, and why in a sentence."""
    able = [name for name in STRATEGIES if refusal(split, name) is None]
    if not able:
        raise MeshwrightError(
            f"no strategy can split this attention over sp={split.ways}: "
            + "; ".join(f"{name}: {refusal(split, name)}" for name in STRATEGIES)
        )
    work = split.heads / split.kv_heads * split.part / 2  # FLOPs of a turn for each byte of its hop
    if able == ["ulysses"]:
        chosen = "ulysses"
        why = f"ring and allgather cannot: {refusal(split, 'ring')}"
    elif (hops := _hops(split)) < split.ways - 1:
        chosen = "ring"
        why = f"a window of {split.mask.window} tokens reaches {count(hops, 'part')} back, no more"
    elif work >= split.flops_per_byte:
        chosen = "ring"
        why = (
            f"a turn has {work:,.0f} FLOPs for each byte that hops, the machine needs "
            f"{split.flops_per_byte:,.0f} to hide it"
        )
    elif "ulysses" in able and split.ways > 1 + split.heads / split.kv_heads:
        chosen = "ulysses"
        why = (
            f"parts of {split.part} tokens are too short to hide a hop, and moving heads sends "
            f"less than moving keys to {split.ways} devices"
        )
    else:
        chosen = "allgather"
        why = (
            f"parts of {split.part} tokens are too short to hide a hop, and keys of "
            f"{count(split.kv_heads, 'head')} are few"
        )
    _log.info("sequence parallel: %s (%s)", chosen, why)
    return chosen, why
