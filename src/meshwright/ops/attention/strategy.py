"""Context parallelism: the choice of a strategy, and the order of a sequence over the devices.

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


# FLOP/s of a chip per byte/s of a link to its neighbour, if the chip is unknown: TPU v5p has 5,100,
# H200 over NVLink 2,200
FLOPS_PER_BYTE = 5000.0


@dataclasses.dataclass(frozen=True)
class Split:
    """An attention whose sequences `ways` devices share."""

    ways: int
    length: int  # full sequence length
    heads: int  # on a device
    kv_heads: int
    head_dim: int
    mask: Mask
    flops_per_byte: float = FLOPS_PER_BYTE  # of the machine, between neighbours along the axis
    biased: bool = False  # a bias is added to the scores
    softcapped: bool = False  # scores are capped
    keys: int | None = None  # length of the keys' sequence, if it is another one

    @property
    def part(self) -> int:
        """Tokens of a sequence on a device."""
        return self.length // self.ways


def choose_strategy(split: Split, strategy: str = "auto") -> str:
    """The strategy; a MeshwrightError says why it is not possible. Logs the choice of auto."""
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
        can = f"; {' and '.join(able)} would work" if able else ""
        raise MeshwrightError(f"context_parallel={strategy!r} is not possible: {why}{can}")
    return strategy


def refusal(split: Split, strategy: str, *, proposes: bool = True) -> str | None:
    """Why a strategy is not possible, None if it is; `proposes` lengths that would fit."""
    if split.ways == 1:
        return None
    if strategy == "ulysses":
        for name, heads in (("heads", split.heads), ("kv_heads", split.kv_heads)):
            if heads % split.ways:
                return (
                    f"it splits the heads over sp={split.ways} devices, and {heads} {name} on a "
                    f"device are not divisible by {split.ways}"
                )
        parts = split.ways
    else:
        if split.biased:
            return "it adds no bias to the scores of its steps"
        offset = split.mask.offset
        if offset:
            return f"it has no mask with an offset of {offset}"
        parts = split.ways * (2 if sequence_order(split, strategy) == "zigzag" else 1)
    if split.length % parts:
        chunks = " (two chunks per device, to balance a causal mask)" if parts > split.ways else ""
        fits = f"; seq={nearest_multiples(split.length, parts)} would fit" if proposes else ""
        return f"seq={split.length} is not divisible by {parts}{chunks}{fits}"
    return None


def sequence_order(split: Split, strategy: str) -> str:
    """The order of a sequence over the devices: zigzag where that balances a causal mask."""
    mask = split.mask
    if split.ways == 1 or strategy == "ulysses" or not mask.causal or mask.window is not None:
        return "contiguous"
    if mask.block is not None and split.length % (2 * split.ways * mask.block):
        return "contiguous"
    return "zigzag"


def _exchanges(split: Split) -> int:
    """Number of times a ring sends keys on."""
    return ring_steps_of(
        split.mask, sequence_order(split, "ring"), split.ways, split.part
    ).exchanges


@functools.lru_cache(maxsize=256)
def explain_strategy(split: Split) -> tuple[str, str]:
    """The strategy that auto chooses, and why, in one sentence."""
    able = [name for name in STRATEGIES if refusal(split, name) is None]
    if not able:
        raise MeshwrightError(
            f"context parallelism over sp={split.ways} is not possible: "
            + "; ".join(f"{name}: {refusal(split, name)}" for name in STRATEGIES)
        )
    work = split.heads / split.kv_heads * split.part / 2  # FLOPs of a ring step per byte sent
    if able == ["ulysses"]:
        chosen = "ulysses"
        why = f"ring and allgather are not possible: {refusal(split, 'ring')}"
    elif (exchanges := _exchanges(split)) < split.ways - 1:
        chosen = "ring"
        needed = count(exchanges, "ring exchange")
        why = f"a window of {split.mask.window} tokens needs only {needed}"
    elif work >= split.flops_per_byte:
        chosen = "ring"
        why = (
            f"a ring step has {work:,.0f} FLOPs per byte sent, and the machine needs "
            f"{split.flops_per_byte:,.0f} to hide the transfer"
        )
    elif "ulysses" in able and split.ways > 1 + split.heads / split.kv_heads:
        chosen = "ulysses"
        why = (
            f"{split.part} tokens per device are too few to hide a ring exchange, and an "
            f"all-to-all of heads sends less than keys to {split.ways} devices"
        )
    else:
        chosen = "allgather"
        why = (
            f"{split.part} tokens per device are too few to hide a ring exchange, and keys of "
            f"{count(split.kv_heads, 'head')} are small"
        )
    _log.info("context parallelism: %s (%s)", chosen, why)
    return chosen, why
