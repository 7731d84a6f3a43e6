"""How long a step takes: its work, what it sends over which links, and what hides under what.

Weights are gathered, and gradients scattered, while a layer computes, as far as the compiler lets
them; hops of a ring while attention does. What tp sends is needed at once and hides under nothing.
"""

import dataclasses
from collections.abc import Mapping

from meshwright.machines import Machine
from meshwright.planner import efficiency
from meshwright.planner.links import Link, over
from meshwright.planner.result import Choice, Job, Transfer
from meshwright.planner.rewrites import compiled_rows
from meshwright.planner.shares import place_axes
from meshwright.planner.traffic import Row
from meshwright.planner.work import Work, work


@dataclasses.dataclass(frozen=True)
class StepTime:
    """A step: its work, each row of its traffic with link, seconds and hidden seconds."""

    work: Work
    rows: tuple[tuple[Row, Link, float, float], ...]
    seconds: Mapping[str, float]
    step: float


def step_time(job: Job, choice: Choice, machine: Machine, done: Work | None = None) -> StepTime:
    """The step of a choice on a machine; its work, where that is known already, need not be."""
    done = work(job, choice, machine) if done is None else done
    laid = place_axes(machine, (choice.dp, choice.fsdp, choice.tp, choice.sp))
    priced = []
    wanted: dict[str, float] = {}  # seconds that could hide, by what they could hide under
    for row in compiled_rows(job, choice, machine):
        _, operation, axes, size, times, _, pieces, _, _ = row
        link = over(laid, axes)
        seconds = times * (link.seconds(operation, size) + (pieces - 1) * link.latency)
        place, able = _hides_under(row, link, machine, job)
        wanted[place] = wanted.get(place, 0.0) + seconds * able
        priced.append((row, link, seconds, place, seconds * able))
    room = {
        "nothing": 0.0,
        "forward": efficiency.HIDE_MOST * done.forward,
        "backward": efficiency.HIDE_MOST * done.backward,
        "ring forward": efficiency.HIDE_RING * done.attention_forward,
        "ring backward": efficiency.HIDE_RING * done.attention_backward,
    }
    share = {
        place: min(1.0, room[place] / seconds) if seconds else 0.0
        for place, seconds in wanted.items()
    }
    # what is sent under a GPU's compute slows that down: so much less is gained
    gained = 1.0 - efficiency.SLOWED_BY_SENDING.get(machine.chip.platform, 0.0)
    rows = tuple(
        (row, link, seconds, able * share[place] * gained)
        for row, link, seconds, place, able in priced
    )
    exposed = sum(seconds - under for _, _, seconds, under in rows)
    parts = {**done.seconds, "waiting for links": exposed}
    return StepTime(done, rows, parts, sum(parts.values()))


def _hides_under(row: Row, link: Link, machine: Machine, job: Job) -> tuple[str, float]:
    """Under what it can hide, and how much of it at most."""
    _, operation, _, _, _, phase, _, _, part = row
    if operation == "collective-permute":
        return f"ring {phase}", efficiency.HIDE_RING
    # activations are needed at once; what the step sends once comes when no layer computes
    if part != "weights":
        return "nothing", 0.0
    if operation == "all-reduce" and link.network == "host network":
        return phase, efficiency.HIDE_SUMS_OVER_HOSTS
    # under the first layer's gathers, and the last layer's sums, no other layer computes
    others = 1.0 - 1.0 / job.model.layers
    return phase, others * efficiency.hides(machine.chip, operation, job.overlap)


def transfers(timing: StepTime) -> tuple[Transfer, ...]:
    """The rows as a plan shows them."""
    return tuple(
        Transfer(*row[:7], link=link.words, seconds=seconds, hidden=hidden, formula=row[7])
        for row, link, seconds, hidden in timing.rows
    )
