"""What one device computes in a train step, and how long that takes if nothing is waited for."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from meshwright.machines import Machine
from meshwright.models import OFFLOAD, family_of
from meshwright.ops.attention import backward_kernels
from meshwright.planner import efficiency
from meshwright.planner.kernels import attention_slowdown
from meshwright.planner.parts import (
    item_bytes,
    keys_seen,
    sequences,
    splits_of,
    strategy_of,
    vocab,
)
from meshwright.planner.result import Choice, Job
from meshwright.planner.sizes import BlockSizes, Matrix, StackSizes
from meshwright.planner.step import StepModel, Work


@dataclasses.dataclass
class _Passes:
    """FLOPs and seconds of one kind of work, summed over layers."""

    computed: float = 0.0
    forward: float = 0.0
    backward: float = 0.0


def train_work(
    step: StepModel,
    elementwise: tuple[float, float, float] = (
        efficiency.ELEMENTWISE_EMBED,
        efficiency.ELEMENTWISE_HEADS,
        efficiency.ELEMENTWISE_MLP,
    ),
    loss_numbers: float = efficiency.LOSS_LOGITS,
    copied: Mapping[str, float] = MappingProxyType({}),
) -> Work:
    """The work of a train step on each device.

    Arguments:
        elementwise: activations read and written of a token and layer, in numbers of embed, heads
            and mlp.
        loss_numbers: times the logits are read or written.
        copied: by part, bytes that are copied.
    """
    job, choice, machine = step.job, step.choice, step.machine
    chip, sizes = machine.chip, job.sizes
    memory = chip.memory_bandwidth / chip.cores_per_chip * efficiency.MEMORY
    item, micro_batches, tp = item_bytes(job.dtype), choice.accumulation, choice.size("tp")
    saved = job.remat[choice.remat]
    known, on_device = job.lengths, sequences(job, choice)
    matmuls, moved = _Passes(), 0.0
    weights_read = 0.0
    between = tp if choice.sequence_parallel else 1
    of_embed, of_heads, of_mlp = elementwise
    repeated = 1 + efficiency.ELEMENTWISE_AGAIN[choice.remat]
    for stack in sizes.stacks:
        tokens = on_device * (known[stack.field] // choice.size("sp"))
        for block in stack.blocks:
            _add_matmuls(matmuls, job, choice, machine, (stack, block, saved))
        numbers = (
            of_embed * sizes.embed / between
            + of_heads * _heads(stack) / tp
            + of_mlp * stack.mlp.inner / tp
        )
        moved += item * numbers * stack.layers * tokens * micro_batches * repeated
        weights_read += item * stack.weights / tp * stack.layers * micro_batches * 3
    attention = _attention(job, choice, machine, again="attention" not in saved)
    tokens = on_device * (known["tokens"] // choice.size("sp"))
    vocab_on_device = vocab(job, choice) / tp
    head_flops, head_seconds = _matmul(
        job, choice, machine, (vocab_on_device * sizes.embed, vocab_on_device, tokens),
        2.0 + sizes.trains_head,
    )  # fmt: skip
    logits = item * loss_numbers * vocab_on_device * tokens * micro_batches
    stored = sizes.trained_parameters / (choice.size("fsdp", "sp") * tp)
    fewer = 4 - item_bytes(job.moments_dtype) if job.moments != "auto" else 0
    moments = efficiency.MOMENTS_READ_AND_WRITTEN[job.optimizer]
    update = (efficiency.OPTIMIZER_BYTES[job.optimizer] - fewer * moments) * stored
    if micro_batches > 1:
        update += efficiency.ACCUMULATION_BYTES * stored * micro_batches
    scan = 1.0
    if job.scan or choice.remat == OFFLOAD:  # which needs the loop
        scan = efficiency.SCAN_TPU if machine.is_tpu else efficiency.SCAN_GPU
    seconds = {
        "matmuls": matmuls.forward + matmuls.backward + head_seconds,
        "attention": attention.forward + attention.backward,
        "elementwise": moved / memory,
        "loss": logits / memory,
        "optimizer": update / memory,
        **{part: size / memory for part, size in copied.items()},
    }
    layers = matmuls.forward + matmuls.backward + seconds["attention"] + seconds["elementwise"]
    seconds["loop over layers"] = (scan - 1) * layers
    seconds["idle"] = efficiency.IDLE_STEP
    return Work(
        flops=family_of(job.model).flops(job.model, known) * job.batch / choice.devices,
        computed=matmuls.computed + head_flops + attention.computed,
        memory_bytes=moved + logits + update + weights_read,
        seconds=seconds,
        forward=matmuls.forward + attention.forward + seconds["elementwise"] / 3,
        backward=matmuls.backward + attention.backward + seconds["elementwise"] * 2 / 3,
        attention_forward=attention.forward,
        attention_backward=attention.backward,
    )


def _matmul(
    job: Job, choice: Choice, machine: Machine, shape: tuple[float, float, int], passes: float
) -> tuple[float, float]:
    """FLOPs and seconds of all micro-batches: (weights on a device, smaller side, tokens)."""
    weights, side, tokens = shape
    chip, item, micro_batches = machine.chip, item_bytes(job.dtype), choice.accumulation
    peak = chip.bf16_flops / chip.cores_per_chip
    memory = chip.memory_bandwidth / chip.cores_per_chip * efficiency.MEMORY
    flops = 2.0 * weights * tokens * micro_batches * passes
    rate = peak * efficiency.matmul(chip, min(side, tokens))
    reading = item * weights * passes * micro_batches / memory
    return flops, max(flops / rate, reading)


def _add_matmuls(
    total: _Passes,
    job: Job,
    choice: Choice,
    machine: Machine,
    part: tuple[StackSizes, BlockSizes, frozenset[str]],
) -> None:
    """Add the matmuls of a block in all layers of its stack; `part` has what is saved last."""
    stack, block, saved = part
    known, on_device = job.lengths, sequences(job, choice)
    side = min(block.inner / choice.size("tp"), job.sizes.embed)
    keys_from = block.attention.keys_from if block.attention else ""
    by_field: dict[str, list[Matrix]] = {}
    for matrix in block.matrices:
        field = keys_from if matrix.of_keys and keys_from else stack.field
        by_field.setdefault(field, []).append(matrix)
    for field, matrices in by_field.items():
        tokens = on_device * (known[field] // choice.size("sp"))
        weights = sum(one.weights for one in matrices)
        # a matmul is computed again unless what it makes is saved
        repeated = sum(one.weights for one in matrices if one.output and one.output not in saved)
        trained = sum(one.weights for one in matrices if one.trained_layers)
        shape = weights / choice.size("tp"), side, tokens
        flops, forward = _matmul(job, choice, machine, shape, 1.0)
        passes = 1.0 + trained / weights + repeated / weights
        more, backward = _matmul(job, choice, machine, shape, passes)
        in_fp8 = job.fp8_layers(stack.layers)
        layers = stack.layers - in_fp8 + in_fp8 / efficiency.fp8(machine.chip, min(side, tokens))
        total.computed += stack.layers * (flops + more)
        total.forward += layers * forward
        total.backward += layers * backward


def _heads(stack: StackSizes) -> int:
    """heads × head_dim of all attention of a layer."""
    return sum(block.inner for block in stack.blocks if block.attention)


def _attention(job: Job, choice: Choice, machine: Machine, again: bool) -> _Passes:
    """Attention by the number of keys seen: 2 matmuls forward, 4 backward, 2 if computed again."""
    chip, total = machine.chip, _Passes()
    peak = chip.bf16_flops / chip.cores_per_chip
    on_device = sequences(job, choice) * choice.accumulation
    for index, (stack, attention, split) in enumerate(splits_of(job, choice)):
        keys = split.keys or split.length
        tokens = on_device * split.part
        unit = stack.layers * split.heads * split.head_dim * 2.0
        unit *= keys_seen(attention, split.length, keys) * tokens
        rate = peak * efficiency.attention(chip, split.head_dim, keys)
        if strategy_of(job, choice) in ("ring", "allgather"):
            rate *= efficiency.ring_steps(split.part)
        rate /= attention_slowdown(job, choice, machine, index)
        # on TPUs the backward pass over long parts of sequences: 7 matmuls instead of 5
        two_kernels = machine.is_tpu and backward_kernels(split.part) == 2
        total.forward += 2 * unit / rate
        total.backward += (4 * (7 / 5 if two_kernels else 1.0) + 2 * again) * unit / rate
        total.computed += (6 + 2 * again) * unit
    return total
