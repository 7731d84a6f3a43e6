"""How long a step takes: its work, what it sends over which links, and what hides under what.

Weights are all-gathered, and gradients scattered, while a layer computes, as far as the compiler
lets them; ring steps while attention does. What tp sends is needed at once and hides under nothing.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

from meshwright.machines import Machine
from meshwright.models import OFFLOAD
from meshwright.planner import efficiency
from meshwright.planner.links import Link, over
from meshwright.planner.memory import offloaded
from meshwright.planner.result import Choice, Estimate, Job, Transfer
from meshwright.planner.rewrites import compiled_sends
from meshwright.planner.serving import sends as serving_sends
from meshwright.planner.shares import place_axes
from meshwright.planner.terms import term
from meshwright.planner.traffic import Carries, Send
from meshwright.planner.work import Work, work

_HIDEABLE = (Carries.LAYER_WEIGHTS, Carries.LAYER_GRADIENTS)


class TimedSend(NamedTuple):
    """A kind of collective with its link, its seconds, and those that compute hides."""

    send: Send
    link: Link
    seconds: float
    hidden: float

    @property
    def exposed(self) -> float:
        return self.seconds - self.hidden


@dataclasses.dataclass(frozen=True)
class StepTime:
    """A step: its work and its collectives."""

    work: Work
    seconds: Mapping[str, float]  # by part
    step: float
    waits: list[tuple[Send, Link, float, str, float]]  # seconds; what could hide how many of them
    hidden: Mapping[str, float]  # of the seconds that could hide, by what hides them, the share

    @functools.cached_property
    def sends(self) -> tuple[TimedSend, ...]:
        """Its collectives, each with the seconds that compute hides."""
        return tuple(
            TimedSend(send, link, seconds, able * self.hidden.get(place, 0.0))
            for send, link, seconds, place, able in self.waits
        )


def step_time(job: Job, choice: Choice, machine: Machine, done: Work | None = None) -> StepTime:
    """The step of a choice on a machine; `done` is its work, where that is known already."""
    done = work(job, choice, machine) if done is None else done
    placement = place_axes(machine, (choice.dp, choice.fsdp, choice.tp, choice.sp))
    waits: list[tuple[Send, Link, float, str, float]] = []
    wanted: dict[str, float] = {}  # seconds that could hide, by what they could hide under
    exposed = 0.0
    for send in compiled_sends(job, choice, machine):
        link = over(placement, send.axes)
        each = link.seconds(send.operation, send.bytes) + (send.pieces - 1) * link.latency
        seconds = send.times * each
        exposed += seconds
        place, able = "", 0.0  # needed at once, or sent when no layer computes
        if send.carries in _HIDEABLE or send.operation == "collective-permute":
            place, able = _hides_under(send, link, machine, job)
            able *= seconds
            wanted[place] = wanted.get(place, 0.0) + able
        waits.append((send, link, seconds, place, able))
    room = {
        "forward": efficiency.HIDE_MOST * done.forward,
        "backward": efficiency.HIDE_MOST * done.backward,
        "ring forward": efficiency.HIDE_RING * done.attention_forward,
        "ring backward": efficiency.HIDE_RING * done.attention_backward,
    }
    # what is sent under a GPU's compute slows that down: so much less is gained
    gained = 1.0 - efficiency.SLOWED_BY_SENDING.get(machine.chip.platform, 0.0)
    hidden = {
        place: gained * min(1.0, room[place] / seconds)
        for place, seconds in wanted.items()
        if seconds
    }
    exposed -= sum(wanted[place] * share for place, share in hidden.items())
    parts = {**done.seconds, "waiting for links": exposed}
    if choice.remat == OFFLOAD:
        parts["waiting for the host"] = _waiting_for_host(job, choice, machine, done)
    return StepTime(done, parts, sum(parts.values()), waits, hidden)


def _waiting_for_host(job: Job, choice: Choice, machine: Machine, done: Work) -> float:
    """Seconds in which activations go to the host's memory, or come back, and nothing computes."""
    bandwidth = machine.chip.host_link_bandwidth or efficiency.UNKNOWN_HOST_LINK
    rate = efficiency.HOST_LINK * bandwidth / machine.chip.cores_per_chip
    seconds = choice.accumulation * offloaded(job, choice, machine) / rate
    passes = {"forward": done.forward, "backward": done.backward}
    room = {name: efficiency.HIDE_OFFLOADED[name] * computes for name, computes in passes.items()}
    return sum(max(0.0, seconds - hidden) for hidden in room.values())


def _hides_under(send: Send, link: Link, machine: Machine, job: Job) -> tuple[str, float]:
    """Under what it can hide, and how much of it at most."""
    if send.operation == "collective-permute":
        return f"ring {send.phase}", efficiency.HIDE_RING
    if send.operation == "all-reduce" and link.network == "host network" and job.backend == "jax":
        return send.phase, efficiency.HIDE_SUMS_OVER_HOSTS
    # under the first layer's all-gathers, and the last layer's sums, no other layer computes
    others = 1.0 - 1.0 / send.layers
    return send.phase, others * efficiency.hides(machine.chip, send.operation, job.overlap)


def transfers(timing: StepTime) -> tuple[Transfer, ...]:
    """The collectives of a step as a plan shows them."""
    return tuple(
        timed.send.transfer(timed.link.words, timed.seconds, timed.hidden) for timed in timing.sends
    )


def formulas(job: Job, estimate: Estimate, machine: Machine) -> list[str]:
    """Of each transfer of an estimate, how its bytes came about: `2 bytes · 4,096 tokens · …`.

    "" where the formulas of this Meshwright do not give the estimate's numbers.
    """
    of_kind = compiled_sends if job.kind == "train" else serving_sends
    sends = of_kind(job, estimate.choice, machine, term)
    if [int(send.bytes.value) for send in sends] != [one.bytes for one in estimate.transfers]:
        return [""] * len(estimate.transfers)
    return [str(send.bytes) for send in sends]
