"""How programs run a step: XLA's train step, PyTorch's FSDP2, the inference engine."""

import functools

from meshwright.errors import MeshwrightError
from meshwright.planner.schedules import jax
from meshwright.planner.step import Schedule
from meshwright.present import mesh_text


@functools.cache
def _fsdp2() -> Schedule:
    from meshwright.planner.schedules import fsdp2, fsdp2_memory

    return Schedule(
        meshes=fsdp2.meshes,
        refusal=fsdp2.refusal,
        remat=lambda policies: {name: policies[name] for name in ("none", "full")},
        kinds=fsdp2_memory.KINDS,
        always=lambda step: fsdp2_memory.Fsdp2Device(step).always(),
        peaks=lambda step: fsdp2_memory.Fsdp2Device(step).peaks(),
        written=fsdp2.collectives,
        compiled=lambda step, written: written,
        work=fsdp2.work,
        seconds=lambda step, links: {**step.work.seconds, "waiting for links": links},
        check=fsdp2.check,
        narrowed=fsdp2.narrowed,
        mesh_sizes=fsdp2.mesh_sizes,
        # it needs a data axis, and has no sp
        mesh_text=lambda choice: mesh_text(
            {axis: n for axis, n in choice.sizes.items() if n > 1 or axis == "fsdp"}
        ),
        axes=fsdp2.AXES,
        overlaps=fsdp2.overlaps,
        is_proved=False,
        fused_attention=True,
        hides_sums_over_hosts=True,
    )


@functools.cache
def _engine() -> Schedule:
    from meshwright.planner.schedules import engine, engine_time

    return Schedule(
        meshes=engine.meshes,
        held=engine.held,
        check=engine.check,
        refusal=engine.refusal,
        remat=lambda policies: policies,
        kinds=engine.KINDS,
        always=lambda step: {},
        peaks=engine.peaks,
        written=engine.collectives,
        compiled=lambda step, written: written,
        work=engine_time.work,
        seconds=engine_time.seconds,
        splits_experts=True,
    )


def schedule_of(kind: str, backend: str) -> Schedule:
    """The schedule of training or serving with a backend."""
    if kind == "serve":
        if backend != "jax":
            raise MeshwrightError("the PyTorch backend trains; leave out --backend torch to serve")
        return _engine()
    return _fsdp2() if backend == "torch" else jax.SCHEDULE
