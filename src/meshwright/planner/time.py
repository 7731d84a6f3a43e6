"""How long a step takes: its work, what it sends over which links, and what hides under what.

Weights are all-gathered, and gradients scattered, while a layer computes, as far as the compiler
lets them; ring steps while attention does. What tp sends is needed at once and hides under nothing.
"""

import dataclasses
from collections.abc import Mapping

from meshwright.audits import Collective
from meshwright.lazy import cached_property
from meshwright.planner import efficiency
from meshwright.planner.links import Link, over, place_axes
from meshwright.planner.step import StepModel, Work
from meshwright.planner.terms import term, value_of
from meshwright.planner.workload import Choice
from meshwright.present import count

_HIDEABLE = ("layer weights", "layer gradients")
_PLURAL = {
    "all-gather": "all-gathers",
    "reduce-scatter": "reduce-scatters",
    "all-reduce": "all-reduces",
    "collective-permute": "ring steps",
    "all-to-all": "all-to-alls",
}


@dataclasses.dataclass(frozen=True)
class StepTime:
    """A step: its work and its collectives."""

    work: Work
    seconds: Mapping[str, float]  # by part
    step: float
    waits: list[tuple[Collective, Link, float, str, float]]
    """Seconds of each collective; what could hide how many of them."""
    hidden: Mapping[str, float]  # of the seconds that could hide, by what hides them, the share

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """With the seconds of each that compute hides."""
        return tuple(
            one.changed(
                bytes=int(value_of(one.bytes)),
                link=link.words,
                seconds=seconds,
                hidden=able * self.hidden.get(place, 0.0),
            )
            for one, link, seconds, place, able in self.waits
        )

    @cached_property
    def sent(self) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds of what is sent once, and of what each micro-batch sends: all, under "".

        Those that could hide also by what hides them.
        """
        once = {"": 0.0} | dict.fromkeys((place for *_, place, _ in self.waits), 0.0)
        each = dict(once)
        for one, _, seconds, place, able in self.waits:
            part = each if one.payload in _HIDEABLE else once
            part[""] += seconds
            if place:
                part[place] += able
        return once, each


def step_time(step: StepModel) -> StepTime:
    """Seconds of a step by part, and its collectives with the links they go over."""
    work = step.work
    placement = place_axes(step.machine, step.choice.sizes)
    waits: list[tuple[Collective, Link, float, str, float]] = []
    wanted: dict[str, float] = {}  # seconds that could hide, by what they could hide under
    exposed, links = 0.0, placement.links
    for one in step.collectives:
        link = links.get(one.axes) or over(placement, one.axes)
        each = link.seconds(one.operation, one.bytes)
        if one.pieces > 1:
            each += (one.pieces - 1) * link.latency
        seconds = one.times * each
        exposed += seconds
        place, able = "", 0.0  # needed at once, or sent when no layer computes
        if hides(one):
            place, able = _hides_under(one, link, step)
            able *= seconds
            wanted[place] = wanted.get(place, 0.0) + able
        waits.append((one, link, seconds, place, able))
    hidden = _hidden(step, wanted)
    exposed -= sum(wanted[place] * share for place, share in hidden.items())
    parts = step.schedule.seconds(step, exposed)
    return StepTime(work, parts, sum(parts.values()), waits, hidden)


def _hidden(step: StepModel, wanted: Mapping[str, float]) -> dict[str, float]:
    """Of the seconds that could hide, by what hides them, the share that does."""
    work = step.work
    room = {
        "forward": efficiency.HIDE_MOST * work.forward,
        "backward": efficiency.HIDE_MOST * work.backward,
        "ring forward": efficiency.HIDE_RING * work.attention_forward,
        "ring backward": efficiency.HIDE_RING * work.attention_backward,
    }
    chip = step.machine.chip
    return {
        place: efficiency.hidden_share(chip, room[place], seconds)
        for place, seconds in wanted.items()
        if seconds
    }


def least_seconds(step: StepModel, relaxed: StepTime) -> float:
    """Seconds that a step takes at least, by what it would send with the least remat at once.

    Each micro-batch all-gathers the weights of layers anew, and sums their gradients; nothing is
    sent less often.
    """
    times = step.choice.accumulation
    once, each = relaxed.sent
    exposed = once[""] + times * each[""]
    wanted = {place: once[place] + times * each[place] for place in once if place}
    hidden = _hidden(step, wanted)
    exposed -= sum(wanted[place] * share for place, share in hidden.items())
    return float(sum(step.schedule.seconds(step, exposed).values()))


def hides(one: Collective) -> bool:
    """Whether a collective can run while something computes."""
    return one.payload in _HIDEABLE or one.operation == "collective-permute"


def _hides_under(one: Collective, link: Link, step: StepModel) -> tuple[str, float]:
    """Under what it can hide, and how much of it at most."""
    phase = str(one.phase)
    if one.operation == "collective-permute":
        return f"ring {one.phase}", efficiency.HIDE_RING
    between_hosts = one.operation == "all-reduce" and link.network == "host network"
    if between_hosts and not step.schedule.hides_sums_over_hosts:
        return phase, efficiency.HIDE_SUMS_OVER_HOSTS
    # under the first layer's all-gathers, and the last layer's sums, no other layer computes
    others = 1.0 - 1.0 / one.layers
    return phase, others * efficiency.hides(step.machine.chip, one.operation, step.workload.overlap)


def byte_formulas(step: StepModel, collectives: tuple[Collective, ...]) -> list[str]:
    """Of each collective of an estimate, how its bytes came about: `2 bytes · 4,096 tokens · …`.

    "" where the formulas of this Meshwright do not give the estimate's numbers.
    """
    printed = StepModel(step.workload, step.choice, term).collectives
    if [int(one.bytes.value) for one in printed] != [one.bytes for one in collectives]:
        return [""] * len(collectives)
    return [str(one.bytes) for one in printed]


def bound_and_reason(choice: Choice, timing: StepTime) -> tuple[str, str]:
    """What bounds it (compute, memory, axes, or idle), and the sentence."""
    waits: dict[tuple[str, ...], float] = {}
    for one in timing.collectives:
        waits[one.axes] = waits.get(one.axes, 0.0) + one.exposed
    parts, step = timing.seconds, timing.step
    compute = parts["matmuls"] + parts["attention"]
    memory = sum(parts[name] for name in ("elementwise", "loss", "optimizer", "loop over layers"))
    worst = max(waits, key=waits.__getitem__, default=())
    waited = waits.get(worst, 0.0)
    if worst and waited > max(memory, 0.5 * compute):
        return "+".join(worst), (
            f"{_axes(choice, worst)} is network-bound: {_sends(choice, timing, worst)}; "
            f"{_percent(waited, step)} of the step waits for it"
        )
    if parts["idle"] > max(compute, memory, waited):
        idle = _percent(parts["idle"], step)
        return "idle", f"too small to fill the device: nothing runs in {idle} of the step"
    share = f"matmuls {_percent(parts['matmuls'], step)}, attention "
    share += f"{_percent(parts['attention'], step)}"
    if memory > compute:
        return "memory", f"memory-bound: {_percent(memory, step)} of the step; {share}"
    said = f"compute-bound: {share} of the step"
    again = 1 - timing.work.flops / timing.work.computed
    repeats = choice.remat == "mlp" or choice.repeats_layers
    if repeats and again >= 0.005:  # another stack may have room for what ours computes again
        said += f"; remat={choice.remat} makes {100 * again:.0f}% of the FLOPs again"
    if worst and waited > 0.03 * step:
        said += f"; {_percent(waited, step)} waits for {_axes(choice, worst)}"
        said += f" ({_sends(choice, timing, worst)})"
    return "compute", said


def _sends(choice: Choice, timing: StepTime, axes: tuple[str, ...]) -> str:
    """`4 all-reduces x 512 MB a layer over ICI x8, open`: the most waited for kind."""
    over = [one for one in timing.collectives if one.axes == axes]
    worst = max(over, key=lambda one: one.exposed)
    operation, size, layers = worst.operation, worst.bytes, worst.layers
    alike = operation, size, layers, worst.stack
    times = sum(
        one.times for one in over if (one.operation, one.bytes, one.layers, one.stack) == alike
    )
    many, where = times, "a step"
    if layers:
        many, where = times // (layers * choice.accumulation), "a layer"
        where += f" of the {worst.stack}" if worst.stack else ""
    words = _PLURAL[operation] if many > 1 else operation
    micro = ""
    if choice.accumulation > 1 and layers:
        micro = f" and micro-batch, {count(choice.accumulation, 'micro-batch')},"
    return f"{many} {words} x {_size(size)} {where}{micro} over {worst.link}"


def _axes(choice: Choice, axes: tuple[str, ...]) -> str:
    return " · ".join(f"{axis}={choice.sizes[axis]}" for axis in axes)


def _size(size: float) -> str:
    for unit, worth in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= worth:
            value = size / worth
            return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"
    return f"{size:.0f} bytes"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%"
