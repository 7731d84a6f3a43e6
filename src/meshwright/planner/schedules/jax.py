"""The schedule of the built-in train step, which XLA compiles."""

from collections.abc import Iterator, Mapping

from meshwright.arithmetic import divisors
from meshwright.models import OFFLOAD, indivisible, indivisible_blocks
from meshwright.planner import compilers, efficiency
from meshwright.planner.attention import standard_rules
from meshwright.planner.memory import offloaded
from meshwright.planner.schedules import jax_collectives, jax_memory
from meshwright.planner.step import Schedule, StepModel
from meshwright.planner.terms import Number
from meshwright.planner.work import train_work
from meshwright.planner.workload import Choice, Workload
from meshwright.training import split_capacity


def meshes(devices: int) -> Iterator[Choice]:
    """Every (dp, fsdp, tp, sp) that makes up this many devices; for those of ep, see search."""
    for tp in divisors(devices):
        for sp in divisors(devices // tp):
            for dp in divisors(devices // (tp * sp)):
                yield Choice({"dp": dp, "fsdp": devices // (tp * sp * dp), "tp": tp, "sp": sp})


def refusal(workload: Workload, choice: Choice) -> str | None:
    """Why sizes do not divide, in a sentence; None if they do."""
    splits = {"sp": choice.context > 1, "tp": choice.sequence_parallel and choice.tensor > 1}
    if why := split_capacity(workload.config, [axis for axis, does in splits.items() if does]):
        return why
    rules = standard_rules(workload.model, choice.sizes, choice.sequence_parallel)
    why = indivisible(
        workload.model, rules, choice.sizes, workload.batch, workload.seq, choice.accumulation
    )
    base = workload.config.lora.base
    return why or indivisible_blocks(workload.model, base, rules, choice.sizes)


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
    meshes=meshes,
    refusal=refusal,
    remat=lambda policies: policies,
    kinds=jax_memory.KINDS,
    always=jax_memory.always,
    peaks=jax_memory.peaks,
    written=jax_collectives.collectives,
    compiled=compilers.rewritten,
    work=train_work,
    seconds=seconds,
    scans=True,
    chunks_mlp=True,
    splits_experts=True,
)
