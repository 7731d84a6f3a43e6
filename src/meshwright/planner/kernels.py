"""Which kernel computes attention under a choice, and what that costs."""

import functools
from typing import Any

from meshwright.machines import Machine
from meshwright.ops.attention import Split, calls_of, padding, slow_kernel
from meshwright.planner import efficiency
from meshwright.planner.parts import split_of, strategy_of
from meshwright.planner.result import Choice, Job


def slow_attention(job: Job, choice: Choice, machine: Machine) -> tuple[str, str] | None:
    """The kernel that is used where no fused one can be, and why; None where one can."""
    return _kernel(*_asked(job, choice, machine))[0]


def attention_slowdown(job: Job, choice: Choice, machine: Machine) -> float:
    """How much longer attention takes than in a fused kernel at its own lengths."""
    slow, padded = _kernel(*_asked(job, choice, machine))
    if slow is None:
        return padded
    # plain JAX computes all keys, also those outside a window; a causal mask sees half of them
    computed = job.seq / 2 / job.model.keys_seen(job.seq)
    return efficiency.PLAIN_ATTENTION[machine.chip.platform] * computed


def _asked(job: Job, choice: Choice, machine: Machine) -> tuple[Any, ...]:
    chip = machine.chip
    return (
        split_of(job, choice), strategy_of(job, choice), chip.platform, chip.device_kinds[0],
        job.dtype, job.attention, job.documents,
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _kernel(
    split: Split, strategy: str, platform: str, kind: str, dtype: str, kernel: str, segmented: bool
) -> tuple[tuple[str, str] | None, float]:
    if platform == "cpu":
        return None, 1.0
    calls = calls_of(split, strategy, platform, dtype, segmented=segmented)
    return slow_kernel(calls, kernel, kind), padding(calls, kernel, kind)
