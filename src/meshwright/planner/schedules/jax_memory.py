"""What XLA's train step holds, by kind, at each moment when memory can be highest.

Memory can be highest at several moments of a step. *Loss*: all that the layers save is there, and
with it the LM head, its gradient and a chunk of logits. *Backward*: what the layers save is there,
and one layer's weights, its gradients and all it computes with. *Attention*: the same layer when
its mlp is done but for the weights' gradients, and attention is computed. *Last layer*: on GPUs,
where another stack's loop begins before all gradients of this one are scattered. *End*: what was
saved is gone, the gradients of all weights are there, and the embedding's is not sharded yet. The
largest counts; tests compare the sum with the buffer assignments of the TPU and GPU compilers and
with a GPU's measured peak.

Every formula is written once: over floats in a search, over terms where it is printed.
"""

import collections
import math
from collections.abc import Callable, Iterator

from meshwright.ops import keeps_logit_gradients
from meshwright.ops.attention import sequence_order
from meshwright.planner.attention import split_of
from meshwright.planner.compilers import all_reduces
from meshwright.planner.device import ITEM_BYTES, Device, DeviceStack
from meshwright.planner.efficiency import hides, told_to_overlap
from meshwright.planner.step import Kinds, StepModel
from meshwright.planner.terms import Number, value_of

AHEAD = 0.5  # of the LM head, with overlap: steps compiled with it took -1.3 to 2.1 of it more
KINDS = (
    "parameters", "optimizer", "reference", "weights in bfloat16", "gradients", "saved activations",
    "all-gathered weights", "working activations", "loss", "attention", "batch",
)  # fmt: skip


def always(step: StepModel) -> Kinds:
    """What is there all through the step."""
    device = step.device
    workload, choice, stored = device.workload, device.choice, device.stored
    trained = step.trained_layers_and_tables + step.trained_vectors + step.adapter
    moment, others = device.moment, step.trained_tables + step.trained_vectors + step.adapter
    optimizer: dict[str, Callable[[], Number]] = {
        "adamw": lambda: 2 * moment * trained,
        "lion": lambda: moment * trained,
        "adafactor": lambda: 0.01 * stored * trained,  # two vectors of each matrix
        "muon": lambda: moment * (step.trained_layers + 2 * others),
    }
    batch = device.number(device.sequences * choice.accumulation, "sequences")
    in_batch: Number = 0
    for size, arrays in collections.Counter(workload.lengths.values()).items():
        tokens = device.number(size // choice.size("sp"), "tokens")
        in_batch = in_batch + device.float32 * device.number(arrays, "arrays") * batch * tokens
    weights = stored * (step.layers_and_tables + step.vectors)
    if device.quantizes:
        weights = device.stored_layers * step.layers + stored * (step.tables + step.vectors)
    always: Kinds = {
        "parameters": weights + device.float32 * step.adapter,
        "optimizer": optimizer[workload.config.optimizer.name](),
        "batch": in_batch,
    }
    if workload.has_reference and not workload.config.lora.rank:
        always["reference"] = device.used * step.gradients + stored * step.vectors_with_gradients
    if choice.accumulation > 1 and device.casts and not device.is_tpu:
        # embedding and LM head are cast before the loop over micro-batches; a TPU casts them anew
        always["weights in bfloat16"] = device.used * step.tables
    if choice.accumulation > 1:
        always["gradients"] = device.float32 * (step.trained_layers_and_tables + step.adapter)
    return always


def peaks(step: StepModel) -> Iterator[tuple[str, Kinds]]:
    """What comes and goes, at each moment."""
    device, last = step.device, step.last
    choice, used = device.choice, device.used
    found: dict[str, Kinds] = {"loss": _loss(step)}
    # the last stack whose weights are needed: its backward pass is still to come
    needed = {"loss": -1, "end": 0}
    for number, stack in reversed(list(enumerate(step.stacks))):
        where = f" of the {stack.sizes.name}" if stack.sizes.name else ""
        backward = _backward(step, number)
        found[f"backward{where}"] = backward
        needed[f"backward{where}"] = needed[f"attention{where}"] = number
        found[f"attention{where}"] = backward | {
            "working activations": stack.working(_arrays_left(step, stack)),
            "attention": stack.attention,
        }
        if not device.is_tpu and device.is_sharded:
            # the gradients of the layer before it are still to be scattered
            attention = used * stack.attention_weights / device.tp
            found[f"attention{where}"]["all-gathered weights"] = stack.layer + attention
            if number and device.loops and device.machine.chip.platform == "gpu":
                found[f"last layer{where}"] = _last_layer(step, number)
                needed[f"last layer{where}"] = number
    # the embedding's gradient is summed in float32, then sent in the dtype of the matmuls
    table = device.table
    of_embedding = (len(step.sizes.sequences) * device.float32 + used) * table
    # in XLA's loop for GPUs each layer's gradient is scattered while that of the next is computed
    in_flight = not device.is_tpu and device.is_sharded and choice.accumulation == 1
    end: Kinds = {
        "gradients": used * step.gradients
        + (device.float32 + used) * step.adapter
        + (of_embedding if device.sizes.trains_embedding else 0)
        + last.stream,
        "all-gathered weights": last.layer_gradients if in_flight else 0,
    }  # fmt: skip
    if device.sizes.is_tied:  # the LM head's is added to it there
        end["loss"] = _head_gradient(device) * table
    found["end"] = end
    for name, moment in found.items():
        # a GPU has no use for the cast weights at the end, unless another micro-batch follows
        if device.copies and (name != "end" or device.is_tpu or choice.accumulation > 1):
            moment["weights in bfloat16"] = used * step.layers_up_to[needed[name]]
        if choice.accumulation > 1 and name != "loss":
            by_layer = device.frees_by_layer and name != "end"
            summed = step.trained_tables if by_layer else step.gradients
            moment["gradients"] = max(moment["gradients"], used * summed)
        overlaps = device.workload.overlap and told_to_overlap(device.machine.chip)
        if overlaps and device.is_sharded and name in ("loss", "end"):
            # what is sharded is all-gathered before it is needed
            moment["all-gathered weights"] = (
                moment.get("all-gathered weights", 0) + AHEAD * used * table
            )
    if step.machine.chip.name == "v5e":  # no other was compiled at its limit
        _schedule_for_memory(step, found)
    yield from found.items()


def _schedule_for_memory(step: StepModel, found: dict[str, Kinds]) -> None:
    """Reduce working activations of a backward pass that would not fit, as a TPU's compiler does.

    It computes arrays of the mlp later or again, and is done with them before attention, as far as
    that is needed: llama-3.1-8b 64x4096 on v5e:4x4 would need 16.8 GiB, and has 15.73 of 15.75.
    """
    held = sum(math.ceil(value_of(size)) for size in always(step).values())
    for stack in step.stacks:
        where = f" of the {stack.sizes.name}" if stack.sizes.name else ""
        for name, arrays in ("backward", stack.sizes.mlp.arrays_inside + 1), ("attention", 1):
            moment = found[f"{name}{where}"]
            needed = held + sum(math.ceil(value_of(size)) for size in moment.values())
            excess = needed - step.machine.usable_memory
            if excess > 0:
                least = stack.working(arrays)
                left = math.floor(value_of(moment["working activations"])) - excess
                enough = left > value_of(least)
                moment["working activations"] = step.number(left, "bytes") if enough else least


def _loss(step: StepModel) -> Kinds:
    """All that the layers save, the LM head and its gradient, a chunk of logits."""
    device, last = step.device, step.last
    used = device.used
    chunks, chunk = device.loss_chunks
    if _head_at_once(device):
        # the gradients of all logits are kept instead of the sum
        bytes_of_head = used
        logits = chunks * chunk + (2 * chunk if chunks > 1 else chunk)
    else:
        bytes_of_head, logits = used, 2 * chunk
        if device.sizes.trains_head:
            bytes_of_head = used + device.float32
    # hidden states and their gradient; on GPUs also the stream before the last norm
    streams = 2 if device.is_tpu else 3
    of_logits = used * device.number(logits, "tokens") * device.vocab / device.tp
    kinds: Kinds = {
        "saved activations": step.saved_up_to[-1],
        "loss": bytes_of_head * device.table + of_logits + streams * last.stream,
    }
    if gap := _gap_of_embedding(device):
        kinds["all-gathered weights"] = used * device.number(gap) / device.tp
    # XLA for GPUs fills the time of the LM head's all-gather with the last layer's attention
    saved = device.workload.remat[device.choice.remat]
    recomputes = last.sizes.attention_weights and "attention" not in saved
    if not device.is_tpu and device.is_sharded and recomputes:
        kinds["attention"] = last.recomputed_attention
        if not last.sizes.gradient_weights:  # and the mlp of one whose weights are frozen
            kinds["all-gathered weights"] = last.layer
    return kinds


def _backward(step: StepModel, number: int) -> Kinds:
    """The backward pass of a layer, while the stacks before it keep what they saved."""
    device, stack = step.device, step.stacks[number]
    used = device.used
    if device.frees_by_layer:  # no copy of a layer's weights, and gradients of one layer
        done = step.gradients_from(number + 1) + stack.gradient_weights / device.devices
        copies: Number = 0
    else:
        done = step.gradients_from(number)
        # on a TPU gradients take the place of what is all-gathered, but in an exchange of experts
        in_place = device.is_sharded and device.is_tpu and not device.exchange
        copies = (2 if device.is_sharded and not in_place else 1) * stack.layer
        if stack.sizes.gradient_weights < stack.sizes.weights and not in_place:
            copies = copies - stack.layer + stack.layer_gradients
        if device.is_sharded and device.loops and not device.is_tpu:
            # XLA for GPUs all-gathers all layers of an iteration, and scatters their gradients late
            copies = stack.sizes.period * copies
        if device.exchange == "ring" and stack.sizes.experts:
            # its loop has the sum of the experts' gradients beside those of a device's tokens, and
            # their weights transposed
            copies = copies + 2 * stack.experts
    return {
        "saved activations": step.saved_up_to[number],
        "gradients": used * done,
        "all-gathered weights": copies,
        "working activations": stack.working(stack.mlp_arrays),
        "loss": _waiting_head(step),
    }


def _last_layer(step: StepModel, number: int) -> Kinds:
    """The end of a stack's loop: a GPU begins the next one while gradients are scattered.

    Those of two layers are in flight. The next stack's gradients are there, and its last layer is
    all-gathered, with room for its attention.
    """
    stack, before = step.stacks[number], step.stacks[number - 1]
    backward = _backward(step, number)
    return {
        "saved activations": backward["saved activations"],
        "gradients": step.device.used * step.gradients_from(number - 1),
        "all-gathered weights": 2 * stack.layer_gradients + before.layer,
        "attention": before.recomputed_attention,
        "loss": backward["loss"],
    }


def _head_at_once(device: Device) -> bool:
    """Whether the LM head's gradient is one matmul of all tokens, as ops.cross_entropy does."""
    chunks, chunk = device.loss_chunks
    item = ITEM_BYTES[device.workload.dtype]
    return not device.is_tpu and keeps_logit_gradients(chunks * chunk, device.sizes.embed, item)


def _head_gradient(device: Device) -> Number:
    """Bytes for each number of the LM head's gradient, through the backward pass.

    With more than one device of tokens it is summed over them, in the dtype of the matmuls, before
    that pass. Alone, a GPU keeps what it summed until the update.
    """
    choice = device.choice
    if not device.sizes.trains_head:
        return 0
    alone = choice.size("dp", "fsdp", "sp") == 1
    summed = alone and not device.is_tpu and not _head_at_once(device)
    return device.float32 if summed else device.used


def _waiting_head(step: StepModel) -> Number:
    """Bytes of the LM head's gradient during the backward pass.

    A device has its shard of it. That of a tied one waits, not sharded, and so does what a TPU's
    compiler all-reduces: in float32 as it was summed, over several slices as it is sent. With dp=2
    it is scattered, and less may be needed than with fsdp alone: recorded of both on v4, v5p and
    v6e, with dp=2 not yet with remat=full, where the difference is largest.
    """
    device = step.device
    head = _head_gradient(device)
    if not device.is_sharded or device.sizes.is_tied:
        return head * device.table
    if head and device.is_tpu and all_reduces(device.choice, device.machine):
        return (device.float32 if device.machine.slices == 1 else head) * device.table
    return head * step.trained_tables


def _arrays_left(step: StepModel, stack: DeviceStack) -> int:
    """Arrays of the mlp that are there while attention is computed.

    Over several slices the LM head's gradient waits as it is sent, and the gradients of queries
    take the place of its sum: read from the buffers of llama-3.1-405b on 2*v6e:16x16.
    """
    device = step.device
    machine, arrays = device.machine, stack.mlp_arrays_left
    if not device.is_tpu or machine.slices == 1 or not all_reduces(device.choice, machine):
        return arrays
    untied = _head_gradient(device) and not device.sizes.is_tied
    fits = stack.query_gradients <= device.float32 * device.table
    return min(arrays, stack.sizes.mlp.arrays_inside + 1) if untied and fits else arrays


def _gap_of_embedding(device: Device) -> int:
    """Numbers of the all-gathered embedding whose place is empty at the loss.

    A TPU's buffers are placed in the order of its program. Where all-gathers are asynchronous and
    tokens are reordered first, the embedding is all-gathered meanwhile; what the layers save is
    placed above it and stays there. One chunk's logits fit into the gap.
    """
    by_itself = device.is_tpu and hides(device.machine.chip, "all-gather", overlap=False) > 0
    if not by_itself or device.sizes.is_tied:  # a tied one is the LM head at the loss
        return 0
    if sequence_order(split_of(device.workload, device.choice), device.strategy) != "zigzag":
        return 0
    _, chunk = device.loss_chunks
    embed = device.sizes.embed
    return (embed - (chunk if chunk <= embed else 0)) * device.padded_vocab
