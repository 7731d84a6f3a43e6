"""How long a step takes: its work, what it sends over which links, and what hides under what.

Weights are all-gathered, and gradients scattered, while a layer computes, as far as the compiler
lets them; ring steps while attention does. What tp sends is needed at once and hides under nothing.
"""

import dataclasses
import functools
from collections.abc import Mapping

from meshwright.planner import efficiency
from meshwright.planner.collective import Collective
from meshwright.planner.links import Link, over
from meshwright.planner.shares import place_axes
from meshwright.planner.step import StepModel, Work
from meshwright.planner.terms import term

_HIDEABLE = ("layer weights", "layer gradients")


@dataclasses.dataclass(frozen=True)
class StepTime:
    """A step: its work and its collectives."""

    work: Work
    seconds: Mapping[str, float]  # by part
    step: float
    waits: list[tuple[Collective, Link, float, str, float]]
    """Seconds of each collective; what could hide how many of them."""
    hidden: Mapping[str, float]  # of the seconds that could hide, by what hides them, the share

    @functools.cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """With the seconds of each that compute hides."""
        return tuple(
            one.timed(link.words, seconds, able * self.hidden.get(place, 0.0))
            for one, link, seconds, place, able in self.waits
        )


def step_time(step: StepModel) -> StepTime:
    """Seconds of a step by part, and its collectives with the links they go over."""
    work = step.work
    placement = place_axes(step.machine, tuple(step.choice.sizes.values()))
    waits: list[tuple[Collective, Link, float, str, float]] = []
    wanted: dict[str, float] = {}  # seconds that could hide, by what they could hide under
    exposed = 0.0
    for one in step.collectives:
        link = over(placement, one.axes)
        each = link.seconds(one.operation, one.bytes) + (one.pieces - 1) * link.latency
        seconds = one.times * each
        exposed += seconds
        place, able = "", 0.0  # needed at once, or sent when no layer computes
        if one.payload in _HIDEABLE or one.operation == "collective-permute":
            place, able = _hides_under(one, link, step)
            able *= seconds
            wanted[place] = wanted.get(place, 0.0) + able
        waits.append((one, link, seconds, place, able))
    room = {
        "forward": efficiency.HIDE_MOST * work.forward,
        "backward": efficiency.HIDE_MOST * work.backward,
        "ring forward": efficiency.HIDE_RING * work.attention_forward,
        "ring backward": efficiency.HIDE_RING * work.attention_backward,
    }
    # what is sent under a GPU's compute slows that down: so much less is gained
    gained = 1.0 - efficiency.SLOWED_BY_SENDING.get(step.machine.chip.platform, 0.0)
    hidden = {
        place: gained * min(1.0, room[place] / seconds)
        for place, seconds in wanted.items()
        if seconds
    }
    exposed -= sum(wanted[place] * share for place, share in hidden.items())
    parts = step.schedule.seconds(step, exposed)
    return StepTime(work, parts, sum(parts.values()), waits, hidden)


def _hides_under(one: Collective, link: Link, step: StepModel) -> tuple[str, float]:
    """Under what it can hide, and how much of it at most."""
    if one.operation == "collective-permute":
        return f"ring {one.phase}", efficiency.HIDE_RING
    between_hosts = one.operation == "all-reduce" and link.network == "host network"
    if between_hosts and not step.schedule.hides_sums_over_hosts:
        return one.phase, efficiency.HIDE_SUMS_OVER_HOSTS
    # under the first layer's all-gathers, and the last layer's sums, no other layer computes
    others = 1.0 - 1.0 / one.layers
    return one.phase, others * efficiency.hides(step.machine.chip, one.operation, step.job.overlap)


def byte_formulas(step: StepModel, collectives: tuple[Collective, ...]) -> list[str]:
    """Of each collective of an estimate, how its bytes came about: `2 bytes · 4,096 tokens · …`.

    "" where the formulas of this Meshwright do not give the estimate's numbers.
    """
    printed = StepModel(step.job, step.choice, step.machine, term).collectives
    if [int(one.bytes.value) for one in printed] != [one.bytes for one in collectives]:
        return [""] * len(collectives)
    return [str(one.bytes) for one in printed]
