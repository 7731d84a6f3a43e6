"""Bytes of a device at the moment of a step with the most memory in use, by kind.

Memory can be highest at several moments of a step. *Loss*: all that the layers save is there, and
with it the LM head, its gradient and a chunk of logits. *Backward*: what the layers save is there,
and one layer's weights, its gradients and all it computes with. *Attention*: the same layer when
its mlp is done but for the weights' gradients, and attention is computed. *End*: what was saved is
gone, the gradients of all weights are there, and the embedding's is not sharded yet. The largest
counts; tests compare the sum with the buffer assignments of the TPU and GPU compilers and with a
GPU's measured peak.

Every formula is written once: over floats in a search, over terms where it is printed.
"""

import math
from collections.abc import Callable

from meshwright.arithmetic import round_up
from meshwright.machines import Machine
from meshwright.models import OFFLOAD
from meshwright.ops import keeps_logit_gradients
from meshwright.ops.attention import sequence_order
from meshwright.planner import fsdp2
from meshwright.planner.device import Device, DeviceModel
from meshwright.planner.efficiency import hides, told_to_overlap
from meshwright.planner.parts import (
    item_bytes,
    loss_chunks,
    split_of,
    vocab,
)
from meshwright.planner.result import Choice, Job, Memory
from meshwright.planner.sizes import StackSizes
from meshwright.planner.terms import MakeNumber, Number, plain, term
from meshwright.serve import EngineConfig

AHEAD = 0.5  # of the LM head, with overlap: steps compiled with it took -1.3 to 2.1 of it more
ENGINE = EngineConfig()  # pages, chunks of prompts and memory of an engine that is served with
KINDS = (
    "parameters", "optimizer", "weights in bfloat16", "gradients", "saved activations",
    "all-gathered weights", "working activations", "loss", "attention", "batch",
)  # fmt: skip
Kinds = dict[str, Number]


def memory(job: Job, choice: Choice, machine: Machine) -> Memory:
    """What a device holds at the highest moment, and what it has."""
    kinds = _fullest(job, choice, machine)
    found = {k: math.ceil(v) for k, v in kinds.items() if v}
    if choice.remat != OFFLOAD:
        return Memory(found, machine.usable_memory)
    host = math.ceil(offloaded(job, choice, machine)) * machine.devices_per_host
    return Memory(found, machine.usable_memory, host, machine.chip.host_memory_bytes)


def offloaded(job: Job, choice: Choice, machine: Machine) -> float:
    """Bytes of a device's activations in its host's memory, of each micro-batch."""
    return float(sum(stack.offloaded for stack in DeviceModel(job, choice, machine).stacks))


def formulas(job: Job, choice: Choice, machine: Machine) -> dict[str, str]:
    """By kind of memory, the formula with its numbers filled in.

    parameters: 4 bytes · ((32 layers · 218,103,808 + 1,050,673,152) / 64 devices + 266,240)
    """
    kinds = _fullest(job, choice, machine, term)
    return {kind: str(number) for kind, number in kinds.items() if number}


def moments(job: Job, choice: Choice, machine: Machine) -> dict[str, float]:
    """Total bytes at each moment, for `--explain`."""
    if job.backend == "torch":
        found = fsdp2.moments(job, choice)
        return {moment: sum(kinds.values()) for moment, kinds in found.items()}
    model = DeviceModel(job, choice, machine)
    always = sum(_always(model).values())
    return {moment: always + sum(kinds.values()) for moment, kinds in _moments(model).items()}


def _fullest(job: Job, choice: Choice, machine: Machine, number: MakeNumber = plain) -> Kinds:
    if job.backend == "torch":
        return max(fsdp2.moments(job, choice, number).values(), key=_total)
    return _highest(DeviceModel(job, choice, machine, number))


def _total(kinds: Kinds) -> Number:
    return sum(kinds.values())


def _highest(model: DeviceModel) -> Kinds:
    if model.device.job.kind == "serve":
        return _serving(model)
    always = _always(model)
    highest = max(_moments(model).values(), key=_total)
    return {kind: always.get(kind, 0) + highest.get(kind, 0) for kind in KINDS}


def _always(model: DeviceModel) -> Kinds:
    """What is there all through the step."""
    device = model.device
    job, choice, stored = device.job, device.choice, device.stored
    every = model.layers_and_tables + model.vectors
    moment = device.moment
    optimizer: dict[str, Callable[[], Number]] = {
        "adamw": lambda: 2 * moment * every,
        "lion": lambda: moment * every,
        "adafactor": lambda: 0.01 * stored * every,  # two vectors of each matrix
        "muon": lambda: moment * (model.layers + 2 * (model.tables + model.vectors)),
    }
    batch = device.number(device.sequences * choice.accumulation, "sequences")
    in_batch: Number = 0
    for size, arrays in job.arrays_by_length.items():
        tokens = device.number(size // choice.sp, "tokens")
        in_batch = in_batch + device.float32 * device.number(arrays, "arrays") * batch * tokens
    always: Kinds = {
        "parameters": stored * every,
        "optimizer": optimizer[job.optimizer](),
        "batch": in_batch,
    }
    if choice.accumulation > 1 and device.casts and not device.is_tpu:
        # embedding and LM head are cast before the loop over micro-batches; a TPU casts them anew
        always["weights in bfloat16"] = device.used * model.tables
    if choice.accumulation > 1:
        always["gradients"] = device.float32 * model.layers_and_tables
    return always


def _moments(model: DeviceModel) -> dict[str, Kinds]:
    device, last = model.device, model.last
    choice, used = device.choice, device.used
    found: dict[str, Kinds] = {"loss": _loss(model)}
    # the last stack whose weights are needed: its backward pass is still to come
    needed = {"loss": -1, "end": 0}
    for number, stack in reversed(list(enumerate(model.stacks))):
        where = f" of the {stack.sizes.name}" if stack.sizes.name else ""
        backward = _backward(model, number)
        found[f"backward{where}"] = backward
        needed[f"backward{where}"] = needed[f"attention{where}"] = number
        found[f"attention{where}"] = backward | {
            "working activations": stack.working(stack.mlp_arrays_left),
            "attention": stack.attention,
        }
        if not device.is_tpu and device.is_sharded:
            # the gradients of the layer before it are still to be scattered
            attention = used * stack.attention_weights / device.tp
            found[f"attention{where}"]["all-gathered weights"] = stack.layer + attention
    # the embedding's gradient is summed in float32, then sent in the dtype of the matmuls
    table = device.table
    end: Kinds = {
        "gradients": used * model.layers_and_tables
        + (len(model.stacks) * device.float32 + used) * table
        + last.stream,
        "all-gathered weights": last.layer if _gradient_in_flight(device) else 0,
    }  # fmt: skip
    if device.sizes.is_tied:  # the LM head's is added to it there
        end["loss"] = _head_gradient(device) * table
    found["end"] = end
    for name, moment in found.items():
        # a GPU has no use for the cast weights at the end, unless another micro-batch follows
        if device.casts and (name != "end" or device.is_tpu or choice.accumulation > 1):
            moment["weights in bfloat16"] = used * model.layers_up_to[needed[name]]
        if choice.accumulation > 1 and name != "loss":
            by_layer = device.frees_by_layer and name != "end"
            summed = model.tables if by_layer else model.layers_and_tables
            moment["gradients"] = max(moment["gradients"], used * summed)
        if device.job.overlap and told_to_overlap(device.machine.chip) and device.is_sharded:
            # what is sharded is all-gathered before it is needed
            moment["all-gathered weights"] = (
                moment.get("all-gathered weights", 0) + AHEAD * used * table
            )
    return found


def _loss(model: DeviceModel) -> Kinds:
    """All that the layers save, the LM head and its gradient, a chunk of logits."""
    device, last = model.device, model.last
    used = device.used
    chunks, chunk = loss_chunks(device.job, device.choice)
    if _head_at_once(device):
        # the gradients of all logits are kept instead of the sum
        bytes_of_head = used
        logits = chunks * chunk + (2 * chunk if chunks > 1 else chunk)
    else:
        bytes_of_head, logits = used + device.float32, 2 * chunk
    # hidden states and their gradient; on GPUs also the stream before the last norm
    streams = 2 if device.is_tpu else 3
    of_logits = used * device.number(logits, "tokens") * device.vocab / device.tp
    kinds: Kinds = {
        "saved activations": model.saved_up_to[-1],
        "loss": bytes_of_head * device.table + of_logits + streams * last.stream,
    }
    if gap := _gap_of_embedding(device):
        kinds["all-gathered weights"] = used * device.number(gap) / device.tp
    # XLA for GPUs fills the time of the LM head's all-gather with the last layer's attention
    recomputes = last.sizes.attention_weights and not device.saves_attention
    if not device.is_tpu and device.is_sharded and recomputes:
        kinds["attention"] = last.recomputed_attention
    return kinds


def _backward(model: DeviceModel, number: int) -> Kinds:
    """The backward pass of a layer, while the stacks before it keep what they saved."""
    device, stack = model.device, model.stacks[number]
    used = device.used
    if device.frees_by_layer:  # no copy of a layer's weights, and gradients of one layer
        done, copies = _weights_from(model, number + 1) + stack.weights / device.devices, 0
    else:
        done, copies = _weights_from(model, number), 2 if device.is_sharded else 1
    # a device has only its part of the LM head's gradient; that of a tied one waits, not sharded
    scattered = device.is_sharded and not device.sizes.is_tied
    return {
        "saved activations": model.saved_up_to[number],
        "gradients": used * done,
        "all-gathered weights": copies * stack.layer,
        "working activations": stack.working(stack.mlp_arrays),
        "loss": used * model.tables if scattered else _head_gradient(device) * device.table,
    }


def _weights_from(model: DeviceModel, number: int) -> Number:
    """Weights on a device of the stacks from this one on."""
    if number == 0:
        return model.layers
    stacks = model.stacks[number:]
    return sum(stack.layers * stack.weights for stack in stacks) / model.device.devices


def _head_at_once(device: Device) -> bool:
    """Whether the LM head's gradient is one matmul of all tokens, as ops.cross_entropy does."""
    chunks, chunk = loss_chunks(device.job, device.choice)
    item = item_bytes(device.job.dtype)
    return not device.is_tpu and keeps_logit_gradients(chunks * chunk, device.sizes.embed, item)


def _head_gradient(device: Device) -> Number:
    """Bytes for each number of the LM head's gradient, through the backward pass.

    With more than one device of tokens it is summed over them, in the dtype of the matmuls, before
    that pass. Alone, a GPU keeps what it summed until the update.
    """
    choice = device.choice
    alone = choice.dp * choice.fsdp * choice.sp == 1
    summed = alone and not device.is_tpu and not _head_at_once(device)
    return device.float32 if summed else device.used


def _gap_of_embedding(device: Device) -> int:
    """Numbers of the all-gathered embedding whose place is empty at the loss.

    A TPU's buffers are placed in the order of its program. Where all-gathers are asynchronous and
    tokens are reordered first, the embedding is all-gathered meanwhile; what the layers save is
    placed above it and stays there. One chunk's logits fit into the gap.
    """
    by_itself = device.is_tpu and hides(device.machine.chip, "all-gather", overlap=False) > 0
    if not by_itself or device.sizes.is_tied:  # a tied one is the LM head at the loss
        return 0
    if sequence_order(split_of(device.job, device.choice), device.strategy) != "zigzag":
        return 0
    _, chunk = loss_chunks(device.job, device.choice)
    embed = device.sizes.embed
    return (embed - (chunk if chunk <= embed else 0)) * vocab(device.job, device.choice)


def _gradient_in_flight(device: Device) -> bool:
    """Whether the last layer's gradient is still to be scattered when the embedding's is made.

    In XLA's loop for GPUs each layer's is scattered while that of the next is computed.
    """
    return not device.is_tpu and device.is_sharded and device.choice.accumulation == 1


def _serving(model: DeviceModel) -> Kinds:
    """Weights in the dtype they are kept in, the pages of the cache, and a step's activations.

    As serve/programs.py takes them: logits of all sequences are on every device, three times.
    """
    device = model.device
    job, number = device.job, device.number
    sequences = number(math.ceil(job.batch / device.choice.dp), "sequences")
    cache: Number = 0
    for stack, kept in kept_tokens(job):
        layers = number(stack.layers, "layers")
        tokens = sequences * number(kept, "tokens") + number(ENGINE.page_size, "tokens")
        cache = cache + 2 * layers * tokens * cached_heads(device)
    mlp = number(model.last.sizes.mlp.inner)
    step = sequences + number(min(job.seq, ENGINE.chunk), "tokens")
    return {
        "parameters": _served_weights(model),
        "key-value cache": device.cached * cache,
        "working activations": (
            3 * device.float32 * sequences * device.vocab + 16 * step * (device.embed + mlp)
        ),
    }


def _served_weights(model: DeviceModel) -> Number:
    """Quantized are the matrices of layers and an LM head of its own.

    Norms, biases and scales are in float32.
    """
    device = model.device
    used, number = device.used, device.number
    if device.choice.weights is None:
        return used * model.layers_and_tables + device.float32 * model.vectors
    quantized, outputs = model.layers, number(0)
    for stack in device.sizes.stacks:
        matrices = [matrix for block in stack.blocks for matrix in block.matrices]
        split = sum(matrix.outputs for matrix in matrices if not matrix.adds_to_residual)
        whole = sum(matrix.outputs for matrix in matrices if matrix.adds_to_residual)
        layers = number(stack.layers, "layers")
        outputs = outputs + layers * (number(split) / device.tp + number(whole))
    if not device.sizes.is_tied:
        quantized, outputs = quantized + device.table, outputs + device.vocab / device.tp
    unquantized = device.float32 * (model.vectors + outputs)
    return number(1, "bytes") * quantized + used * device.table + unquantized


def cached_heads(device: Device) -> Number:
    """Numbers of a key on a device."""
    dims, number = device.sizes.dims, device.number
    return number(dims["kv_heads"], "heads") * number(dims["head_dim"]) / device.tp


def kept_tokens(job: Job) -> list[tuple[StackSizes, int]]:
    """Attentions of the last stack, which generates, and the tokens whose keys each keeps.

    The engine keeps whole pages of all tokens, also of those that a sliding window has left.
    """
    stack = job.sizes.stacks[-1]
    kept = round_up(job.seq, ENGINE.page_size)
    return [(stack, kept) for block in stack.blocks if block.attention]


def read_tokens(job: Job) -> list[tuple[StackSizes, int]]:
    """Attentions of the last stack, and the tokens whose keys each reads for a new one."""
    stack = job.sizes.stacks[-1]
    masks = [block.attention.mask for block in stack.blocks if block.attention]
    return [(stack, min(job.seq, mask.window or job.seq)) for mask in masks]
