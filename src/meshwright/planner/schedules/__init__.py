"""How programs run a step: XLA's train step, PyTorch's FSDP2, the inference engine."""

from meshwright.planner.schedules import engine, fsdp2, fsdp2_memory, jax
from meshwright.planner.step import Schedule

FSDP2 = Schedule(
    meshes=fsdp2.meshes,
    refusal=fsdp2.refusal,
    remat=lambda policies: {name: policies[name] for name in ("none", "full")},
    kinds=fsdp2_memory.KINDS,
    always=fsdp2_memory.always,
    peaks=fsdp2_memory.peaks,
    written=fsdp2.collectives,
    compiled=lambda step, written: written,
    work=fsdp2.work,
    seconds=lambda step, links: {**step.work.seconds, "waiting for links": links},
    fused_attention=True,
    hides_sums_over_hosts=True,
)


def schedule_of(kind: str, backend: str) -> Schedule:
    """The schedule of training or serving with a backend."""
    if kind == "serve":
        return engine.SCHEDULE
    return FSDP2 if backend == "torch" else jax.SCHEDULE
