"""What other training stacks reach: how fast they are, over our own step on the same mesh.

    like("megatron", CHIPS["h100"], "fp8", 8192).matmul

A plan is of our own step. With `--like STACK` its matmuls and attention take as long as that
stack's published results say; mesh, memory and links stay ours. Every number is *fitted*, to the
results of benchmarks/published.json that are marked `fit`, by benchmarks/published.py --fit; the
others judge it (RESULTS.md, Published training results).
"""

import dataclasses
from collections.abc import Mapping

from meshwright.errors import MeshwrightError, did_you_mean, one_of
from meshwright.machines import CHIPS, Chip


@dataclasses.dataclass(frozen=True)
class Stack:
    """How fast a stack is, over our own step."""

    name: str = ""  # "": our own
    matmul: float = 1.0
    attention: float = 1.0
    ring_step: float = 0.0  # of attention's time, what each device more along sp adds
    recomputes: bool = True  # False: pipeline stages leave room for all activations

    def attention_speed(self, ways: int) -> float:
        """Of attention whose sequences are split over so many devices."""
        return self.attention / (1 + self.ring_step * (ways - 1))


OURS = Stack()


@dataclasses.dataclass(frozen=True)
class Results:
    """Of one stack on some chips."""

    chips: tuple[str, ...]
    matmul: Mapping[str, float]  # by precision
    attention: float = 1.0
    ring_step: float = 0.0
    long: bool = False  # whether there are results of long sequences


LONG = 32768  # tokens, from which a sequence is long
BF16, FP8 = "bf16", "fp8"
_HOPPER = ("h100", "h200", "a3-high", "a3-mega")
RECOMPUTES = {"torchtitan": True, "megatron": False, "maxtext": True}
STACKS: Mapping[str, tuple[Results, ...]] = {
    "torchtitan": (
        Results(("a100-80", "a100-40"), {BF16: 1.05}),
        Results(("h100-500w",), {BF16: 1.03, FP8: 1.05}, attention=0.67, ring_step=0.08, long=True),
        Results(("h100", "h200"), {FP8: 0.71}),
    ),
    "megatron": (
        Results(_HOPPER, {BF16: 1.10, FP8: 1.06}, attention=0.80, long=True),
        Results(("b200",), {FP8: 1.01}, attention=0.82, long=True),
        Results(("gb200",), {FP8: 0.85}),
        Results(("gb300",), {FP8: 1.11}),
    ),
    "maxtext": (
        Results(_HOPPER, {BF16: 1.02, FP8: 1.24}),
        Results(("v6e",), {BF16: 0.90}),
        Results(("v5p",), {BF16: 0.99}),
        Results(("7x",), {BF16: 0.97, FP8: 1.02}, long=True),
    ),
}


def like(name: str, chip: Chip, matmul: str, seq: int) -> Stack:
    """A stack on a chip, with matmuls in fp8 or not; an error if no result is known.

    `seq`: tokens of a sequence; of long ones there must be results too.
    """
    if name not in STACKS:
        raise MeshwrightError(f"--like {name!r} is not a stack{did_you_mean(name, STACKS)}")
    precision = FP8 if matmul == "fp8" else BF16
    here = [one for one in STACKS[name] if chip.kind in one.chips]
    for one in here:
        if precision in one.matmul and (one.long or seq < LONG):
            speeds = one.matmul[precision], one.attention, one.ring_step
            return Stack(name, *speeds, RECOMPUTES[name])
    if not here:
        known = {each for one in STACKS[name] for each in one.chips}
        chips = one_of(each for each in CHIPS if each in known)
        why = f"no published result on {chip.name} is known; there are some on {chips}"
    elif alike := [one for one in here if precision in one.matmul]:
        assert not any(one.long for one in alike)
        why = (
            f"no published result on {chip.name} has sequences of {LONG:,} tokens or more in "
            f"{precision}; give shorter ones"
        )
    else:
        there = one_of(sorted({each for one in here for each in one.matmul}))
        why = f"no published result on {chip.name} is in {precision}; there are some in {there}"
    raise MeshwrightError(f"--like {name}: {why}")
