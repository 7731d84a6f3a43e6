"""Which jobs, machines and meshes the PyTorch backend has."""

from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.arithmetic import divisors
from meshwright.errors import MeshwrightError
from meshwright.machines import Machine
from meshwright.models import DecoderConfig
from meshwright.planner.result import Choice, Job


def check_backend(job: Job, machine: Machine) -> None:
    """Raise if PyTorch cannot run a job, on whatever mesh."""
    if machine.is_tpu:
        raise MeshwrightError(
            f"'{machine}' is a TPU machine, and the PyTorch backend runs on GPUs and CPUs; plan "
            "for h100:8 or another GPU, or leave out --backend torch"
        )
    if job.kind == "serve":
        raise MeshwrightError("the PyTorch backend trains; leave out --backend torch to serve")
    if not isinstance(job.model, DecoderConfig):
        raise MeshwrightError(
            f"{job.name or 'the model'} is not a decoder, and the PyTorch backend trains Llama, "
            "Mistral, Qwen 2 and Qwen 3; leave out --backend torch"
        )
    for setting, value, usual in (
        ("optimizer", job.optimizer, "adamw"),
        ("moments", job.moments, "auto"),
        ("matmul", job.matmul, "auto"),
        ("overlap", "on" if job.overlap else "auto", "auto"),
        ("attention", job.attention, "auto"),
    ):
        if value != usual:
            raise MeshwrightError(
                f"{setting}={value} is a setting of the JAX backend; with --backend torch leave "
                "it out"
            )


def meshes(devices: int) -> Iterator[Choice]:
    """Every (dp, fsdp, tp): weights are split over fsdp, and the same along dp (HSDP).

    A data axis alone is always the one that weights are split over.
    """
    for tp in divisors(devices):
        for dp in divisors(devices // tp):
            fsdp = devices // (tp * dp)
            if dp == 1 or fsdp > 1:
                yield Choice(dp=dp, fsdp=fsdp, tp=tp)


def data_axis(limits: tuple[tuple[str, str, int], ...]) -> tuple[tuple[str, str, int], ...]:
    """Limits in which dp stands alone, as PyTorch reads them: weights are split over it."""
    axes = [axis for axis, _, _ in limits]
    for axis, how, size in limits:
        if axis not in ("dp", "fsdp", "tp") and size > 1 and how != "<=":
            raise MeshwrightError(
                f"{axis}{how}{size}: the PyTorch backend has no {axis} axis; its axes are dp, fsdp "
                "and tp"
            )
    if "dp" not in axes or "fsdp" in axes:
        return limits
    alone = (("dp", "=", 1),)
    return alone + tuple(
        ("fsdp" if axis == "dp" else axis, how, size) for axis, how, size in limits
    )


def micro_batches(job: Job, fixed: Mapping[str, Any]) -> Mapping[str, Any]:
    """One micro-batch where parameters are bfloat16, as train requires."""
    if job.param_dtype != "bfloat16":
        return fixed
    if fixed.get("accumulation", 1) > 1:
        raise MeshwrightError(
            f"accumulation={fixed['accumulation']} with parameters in bfloat16: the PyTorch "
            "backend would add up the gradients of micro-batches in bfloat16; leave one out"
        )
    return {**fixed, "accumulation": 1}


def refusal(job: Job, choice: Choice) -> str | None:
    """Why sizes do not divide, in a sentence; None if they do. What fsdp splits need not."""
    model, tp, ranks = job.model, choice.tp, choice.dp * choice.fsdp
    for dim in ("kv_heads", "heads", "mlp"):  # of the vocabulary the last rank may have less
        size = getattr(model, dim)
        if size % tp:
            return f"{dim}={size} cannot be split in tp={tp}"
    if choice.sequence_parallel and job.seq % tp:
        return f"seq={job.seq} cannot be split in tp={tp} by sequence parallelism"
    if job.batch % ranks:
        return f"batch={job.batch} is not divisible by dp·fsdp={ranks}"
    return None
