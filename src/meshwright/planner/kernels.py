"""Which kernel computes attention under a choice, and what that costs."""

import functools

from meshwright.machines import Machine
from meshwright.models import Attention
from meshwright.ops.attention import Split, calls_of, padding, slow_kernel
from meshwright.planner import efficiency
from meshwright.planner.parts import keys_seen, splits_of, strategy_of
from meshwright.planner.result import Choice, Job
from meshwright.planner.sizes import StackSizes

Kernel = tuple[tuple[str, str] | None, float]


def slow_attention(job: Job, choice: Choice, machine: Machine) -> tuple[str, str] | None:
    """The kernel that is used where no fused one can be, and why; None where one can."""
    return next((slow for slow, _ in _kernels(job, choice, machine) if slow is not None), None)


def plain_attention(
    job: Job, choice: Choice, machine: Machine
) -> list[tuple[StackSizes, Attention, Split]]:
    """Those of splits_of that no fused kernel computes."""
    kernels = zip(splits_of(job, choice), _kernels(job, choice, machine), strict=True)
    return [one for one, (slow, _) in kernels if slow is not None]


def attention_slowdown(job: Job, choice: Choice, machine: Machine, index: int = 0) -> float:
    """How much longer an attention takes than in a fused kernel at its own lengths.

    `index` is that of the attention in splits_of.
    """
    _, attention, split = splits_of(job, choice)[index]
    slow, padded = _kernels(job, choice, machine)[index]
    if slow is None:
        return padded
    # plain JAX computes all keys, also those outside a window; a causal mask sees half of them
    keys = split.keys or split.length
    masked = 1 if split.mask.causal else 2
    computed = keys * masked / 2 / keys_seen(attention, split.length, keys)
    return efficiency.PLAIN_ATTENTION[machine.chip.platform] * computed


def _kernels(job: Job, choice: Choice, machine: Machine) -> tuple[Kernel, ...]:
    """Of each of splits_of, its slow kernel, and how much longer padding makes it take."""
    chip, strategy = machine.chip, strategy_of(job, choice)
    if job.schedule.fused_attention:  # scaled_dot_product_attention
        return ((None, 1.0),) * len(splits_of(job, choice))
    key = choice.size("tp"), choice.size("sp"), strategy, chip.name
    found: tuple[Kernel, ...] | None = job.kernels.get(key)
    if found is None:
        call = strategy, chip.platform, chip.device_kinds[0], job.dtype, job.attention
        found = job.kernels[key] = tuple(
            _kernel(split, *call, job.documents) for _, _, split in splits_of(job, choice)
        )
    return found


@functools.lru_cache(maxsize=4096)
def _kernel(
    split: Split, strategy: str, platform: str, kind: str, dtype: str, kernel: str, segmented: bool
) -> Kernel:
    if platform == "cpu":
        return None, 1.0
    calls = calls_of(split, strategy, platform, dtype, segmented=segmented)
    return slow_kernel(calls, kernel, kind), padding(calls, kernel, kind)
