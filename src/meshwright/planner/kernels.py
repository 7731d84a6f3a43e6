"""Which kernel computes attention under a choice, and what that costs."""

import functools
from typing import Any

from meshwright.machines import Machine
from meshwright.models import Attention
from meshwright.ops.attention import Split, calls_of, padding, slow_kernel
from meshwright.planner import efficiency
from meshwright.planner.parts import keys_seen, splits_of, strategy_of
from meshwright.planner.result import Choice, Job
from meshwright.planner.sizes import StackSizes


def slow_attention(job: Job, choice: Choice, machine: Machine) -> tuple[str, str] | None:
    """The kernel that is used where no fused one can be, and why; None where one can."""
    kernels = (_kernel_of(job, choice, machine, split) for _, _, split in splits_of(job, choice))
    return next((slow for slow, _ in kernels if slow is not None), None)


def plain_attention(
    job: Job, choice: Choice, machine: Machine
) -> list[tuple[StackSizes, Attention, Split]]:
    """Those of splits_of that no fused kernel computes."""
    return [
        one
        for one in splits_of(job, choice)
        if _kernel_of(job, choice, machine, one[2])[0] is not None
    ]


def attention_slowdown(job: Job, choice: Choice, machine: Machine, index: int = 0) -> float:
    """How much longer an attention takes than in a fused kernel at its own lengths.

    `index` is that of the attention in splits_of.
    """
    _, attention, split = splits_of(job, choice)[index]
    slow, padded = _kernel_of(job, choice, machine, split)
    if slow is None:
        return padded
    # plain JAX computes all keys, also those outside a window; a causal mask sees half of them
    keys = split.keys or split.length
    masked = 1 if split.mask.causal else 2
    computed = keys * masked / 2 / keys_seen(attention, split.length, keys)
    return efficiency.PLAIN_ATTENTION[machine.chip.platform] * computed


def _kernel_of(job: Job, choice: Choice, machine: Machine, split: Split) -> Any:
    chip = machine.chip
    return _kernel(
        split, strategy_of(job, choice), chip.platform, chip.device_kinds[0], job.dtype,
        job.attention, job.documents,
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _kernel(
    split: Split, strategy: str, platform: str, kind: str, dtype: str, kernel: str, segmented: bool
) -> tuple[tuple[str, str] | None, float]:
    if platform == "cpu":
        return None, 1.0
    calls = calls_of(split, strategy, platform, dtype, segmented=segmented)
    return slow_kernel(calls, kernel, kind), padding(calls, kernel, kind)
