"""The schedule of the built-in train step, which XLA compiles."""

from collections.abc import Mapping

from meshwright.models import OFFLOAD, indivisible
from meshwright.planner import candidates, compilers, efficiency
from meshwright.planner.memory import offloaded
from meshwright.planner.parts import standard_rules
from meshwright.planner.result import Choice, Job
from meshwright.planner.schedules import jax_collectives, jax_memory
from meshwright.planner.step import Schedule, StepModel
from meshwright.planner.terms import Number
from meshwright.planner.work import train_work


def refusal(job: Job, choice: Choice) -> str | None:
    """Why sizes do not divide, in a sentence; None if they do."""
    rules = standard_rules(job.model, choice.sequence_parallel)
    return indivisible(job.model, rules, choice.sizes, job.batch, job.seq, choice.accumulation)


def seconds(step: StepModel, links: Number) -> Mapping[str, Number]:
    """The work of a step, and what is waited for."""
    parts = {**step.work.seconds, "waiting for links": links}
    if step.choice.remat == OFFLOAD:
        parts["waiting for the host"] = _waiting_for_host(step)
    return parts


def _waiting_for_host(step: StepModel) -> float:
    """Seconds in which activations go to the host's memory, or come back, and nothing computes."""
    chip = step.machine.chip
    bandwidth = chip.host_link_bandwidth or efficiency.UNKNOWN_HOST_LINK
    rate = efficiency.HOST_LINK * bandwidth / chip.cores_per_chip
    seconds = step.choice.accumulation * offloaded(step) / rate
    passes = {"forward": step.work.forward, "backward": step.work.backward}
    room = {name: efficiency.HIDE_OFFLOADED[name] * computes for name, computes in passes.items()}
    return sum(max(0.0, seconds - hidden) for hidden in room.values())


SCHEDULE = Schedule(
    meshes=candidates.meshes,
    refusal=refusal,
    remat=lambda policies: policies,
    kinds=jax_memory.KINDS,
    always=jax_memory.always,
    peaks=jax_memory.peaks,
    written=jax_collectives.collectives,
    compiled=compilers.rewritten,
    work=train_work,
    seconds=seconds,
    chunks_mlp=True,
)
