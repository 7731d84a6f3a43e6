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

import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

from meshwright.arithmetic import round_up
from meshwright.machines import Machine
from meshwright.ops import keeps_logit_gradients
from meshwright.ops.attention import BLOCK_QUERIES as PLAIN_QUERIES
from meshwright.ops.attention import sequence_order
from meshwright.planner.candidates import with_strategy
from meshwright.planner.efficiency import hides, told_to_overlap
from meshwright.planner.kernels import plain_attention
from meshwright.planner.parts import (
    LANES,
    SUBLANES,
    item_bytes,
    loss_chunks,
    mlp_chunks,
    sequences,
    split_of,
    splits_of,
    strategy_of,
    vocab,
)
from meshwright.planner.result import Choice, Job, Memory
from meshwright.planner.sizes import ModelSizes, StackSizes
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
    kinds = _highest(Device(job, choice, machine))
    return Memory({k: math.ceil(v) for k, v in kinds.items() if v}, machine.usable_memory)


def formulas(job: Job, choice: Choice, machine: Machine) -> dict[str, str]:
    """By kind of memory, the formula with its numbers filled in.

    parameters: 4 bytes · ((32 layers · 218,103,808 + 1,050,673,152) / 64 devices + 266,240)
    """
    kinds = _highest(Device(job, choice, machine, term))
    return {kind: str(number) for kind, number in kinds.items() if number}


def moments(job: Job, choice: Choice, machine: Machine) -> dict[str, float]:
    """Total bytes at each moment, for `--explain`."""
    device = Device(job, choice, machine)
    always = sum(_always(device).values())
    return {moment: always + sum(kinds.values()) for moment, kinds in _moments(device).items()}


def _highest(device: "Device") -> Kinds:
    if device.job.kind == "serve":
        return _serving(device)
    always = _always(device)
    highest = max(_moments(device).values(), key=lambda kinds: sum(kinds.values()))
    return {kind: always.get(kind, 0) + highest.get(kind, 0) for kind in KINDS}


class Device:
    """A device's share of a job: sizes as numbers or, to be printed, as terms."""

    def __init__(
        self, job: Job, choice: Choice, machine: Machine, number: MakeNumber = plain
    ) -> None:
        if choice.strategy == "auto":
            choice = with_strategy(job, choice, machine)
        self.job, self.choice, self.machine, self.number = job, choice, machine, number
        self.sizes = sizes = job.sizes
        self.is_tpu, self.strategy = machine.is_tpu, strategy_of(job, choice)
        self.stored = number(item_bytes(job.param_dtype), "bytes")
        self.used = number(item_bytes(job.dtype), "bytes")
        self.float32 = number(4, "bytes")
        self.tp = number(choice.tp, name="tp")
        split = choice.tp * choice.fsdp * choice.sp
        self.devices = number(split, "devices")
        self.is_sharded = choice.fsdp * choice.sp > 1
        self.casts = item_bytes(job.param_dtype) != item_bytes(job.dtype)
        self.embed = number(sizes.embed)
        in_memory = vocab(job, choice)
        self.vocab = number(in_memory)
        self.sequences = sequences(job, choice)
        self.stacks = [DeviceStack(self, i, stack) for i, stack in enumerate(sizes.stacks)]
        self.last = self.stacks[-1]
        tables = number(sizes.tables * in_memory * sizes.embed)
        # over the stacks up to each: what they save, and their weights on a device
        self.saved_up_to = list(itertools.accumulate(stack.saved for stack in self.stacks))
        weights = [stack.layers * stack.weights for stack in self.stacks]
        layers = list(itertools.accumulate(weights))
        self.layers_up_to = [each / self.devices for each in layers]
        self.layers_and_tables = (layers[-1] + tables) / self.devices
        self.layers, self.tables = self.layers_up_to[-1], tables / self.devices
        # norms and biases; biases are split over tp with their heads
        vectors = sizes.residual_vectors.numbers + sizes.other_vectors.numbers
        of_heads = sizes.head_vectors.numbers + sizes.position_vectors.numbers
        self.vectors = number(vectors + of_heads // choice.tp)

    @property
    def table(self) -> Number:
        """The embedding or the LM head, all-gathered."""
        return self.vocab * self.embed / self.tp

    @property
    def saves_attention(self) -> bool:
        """Whether the remat policy saves attention's output."""
        return "attention" in self.job.remat[self.choice.remat]


class DeviceStack:
    """A device's share of one stack of layers."""

    def __init__(self, device: Device, index: int, sizes: StackSizes) -> None:
        number, choice = device.number, device.choice
        self.device, self.index, self.sizes = device, index, sizes
        self.layers = number(sizes.layers, "layers")
        self.weights = number(sizes.weights)
        self.attention_weights = number(sizes.attention_weights)
        self.length = device.job.lengths[sizes.field] // choice.sp
        self.tokens = number(device.sequences * self.length, "tokens")
        self.saved = self._saved() if device.job.kind == "train" else 0

    @property
    def layer(self) -> Number:
        """Bytes of a layer's matrices, all-gathered."""
        return self.device.used * self.weights / self.device.tp

    @property
    def stream(self) -> Number:
        """Bytes of the residual stream."""
        return self.device.used * self.tokens * self.device.embed

    def _saved(self) -> Number:
        """Bytes that all layers save for the backward pass."""
        device, choice = self.device, self.device.choice
        groups = _saved_numbers(
            device.sizes, self.index, device.job.remat[choice.remat], choice.tp,
            choice.sequence_parallel, self._stored_by,
        )  # fmt: skip
        each: Number = 0
        for field, multiple, numbers, lse in groups:
            length = round_up(device.job.lengths[field] // choice.sp, multiple)
            of_token = device.used * device.number(numbers)
            if lse:
                of_token = of_token + device.float32 * device.number(lse)
            each = each + device.number(device.sequences * length, "tokens") * of_token
        return self.layers * each + self.bias

    @property
    def bias(self) -> Number:
        """Bytes of the bias that is added to scores: one for all layers and sequences."""
        device, total = self.device, 0
        if not self.sizes.is_biased:
            return 0
        for stack, attention, split in splits_of(device.job, device.choice):
            if stack is self.sizes and attention.biased:
                heads = device.number(split.heads, "heads")
                queries = device.number(split.part, "queries")
                keys = device.number(split.keys or split.length, "keys")
                total = total + device.float32 * heads * queries * keys
        return total

    @property
    def _stored_by(self) -> "tuple[_Stored, ...]":
        """How the activations of each attention of a layer are stored."""
        device = self.device
        if not device.is_tpu:
            return tuple(_AS_IS for block in self.sizes.blocks if block.attention)
        slow = plain_attention(device.job, device.choice, device.machine)
        plain = [attention for stack, attention, _ in slow if stack is self.sizes]
        return tuple(
            _LENGTH_LAST if block.attention in plain else _FUSED
            for block in self.sizes.blocks
            if block.attention
        )

    def working(self, arrays: int) -> Number:
        """Bytes that a layer's backward pass computes with: activations and their gradients."""
        device = self.device
        chunks = mlp_chunks(self.length, device.choice)
        mlp = device.number(self.sizes.mlp.inner / device.choice.tp / chunks)
        return device.used * self.tokens * (arrays * mlp + 4 * device.embed)

    @property
    def mlp_arrays(self) -> int:
        """Arrays of an mlp in its backward pass: with a gate 5."""
        return 2 * self.sizes.mlp.arrays_inside + 1

    @property
    def mlp_arrays_left(self) -> int:
        """Of those, the ones that are there while attention is computed."""
        return self.sizes.mlp.arrays_inside + (1 if self.device.is_tpu else 2)

    def heads(self, queries: int, keys: int) -> Number:
        """Numbers of so many arrays like the queries, and like the keys, of a token."""
        device, dims = self.device, self.device.sizes.dims
        per_head = device.number(dims["head_dim"]) / device.tp
        numbers = queries * device.number(dims["heads"]) + keys * device.number(dims["kv_heads"])
        return numbers * per_head

    @property
    def scores(self) -> Number:
        """Bytes of scores, attention weights and their gradients, in attention by plain JAX."""
        device, choice = self.device, self.device.choice
        largest: Number = 0
        for stack, _, split in plain_attention(device.job, choice, device.machine):
            if stack is not self.sizes:
                continue
            ring = device.strategy in ("ring", "allgather")
            keys = split.part if ring else split.keys or split.length
            heads = split.heads / (choice.sp if device.strategy == "ulysses" else 1)
            numbers = device.number(device.sequences, "sequences") * device.number(
                min(PLAIN_QUERIES, split.part if ring else split.length), "queries"
            )
            numbers = numbers * device.number(heads, "heads") * device.number(keys, "keys")
            largest = max(largest, 3 * device.float32 * numbers)
        return largest

    @property
    def context_parallel(self) -> Number:
        """Bytes of keys in flight, or all-gathered, and of their gradients."""
        device = self.device
        used, float32 = device.used, device.float32
        keys, queries = self.tokens * self.heads(0, 2), self.tokens * self.heads(1, 0)
        match device.strategy:
            case "ring":  # and the sums over ring steps, forward or backward, in float32
                return (2 * used + 3 * float32) * keys + 5 * float32 * queries
            case "allgather":
                return (used + float32) * keys * device.number(device.choice.sp, name="sp")
            case "ulysses":
                return 3 * used * queries
            case _:
                return 0

    @property
    def gpu_arrays(self) -> tuple[int, int]:
        """Arrays as large as the queries, and as the keys, in attention's backward pass on GPUs.

        Queries, output, the gradients of both and copies of them; keys and values with their
        gradients, and in a ring two more pairs in flight and gradients in float32.
        """
        return 7, 12 if self.device.strategy == "ring" else 4

    @property
    def attention(self) -> Number:
        """Bytes of attention's backward pass beside the layer's other activations."""
        device = self.device
        if not self.sizes.attention_weights:
            return 0
        if device.is_tpu:
            return self.context_parallel + self.scores + self.bias
        all_gathered = 0 if device.strategy == "ring" else self.context_parallel
        return device.used * self.tokens * self.heads(*self.gpu_arrays) + all_gathered + self.scores

    @property
    def recomputed_attention(self) -> Number:
        """Bytes of attention computed again on GPUs: input, queries, output, and copies of them.

        Keys and values are as many as in the backward pass.
        """
        device = self.device
        return device.used * self.tokens * (device.embed + self.heads(4, self.gpu_arrays[1]))


class _Stored(NamedTuple):
    """Multiples to which a device pads head_dim and the length of what attention saves."""

    head_dim: int
    length: int


_AS_IS = _Stored(1, 1)
_FUSED = _Stored(LANES, SUBLANES)  # by a TPU's kernels: head_dim is the last dim
_LENGTH_LAST = _Stored(1, LANES)  # a TPU's compiler avoids a last dim that is shorter


@functools.lru_cache(maxsize=4096)
def _saved_numbers(
    sizes: ModelSizes,
    stack: int,
    policy: frozenset[str],
    tp: int,
    sequence_parallel: bool,
    stored_by: tuple[_Stored, ...],
) -> tuple[tuple[str, int, float, float], ...]:
    """What a layer of a stack saves of a token, by the batch field of that token.

    Each with the multiple that its length is padded to, numbers in the dtype of the matmuls, and
    numbers in float32: the lse of attention.
    """
    found: dict[tuple[str, int], list[float]] = {}
    own, stored = sizes.stacks[stack].field, iter(stored_by)
    usual = SUBLANES if _AS_IS not in stored_by else 1
    for block in sizes.stacks[stack].blocks:
        how = next(stored) if block.attention else _AS_IS
        keys_from = block.attention.keys_from if block.attention else ""
        for name, dims in block.saved.items():
            if name not in policy:
                continue
            field, multiple = own, usual
            if dims == ("embed",):
                width = sizes.embed / (tp if sequence_parallel else 1)
            elif dims[-1] == "head_dim":
                head_dim = round_up(sizes.dims["head_dim"], how.head_dim)
                width = sizes.dims[dims[0]] * head_dim / tp
                field = keys_from if keys_from and dims[0] == "kv_heads" else own
                multiple = how.length
            else:
                width = math.prod(sizes.dims[dim] for dim in dims) / tp
            found.setdefault((field, multiple), [0.0, 0.0])[0] += width
        if block.attention and "attention" in policy:
            found.setdefault((own, usual), [0.0, 0.0])[1] += sizes.dims["heads"] / tp
    return tuple((*key, numbers[0], numbers[1]) for key, numbers in found.items())


def _always(device: Device) -> Kinds:
    """What is there all through the step."""
    job, choice, stored = device.job, device.choice, device.stored
    every = device.layers_and_tables + device.vectors
    optimizer: dict[str, Callable[[], Number]] = {
        "adamw": lambda: 2 * stored * every,
        "lion": lambda: stored * every,
        "adafactor": lambda: 0.01 * stored * every,  # two vectors of each matrix
        "muon": lambda: stored * (device.layers + 2 * (device.tables + device.vectors)),
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
        always["weights in bfloat16"] = device.used * device.tables
    if choice.accumulation > 1:
        always["gradients"] = device.float32 * device.layers_and_tables
    return always


def _moments(device: Device) -> dict[str, Kinds]:
    choice, used, last = device.choice, device.used, device.last
    found: dict[str, Kinds] = {"loss": _loss(device)}
    # the last stack whose weights are needed: its backward pass is still to come
    needed = {"loss": -1, "end": 0}
    for number, stack in reversed(list(enumerate(device.stacks))):
        where = f" of the {stack.sizes.name}" if stack.sizes.name else ""
        backward = _backward(device, number)
        found[f"backward{where}"] = backward
        needed[f"backward{where}"] = needed[f"attention{where}"] = number
        found[f"attention{where}"] = backward | {
            "working activations": stack.working(stack.mlp_arrays_left),
            "attention": stack.attention,
        }
        if not device.is_tpu:
            # the gradients of the layer before it are still to be scattered
            attention = used * stack.attention_weights / device.tp
            layers = stack.layer + attention if device.is_sharded else stack.layer
            found[f"attention{where}"]["all-gathered weights"] = layers
    # the embedding's gradient is summed in float32, then sent in the dtype of the matmuls
    table = device.table
    end: Kinds = {
        "gradients": used * device.layers_and_tables
        + (len(device.stacks) * device.float32 + used) * table
        + last.stream,
        "all-gathered weights": last.layer if _gradient_in_flight(device) else 0,
    }  # fmt: skip
    if device.sizes.is_tied:  # the LM head's is added to it there
        end["loss"] = _head_gradient(device) * table
    found["end"] = end
    for name, moment in found.items():
        # a GPU has no use for the cast weights at the end, unless another micro-batch follows
        if device.casts and (name != "end" or device.is_tpu or choice.accumulation > 1):
            moment["weights in bfloat16"] = used * device.layers_up_to[needed[name]]
        if choice.accumulation > 1 and name != "loss":
            moment["gradients"] = max(moment["gradients"], used * device.layers_and_tables)
        if device.job.overlap and told_to_overlap(device.machine.chip) and device.is_sharded:
            # what is sharded is all-gathered before it is needed
            moment["all-gathered weights"] = (
                moment.get("all-gathered weights", 0) + AHEAD * used * table
            )
    return found


def _loss(device: Device) -> Kinds:
    """All that the layers save, the LM head and its gradient, a chunk of logits."""
    used, last = device.used, device.last
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
        "saved activations": device.saved_up_to[-1],
        "loss": bytes_of_head * device.table + of_logits + streams * last.stream,
    }
    if gap := _gap_of_embedding(device):
        kinds["all-gathered weights"] = used * device.number(gap) / device.tp
    # XLA for GPUs fills the time of the LM head's all-gather with the last layer's attention
    recomputes = last.sizes.attention_weights and not device.saves_attention
    if not device.is_tpu and device.is_sharded and recomputes:
        kinds["attention"] = last.recomputed_attention
    return kinds


def _backward(device: Device, number: int) -> Kinds:
    """The backward pass of a layer, while the stacks before it keep what they saved."""
    stack, used = device.stacks[number], device.used
    done = device.layers if number == 0 else _weights_from(device, number)
    # a device has only its part of the LM head's gradient; that of a tied one waits, not sharded
    scattered = device.is_sharded and not device.sizes.is_tied
    return {
        "saved activations": device.saved_up_to[number],
        "gradients": used * done,
        "all-gathered weights": (2 if device.is_sharded else 1) * stack.layer,
        "working activations": stack.working(stack.mlp_arrays),
        "loss": used * device.tables if scattered else _head_gradient(device) * device.table,
    }


def _weights_from(device: Device, number: int) -> Number:
    """Weights on a device of the stacks from this one on."""
    return sum(stack.layers * stack.weights for stack in device.stacks[number:]) / device.devices


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


def _serving(device: Device) -> Kinds:
    """Weights in the dtype they are kept in, the pages of the cache, and a step's activations.

    As serve/programs.py takes them: logits of all sequences are on every device, three times.
    """
    job, number, used = device.job, device.number, device.used
    sequences = number(math.ceil(job.batch / device.choice.dp), "sequences")
    cache: Number = 0
    for stack, kept in kept_tokens(job):
        layers = number(stack.layers, "layers")
        tokens = sequences * number(kept, "tokens") + number(ENGINE.page_size, "tokens")
        cache = cache + 2 * layers * tokens * cached_heads(device)
    mlp = number(device.last.sizes.mlp.inner)
    step = sequences + number(min(job.seq, ENGINE.chunk), "tokens")
    return {
        "parameters": _served_weights(device),
        "key-value cache": used * cache,
        "working activations": (
            3 * device.float32 * sequences * device.vocab + 16 * step * (device.embed + mlp)
        ),
    }


def _served_weights(device: Device) -> Number:
    """Quantized are the matrices of layers and an LM head of its own.

    Norms, biases and scales are in float32.
    """
    used, number = device.used, device.number
    if device.choice.weights is None:
        return used * device.layers_and_tables + device.float32 * device.vectors
    quantized, outputs = device.layers, number(0)
    for stack in device.sizes.stacks:
        matrices = [matrix for block in stack.blocks for matrix in block.matrices]
        split = sum(matrix.outputs for matrix in matrices if not matrix.adds_to_residual)
        whole = sum(matrix.outputs for matrix in matrices if matrix.adds_to_residual)
        layers = number(stack.layers, "layers")
        outputs = outputs + layers * (number(split) / device.tp + number(whole))
    if not device.sizes.is_tied:
        quantized, outputs = quantized + device.table, outputs + device.vocab / device.tp
    unquantized = device.float32 * (device.vectors + outputs)
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
