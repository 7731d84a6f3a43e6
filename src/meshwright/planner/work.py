"""What one device computes in a train step, and how long that takes if nothing is waited for."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from meshwright.models import OFFLOAD
from meshwright.ops.attention import backward_kernels
from meshwright.planner import efficiency
from meshwright.planner.attention import attention_slowdown, keys_seen, splits_of
from meshwright.planner.device import ITEM_BYTES, LAYER_BYTES
from meshwright.planner.sizes import BlockSizes, StackSizes, adapter_numbers
from meshwright.planner.step import StepModel, Work
from meshwright.planner.workload import Choice, Workload


@dataclasses.dataclass
class _Passes:
    """FLOPs and seconds of one kind of work, summed over layers."""

    computed: float = 0.0
    forward: float = 0.0
    backward: float = 0.0

    def slow_down(self, speed: float) -> None:
        self.forward /= speed
        self.backward /= speed


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
    workload, choice, machine = step.workload, step.choice, step.machine
    chip, sizes = machine.chip, workload.sizes
    memory = chip.memory_bandwidth / chip.cores_per_chip * efficiency.MEMORY
    item, micro_batches, tp = ITEM_BYTES[workload.dtype], choice.accumulation, choice.tensor
    like = workload.like
    remat = choice.remat if like.recomputes else "none"
    saved = workload.remat[remat]
    known, on_device = workload.lengths, step.device.sequences
    matmuls, moved = _Passes(), 0.0
    weights_read = dequantized = 0.0
    between = tp if choice.sequence_parallel else 1
    of_embed, of_heads, of_mlp = elementwise
    repeated = 1 + efficiency.ELEMENTWISE_AGAIN[remat]
    for stack in sizes.stacks:
        tokens = on_device * (known[stack.field] // choice.context)
        for block in stack.blocks:
            _add_matmuls(matmuls, step, stack, block, saved)
        numbers = (
            of_embed * sizes.embed / between
            + of_heads * _heads(stack) / tp
            + of_mlp * stack.mlp.inner / tp
        )
        if stack.experts is not None:
            numbers += efficiency.DISPATCH * stack.experts.per_token * sizes.embed
        moved += item * numbers * stack.layers * tokens * micro_batches * repeated
        on_device_weights = _weights_used(stack, choice)
        weights_read += item * on_device_weights * stack.layers * micro_batches * 3
        if step.device.quantizes:  # read and written for every matmul
            times = (2 + choice.repeats_layers) * stack.layers * micro_batches
            held = LAYER_BYTES[workload.layers_dtype] + item
            dequantized += held * on_device_weights * times
    attention = _attention(step, again="attention" not in saved)
    tokens = step.device.tokens
    if rank := workload.config.lora.rank:
        sides = 0.0
        for kind, experts in (("matrix", None), ("expert", sizes.experts)):
            numbers = adapter_numbers(workload.model, workload.config.lora, (), (kind,))
            share = 1 if experts is None else experts.per_token / experts.count
            sides += numbers * share / rank / tp
        moved += item * efficiency.ADAPTER_NUMBERS * sides * tokens * micro_batches * repeated
    vocab_on_device = step.device.padded_vocab / tp
    shape = vocab_on_device * sizes.embed, vocab_on_device, tokens
    head_flops, head_seconds = _matmul(step, shape, 2.0 + sizes.trains_head)
    head_seconds /= like.matmul
    matmuls.slow_down(like.matmul)
    attention.slow_down(like.attention_speed(choice.context))
    parts = flops_of_example(workload)
    if workload.has_reference:
        matmuls.forward *= 2
        attention.forward *= 2
        moved += moved / 3 / repeated
        weights_read *= 4 / 3
        # its logits, and the model's own once more: a gradient by token is made of them anew
        again_flops, again_seconds = _matmul(step, shape, 2.0)
        head_flops, head_seconds = head_flops + again_flops / 2, head_seconds + again_seconds
        loss_numbers += 2 * efficiency.LOGITS_FORWARD
    logits = item * loss_numbers * vocab_on_device * tokens * micro_batches
    stored = sizes.trained_parameters / (choice.shards * tp)
    fewer = (
        4 - ITEM_BYTES[workload.moments_dtype] if workload.config.optimizer.moments != "auto" else 0
    )
    moments = efficiency.MOMENTS_READ_AND_WRITTEN[workload.config.optimizer.name]
    update = (efficiency.OPTIMIZER_BYTES[workload.config.optimizer.name] - fewer * moments) * stored
    if micro_batches > 1:
        update += efficiency.ACCUMULATION_BYTES * stored * micro_batches
    scan = 1.0
    if workload.scan or choice.remat == OFFLOAD:  # which needs the loop
        scan = efficiency.SCAN_TPU if machine.is_tpu else efficiency.SCAN_GPU
    seconds = {
        "matmuls": matmuls.forward + matmuls.backward + head_seconds,
        "attention": attention.forward + attention.backward,
        "elementwise": moved / memory,
        "loss": logits / memory,
        "optimizer": update / memory,
        **{part: size / memory for part, size in copied.items()},
        **({"dequantization": dequantized / memory} if dequantized else {}),
    }
    layers = matmuls.forward + matmuls.backward + seconds["attention"] + seconds["elementwise"]
    seconds["loop over layers"] = (scan - 1) * layers
    seconds["idle"] = efficiency.IDLE_STEP
    return Work(
        flops=sum(parts.values()) * workload.batch / choice.devices,
        computed=matmuls.computed
        + head_flops
        + attention.computed
        + parts.get(_REFERENCE, 0.0) * workload.batch / choice.devices,
        memory_bytes=moved + logits + update + weights_read + dequantized,
        seconds=seconds,
        forward=matmuls.forward + attention.forward + seconds["elementwise"] / 3,
        backward=matmuls.backward + attention.backward + seconds["elementwise"] * 2 / 3,
        attention_forward=attention.forward,
        attention_backward=attention.backward,
    )


_REFERENCE = "of the reference's forward pass"


def flops_of_example(workload: Workload) -> dict[str, float]:
    """FLOPs of a training step for one example, by what they are for."""
    parts = {"of the model": workload.flops}
    if workload.has_reference:  # of a step, a third is the forward pass
        parts[_REFERENCE] = workload.flops / 3
    if frozen := _frozen_flops(workload):
        parts["of gradients of weights that are not trained"] = -frozen
    return parts


def _frozen_flops(workload: Workload) -> float:
    """Of an example: what the gradients of weights that are not trained would take."""
    sizes = workload.sizes
    flops = 0.0
    for stack in sizes.stacks:
        flops += 2.0 * stack.layers * stack.frozen_met * workload.lengths[stack.field]
    head = 0 if sizes.trains_head else workload.model.vocab * sizes.embed
    return flops + 2.0 * head * workload.lengths["tokens"]


def _weights_used(stack: StackSizes, choice: Choice) -> float:
    """Of a layer, the weights that a device multiplies with: of experts, its own."""
    elsewhere = stack.expert_weights * (1 - 1 / choice.size("ep"))
    split = stack.weights - stack.whole_weights - elsewhere
    return split / choice.tensor + stack.whole_weights


def _matmul(
    step: StepModel, shape: tuple[float, float, float], passes: float
) -> tuple[float, float]:
    """FLOPs and seconds of all micro-batches: (weights on a device, smaller side, tokens).

    The tokens are those that each weight meets.
    """
    weights, side, tokens = shape
    chip, micro_batches = step.machine.chip, step.choice.accumulation
    item = ITEM_BYTES[step.workload.dtype]
    peak = efficiency.peak(chip, step.workload.dtype)
    memory = chip.memory_bandwidth / chip.cores_per_chip * efficiency.MEMORY
    flops = 2.0 * weights * tokens * micro_batches * passes
    rate = peak * efficiency.matmul(chip, min(side, tokens))
    reading = item * weights * passes * micro_batches / memory
    return flops, max(flops / rate, reading)


def _add_matmuls(
    total: _Passes, step: StepModel, stack: StackSizes, block: BlockSizes, saved: frozenset[str]
) -> None:
    """Add the matmuls of a block in all layers of its stack."""
    choice, workload = step.choice, step.workload
    for alike in block.alike:
        one, field = alike.matrices[0], alike.keys_from or stack.field
        tokens: float = step.device.sequences * (workload.lengths[field] // choice.context)
        split, slowest = choice.tensor, 1.0
        side = min(block.inner / choice.tensor, step.sizes.embed)
        if one.whole:
            split, side = 1, min(max(one.inner for one in alike.matrices), step.sizes.embed)
        elif one.of_latent:
            side = min(side, max(one.inputs for one in alike.matrices))
        elif one.kind == "expert" and block.experts is not None:
            # a device has its part of the experts, and of every device those tokens that chose them
            ways = choice.size("ep")
            slowest = workload.load_of_experts(stack, ways)
            split, tokens = split * ways, tokens * ways * one.share
            side = min(side, block.inner / block.experts.per_token / choice.tensor)
            if step.device.exchange:  # saves nothing of what experts make
                saved = saved - {matrix.output for matrix in alike.matrices}
        # a matmul is computed again unless what it makes is saved
        repeated = sum(weights for output, weights in alike.outputs if output not in saved)
        shape = alike.weights / split, side, tokens
        flops, forward = _matmul(step, shape, 1.0)
        passes = 1.0 + alike.gradient_weights / alike.weights + repeated / alike.weights
        more, backward = _matmul(step, shape, passes)
        in_fp8 = workload.fp8_layers(stack.layers, one.kind, choice.tensor)
        faster = efficiency.fp8(step.machine.chip, min(side, tokens))
        layers = slowest * (stack.layers - in_fp8 + in_fp8 / faster)
        total.computed += stack.layers * (flops + more)
        total.forward += layers * forward
        total.backward += layers * backward


def _heads(stack: StackSizes) -> int:
    """heads × head_dim of all attention of a layer."""
    return sum(block.inner for block in stack.blocks if block.attention)


def _attention(step: StepModel, again: bool) -> _Passes:
    """Attention by the number of keys seen: 2 matmuls forward, 4 backward, 2 if computed again."""
    workload, choice, total = step.workload, step.choice, _Passes()
    key = step.machine.chip, choice.tensor, choice.context, step.device.strategy
    rates = workload.once(("attention rates", *key), lambda: _attention_rates(step))
    on_device = step.device.sequences * choice.accumulation
    for flops, part, rate, matmuls in rates:
        unit = flops * (on_device * part)
        total.forward += 2 * unit / rate
        total.backward += (matmuls + 2 * again) * unit / rate
        total.computed += (6 + 2 * again) * unit
    return total


def _attention_rates(step: StepModel) -> list[tuple[float, int, float, float]]:
    """Of every attention: FLOPs of a matmul and token, tokens, FLOP/s, matmuls backward."""
    workload, choice, chip = step.workload, step.choice, step.machine.chip
    peak = efficiency.peak(chip, workload.dtype)
    found = []
    for index, (stack, attention, split) in enumerate(splits_of(workload, choice)):
        keys = split.keys or split.length
        flops = stack.layers * split.heads * split.head_dim * 2.0
        flops *= keys_seen(attention, split.length, keys)
        slowdown, padded = attention_slowdown(workload, choice, index)
        rate = peak * efficiency.attention(chip, split.head_dim, padded) / slowdown
        if step.device.strategy in ("ring", "allgather"):
            rate *= efficiency.ring_steps(split.part)
        # on TPUs the backward pass over long parts of sequences: 7 matmuls instead of 5
        two_kernels = step.machine.is_tpu and backward_kernels(split.part) == 2
        found.append((flops, split.part, rate, 4 * (7 / 5 if two_kernels else 1.0)))
    return found
