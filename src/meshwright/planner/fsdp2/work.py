"""Bytes that a step of the PyTorch backend reads and writes beside its matmuls.

Compiled blocks fuse as XLA's do, and take the same constants (planner/efficiency.py). Without
torch.compile each operator reads and writes its arrays.
"""

from meshwright.planner import efficiency
from meshwright.planner.fsdp2.groups import block_group, root_group
from meshwright.planner.parts import item_bytes
from meshwright.planner.result import Choice, Job


def elementwise_numbers(job: Job) -> tuple[float, float, float]:
    """Activations read and written of a token and layer, in numbers of embed, heads and mlp."""
    if job.compiled:
        return (
            efficiency.ELEMENTWISE_EMBED,
            efficiency.ELEMENTWISE_HEADS,
            efficiency.ELEMENTWISE_MLP,
        )
    return efficiency.EAGER_EMBED, efficiency.EAGER_HEADS, efficiency.EAGER_MLP


def loss_numbers(job: Job, choice: Choice) -> float:
    """Times the logits are read or written."""
    split = job.loss_parallel and choice.tp > 1
    if job.compiled:
        return efficiency.SPLIT_LOSS_LOGITS if split else efficiency.LOSS_LOGITS
    return efficiency.EAGER_SPLIT_LOSS_LOGITS if split else efficiency.EAGER_LOSS_LOGITS


def copied_bytes(job: Job, choice: Choice) -> float:
    """What FSDP2 copies between parameters and the buffers that it sends, in a step.

    An all-gathered array is read and written into its parameters, a gradient into a buffer of
    float32.
    """
    item, four = item_bytes(job.dtype), 4
    block = block_group(job.model, choice.tp, choice.fsdp).whole * job.model.layers
    root = root_group(job.model, choice.tp, choice.fsdp).whole
    times = 2 if job.reshard_after_forward and choice.fsdp > 1 else 1
    copies = (times * block + root) * 2 * item + (block + root) * (item + four)
    return float(copies * choice.accumulation)
