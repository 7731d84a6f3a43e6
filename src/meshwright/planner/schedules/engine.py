"""The schedule of the inference engine: decode steps, chunks of prompts, and the KV cache.

A decode step reads the weights and the keys of all sequences once; tp adds up blocks. A step with a
chunk of a prompt computes the places of the whole batch beside it. Both are steps of
serving/engine.py with its default pages and chunks.
"""

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from meshwright.arithmetic import round_up
from meshwright.audits import Collective
from meshwright.errors import MeshwrightError
from meshwright.models import LoraConfig, indivisible, serving_of
from meshwright.ops import FEW_TOKENS, is_hopper
from meshwright.planner import efficiency
from meshwright.planner.attention import keys_seen, splits_of
from meshwright.planner.device import Device
from meshwright.planner.links import over, place_axes
from meshwright.planner.schedules import jax
from meshwright.planner.sizes import StackSizes, adapter_numbers
from meshwright.planner.step import Kinds, Schedule, StepModel, Work
from meshwright.planner.terms import Number
from meshwright.planner.workload import Choice, Workload
from meshwright.serving import EngineConfig, ScheduledStep, served_config

KINDS = ("parameters", "key-value cache", "working activations")


def meshes(devices: int) -> Iterator[Choice]:
    """Every mesh of dp and tp: weights stay where they are used, so fsdp and sp are 1.

    Experts may be split over ep: all its devices have all tokens, and their results are summed.
    """
    return (mesh for mesh in jax.meshes(devices) if mesh.size("fsdp", "sp") == 1)


def held(workload: Workload, choice: Choice) -> Workload:
    """KV heads are repeated where tp is a multiple of their number."""
    model = served_config(workload.model, choice.sizes)
    return workload if model is workload.model else dataclasses.replace(workload, model=model)


def _engine(workload: Workload) -> EngineConfig:
    """Pages, chunks of prompts and memory."""
    assert workload.engine is not None
    return workload.engine


def check(workload: Workload) -> None:
    """Raise if the engine has slots of adapters, and the model takes none."""
    if _engine(workload).max_adapters and serving_of(workload.model).adapter is None:
        raise MeshwrightError(
            "only decoders take adapters by name; leave --engine.max-adapters out"
        )


def refusal(workload: Workload, choice: Choice) -> str | None:
    """Why sizes do not divide, in a sentence; None if they do."""
    without = Choice({axis: size for axis, size in choice.sizes.items() if axis != "ep"})
    why = jax.refusal(held(workload, choice), without)
    if why is None and choice.size("ep") > 1:
        rules = serving_of(workload.model).rules(ep=True)
        return indivisible(workload.model, rules, choice.sizes, workload.batch, None)
    return why


def places(workload: Workload, choice: Choice) -> int:
    """Sequences of a replica's step."""
    return math.ceil(workload.batch / choice.size("dp"))


# ---- memory


def peaks(step: StepModel) -> Iterator[tuple[str, Kinds]]:
    """Weights in the dtype they are kept in, the pages of the cache, and a step's activations.

    As serving/programs.py takes them: logits of all sequences are on every device, three times.
    """
    device, workload, number = step.device, step.workload, step.number
    sequences = number(places(workload, step.choice), "sequences")
    cache: Number = 0
    for stack, kept in _kept_tokens(workload):
        layers = number(stack.layers, "layers")
        tokens = sequences * number(kept, "tokens") + number(_engine(workload).page_size, "tokens")
        cache = cache + 2 * layers * tokens * _cached_heads(device)
    mlp = number(max(stack.mlp.inner for stack in device.sizes.generating))
    if (experts := device.sizes.experts) is not None:  # and a copy of the token for each
        mlp = mlp + number(experts.per_token, "experts") * device.embed
    chunk = min(workload.seq, _engine(workload).chunk)
    tokens = sequences + number(chunk, "tokens")
    copied: Number = 0
    if _copies_experts(step, chunk + places(workload, step.choice)):
        most = max(stack.expert_weights for stack in device.sizes.generating)
        copied = device.used * number(most) / (device.tp * device.ep)
    yield (
        "prefill",
        {
            "parameters": _served_weights(step) + device.used * _slots(step),
            "key-value cache": device.cached * cache,
            "working activations": (
                3 * device.float32 * sequences * device.vocab
                + 16 * tokens * (device.embed + mlp)
                + copied
            ),
        },
    )


def _served_weights(step: StepModel) -> Number:
    """Quantized are matrices of layers, experts but on TPUs, no routers, and an LM head of its own.

    Norms, biases and scales are in float32.
    """
    device, number = step.device, step.number
    used = device.used
    if step.choice.weights is None:
        return used * step.layers_and_tables + device.float32 * step.vectors
    quantized, outputs = step.layers, number(0)
    whole: Number = 0
    for stack in device.sizes.stacks:
        matrices = stack.of_kind("matrix")
        of_all = sum(one.outputs for one in matrices if one.adds_to_residual or one.whole)
        split = sum(matrix.outputs for matrix in matrices) - of_all
        layers = number(stack.layers, "layers")
        outputs = outputs + layers * (number(split) / device.tp + number(of_all))
        if stack.experts is None:
            continue
        whole = whole + layers * number(_router_weights(stack)) / device.ep
        quantized = step.layers - whole
        if step.machine.is_tpu:
            whole = whole + layers * number(stack.expert_weights) / (device.tp * device.ep)
            quantized = step.layers - whole
            continue
        for expert in stack.of_kind("expert"):
            ways = device.ep if expert.adds_to_residual else device.ep * device.tp
            outputs = outputs + layers * number(expert.outputs) / ways
    if not device.sizes.is_tied:
        quantized, outputs = quantized + device.table, outputs + device.vocab / device.tp
    unquantized = used * (whole + device.table) + device.float32 * (step.vectors + outputs)
    return number(1, "bytes") * quantized + unquantized


def _slots(step: StepModel) -> Number:
    """Numbers of the slots of adapters on a device.

    Matrices that an engine merges have one pair of factors, and each b has columns for all of their
    outputs: see models/serving.py.
    """
    engine, tp = _engine(step.workload), step.choice.size("tp")
    if not engine.max_adapters:
        return 0
    rank, axes = engine.adapter_rank, tuple(step.choice.sizes.items())
    numbers = adapter_numbers(step.workload.model, LoraConfig(rank), axes)
    for stack in step.sizes.stacks:
        for block in stack.blocks:
            outputs = [one.outputs for one in block.matrices if not one.adds_to_residual]
            numbers += stack.layers * rank * (len(outputs) - 1) * sum(outputs) // tp
    return step.number(engine.max_adapters, "adapters") * step.number(numbers)


def _cached_heads(device: Device) -> Number:
    """Numbers of a key on a device."""
    dims, number = device.sizes.dims, device.number
    return number(dims["kv_heads"], "heads") * number(dims["head_dim"]) / device.tp


def _kept_tokens(workload: Workload) -> list[tuple[StackSizes, int]]:
    """Attentions of the stacks that generate, and the tokens whose keys each keeps.

    The engine keeps whole pages of all tokens, also of those that a sliding window has left. Of
    latent attention it keeps keys and values of every head, which are as wide as keys.
    """
    kept = round_up(workload.seq, _engine(workload).page_size)
    stacks = workload.sizes.generating
    return [(stack, kept) for stack in stacks for block in stack.blocks if block.attention]


def _read_tokens(workload: Workload) -> list[tuple[StackSizes, int]]:
    """Attentions of the stacks that generate, and the tokens whose keys a new one reads."""
    seq, found = workload.seq, []
    for stack in workload.sizes.generating:
        for attention in (block.attention for block in stack.blocks if block.attention):
            masks = attention.masks or ((attention.mask, 1),)
            read = sum(layers * min(seq, mask.window or seq) for mask, layers in masks)
            found.append((stack, round(read / sum(layers for _, layers in masks))))
    return found


# ---- collectives


def collectives(step: StepModel) -> Iterator[Collective]:
    """What a decode step sends: the residual stream's sums over tp, and of experts over ep too.

    Logits go to all.
    """
    yield from _sent(step, places(step.workload, step.choice))


def _sent(step: StepModel, tokens: int) -> Iterator[Collective]:
    """What a step of so many tokens sends; logits are of one for each sequence."""
    device, number, stacks = step.device, step.number, step.sizes.generating
    sequences = number(places(step.workload, step.choice), "sequences")
    size = device.used * number(tokens, "sequences") * device.embed
    with_experts = sum(stack.layers for stack in stacks if stack.experts)
    mixtures = with_experts if step.choice.size("ep") > 1 else 0
    over = tuple(axis for axis in ("tp", "ep") if step.choice.size(axis) > 1)
    yield Collective("all-reduce", over, size, mixtures, "forward", "sums of a layer's experts")
    router = device.float32 * number(_router_weights(stacks[-1]) + stacks[-1].router_biases)
    yield Collective("all-gather", over[-1:], router, mixtures, "forward", "router of a layer")
    if step.choice.size("tp") == 1:
        return
    what, sums = (
        "sums of the embedding and of a layer's blocks",
        1 + sum(len(stack.blocks) * stack.layers for stack in stacks) - mixtures,
    )
    yield Collective("all-reduce", ("tp",), size, sums, "forward", what)
    size = device.float32 * sequences * device.vocab
    yield Collective("all-gather", ("tp",), size, 1, "forward", "logits")


# ---- time


def work(step: StepModel) -> Work:
    """The work of a decode step; `sequences`: logits, choice of a token, the host's account."""
    number = step.number
    many = places(step.workload, step.choice)
    sequences = number(many, "sequences")
    bandwidth = _bandwidth(step)
    read = _weight_bytes(step, many)
    met = _met(step, step.sizes.generating) + _head(step) + _slots(step)
    flops = 2 * met * sequences
    cache = _cache_bytes(step)
    rate = _matmul(step, many)
    parts = {
        "weights": max(read / bandwidth, flops / _peak(step, rate)) + _experts_more(step, many),
        "cache": cache / bandwidth,
        "gaps between kernels": _gaps(step),
        "sequences": sequences / number(efficiency.SEQUENCES_PER_SECOND, "sequences/s"),
    }
    return Work(flops, flops, read + cache, parts)


def seconds(step: StepModel, links: Number) -> Mapping[str, Number]:
    """Seconds of a decode step by part; `idle` is what the host takes longer to launch it."""
    parts = {**step.work.seconds, "waiting for links": step.number(links, "s")}
    busy = parts["weights"] + parts["cache"] + parts["gaps between kernels"]
    busy = busy + parts["waiting for links"]
    launching = _launching(step)
    if launching > busy:
        parts["idle"] = launching - busy
    return parts


def prefill(step: StepModel, prompts: int = 1) -> Number:
    """Seconds to compute prompts of seq tokens, in chunks, with no other to do."""
    workload, number = step.workload, step.number
    chunk = _engine(workload).chunk
    steps = math.ceil(prompts * workload.seq / chunk)
    each = min(prompts * workload.seq, chunk)
    attention: Number = 0
    for stack, kind, split in splits_of(workload, step.choice):
        keys = split.keys or split.length
        seen = number(round(keys_seen(kind, split.length, keys)), "keys")
        heads = number(stack.layers, "layers") * number(split.heads * split.head_dim)
        rate = efficiency.attention(step.machine.chip, split.head_dim, keys)
        flops = 4 * heads * number(prompts * split.length, "tokens") * seen
        attention = attention + flops / _peak(step, rate)
    return number(steps, "steps") * _chunk_step(step, each) + attention


class Costs:
    """Seconds of the steps that an engine's scheduler chooses."""

    def __init__(self, sized: Callable[[int], StepModel]) -> None:
        """`sized` gives the step of so many sequences."""
        self._sized = functools.cache(sized)

    def seconds(self, step: ScheduledStep) -> float:
        """Of a step: as `seconds` and `prefill` count, with the lengths that its sequences have."""
        return self.counted(
            len(step.decode),
            sum(sequence.computed for sequence in step.decode),
            len(step.decode) + sum(chunk.samples for chunk in step.chunks),
            step.shape,
            sum(chunk.count * (chunk.start + (chunk.count + 1) / 2) for chunk in step.chunks),
        )

    def counted(
        self,
        decode: int,
        tokens: int,
        sampled: int,
        shape: tuple[int, int] = (0, 0),
        pairs: float = 0.0,
    ) -> float:
        """Of a step with so many decode tokens.

        Arguments:
            tokens: cached ones that they read, all together.
            sampled: tokens that are chosen.
            shape: of the chunks of prompts.
            pairs: of a query and a key, in those chunks.
        """
        if shape[0]:
            busy = self._chunk(self._engine.max_batch, shape[0] * shape[1])
            if shape[0] > 1:
                busy += efficiency.PROMPTS_OF_LAYER * self._sized(1).sizes.layers
        else:
            batches = self._batches
            busy = self._decode(batches[bisect.bisect_left(batches, decode)])
        per_token, per_pair, launching = self._each
        busy += per_token * tokens
        busy += per_pair * pairs
        return max(busy, launching) + sampled / efficiency.SEQUENCES_PER_SECOND

    @functools.cached_property
    def _engine(self) -> EngineConfig:
        return _engine(self._sized(1).workload)

    @functools.cached_property
    def _batches(self) -> tuple[int, ...]:
        return self._engine.batches

    def highest_rate(self, prompt: int, output: int) -> float:
        """Requests a second of a batch that is always full; no queue reaches it."""
        batch, chunk = self._engine.max_batch, max(self._engine.chunks, key=math.prod)
        per_token, _, launching = self._each
        step = max(self._decode(batch) + per_token * batch * (prompt + output / 2), launching)
        longer = max(self._chunk(batch, math.prod(chunk)) - self._decode(batch), 0.0)
        devices = output * step / batch + longer * prompt / math.prod(chunk)
        host = output * efficiency.SERVED_TOKEN + efficiency.SERVED_REQUEST
        return 1 / max(devices, host)

    @functools.cached_property
    def _each(self) -> tuple[float, float, float]:
        """Seconds of a cached token that is read, of a query and a key, and to launch a step."""
        step = self._sized(1)
        read = _cache_bytes(step) / step.workload.seq / _bandwidth(step)
        pairs = 0.0
        for stack, _, split in splits_of(step.workload, step.choice):
            rate = efficiency.attention(step.machine.chip, split.head_dim, split.length)
            pairs += 4 * stack.layers * split.heads * split.head_dim / _peak(step, rate)
        return read, pairs, _launching(step)

    @functools.cache  # noqa: B019
    def _chunk(self, batch: int, tokens: int) -> float:
        return float(_chunk_step(self._sized(batch), tokens))

    @functools.cache  # noqa: B019
    def _decode(self, batch: int) -> float:
        step = self._sized(batch)
        parts = step.work.seconds
        links = _link_seconds(step, batch)
        return float(parts["weights"] + parts["gaps between kernels"] + links)


def _chunk_step(step: StepModel, chunk: int) -> Number:
    """Seconds of a step with a chunk, without attention: places of the batch are computed too."""
    device, number = step.device, step.number
    sizes, many, tp = step.sizes, places(step.workload, step.choice), step.choice.size("tp")
    tokens = number(chunk + many, "tokens")
    bandwidth = _bandwidth(step)
    read = _weight_bytes(step, chunk + many)
    head = _head(step) * number(many + 1, "tokens")
    flops = 2 * (_met(step, sizes.stacks) * tokens + head)
    rate = efficiency.PREFILL * _matmul(step, chunk + many)
    numbers = 0.0
    for stack in sizes.stacks:
        heads = sum(block.inner for block in stack.blocks if block.attention)
        chosen = stack.experts.per_token if stack.experts else 0
        numbers += stack.layers * (
            efficiency.DISPATCH * chosen * sizes.embed
            + efficiency.ELEMENTWISE_EMBED * sizes.embed
            + efficiency.ELEMENTWISE_HEADS * heads / tp
            + efficiency.ELEMENTWISE_MLP * stack.mlp.inner / tp
        )
    # a forward pass: a third of a training step's
    elementwise = device.used * tokens * number(round(numbers / 3))
    busy = max(read / bandwidth, flops / _peak(step, rate)) + elementwise / bandwidth + _gaps(step)
    busy = busy + number(efficiency.CHUNK_OF_LAYER, "s") * number(sizes.layers, "layers")
    busy = busy + _experts_more(step, chunk + many)
    busy = busy + number(_link_seconds(step, chunk + many), "s")
    return max(busy, _launching(step))


def _link_seconds(step: StepModel, tokens: int) -> float:
    plain = StepModel(step.workload, step.choice)
    placement = place_axes(step.machine, step.choice.sizes)
    return sum(
        one.times * over(placement, one.axes).seconds(one.operation, int(one.bytes))
        for one in _sent(plain, tokens)
    )


def _weight_bytes(step: StepModel, tokens: int) -> Number:
    """Bytes of the weights that a step of so many tokens reads, on a device.

    Of experts, those that at least one token is expected to choose: experts that are chosen with
    equal probability. Adapters of all slots are read, whichever of them a token has.
    """
    device, sizes, number = step.device, step.sizes, step.number
    used, head = device.used, _head(step)
    one = used if step.choice.weights is None else number(1, "bytes")  # see _served_weights
    read = (used if sizes.is_tied else one) * head + used * _slots(step)
    for stack in sizes.generating:
        router = step.choice.size("tp") * _router_weights(stack)
        rest = stack.weights + _copies(step, stack) - stack.expert_weights - router
        weights = one * number(rest)
        if stack.experts is not None:
            of_experts = used if step.machine.is_tpu else one
            weights = weights + used * number(router)
            weights = weights + of_experts * _touched(step, stack, tokens)
            if _copies_experts(step, tokens):  # written and read
                weights = weights + 2 * used * number(stack.expert_weights) / device.ep
        read = read + number(stack.layers, "layers") * weights / device.tp
    return read


def _copies_experts(step: StepModel, tokens: int) -> bool:
    """Whether a step makes a copy in 16 bits of experts of 8: see ops/grouped.py."""
    chip, weights = step.machine.chip, step.choice.weights
    if weights is None or step.machine.is_tpu:
        return False
    if chip.platform == "gpu" and tokens <= FEW_TOKENS:
        return False
    return weights != "fp8" or not is_hopper(chip.device_kinds[0])


def _touched(step: StepModel, stack: StackSizes, tokens: int) -> Number:
    """Weights of a layer's experts that at least one token is expected to choose, on a device."""
    assert stack.experts is not None
    count, chosen = stack.experts.count, stack.experts.per_token
    touched = step.number(count * (1 - (1 - chosen / count) ** tokens), "experts")
    return touched * step.number(stack.expert_weights // count) / step.device.ep


def _experts_more(step: StepModel, tokens: int) -> Number:
    """Seconds that experts of few tokens take beside reading them, on GPUs.

    Each expert is multiplied with all tokens (ops/experts_triton.py): in 16 bits while it is read,
    in 8 bits after it is converted.
    """
    more: Number = step.number(0, "s")
    if step.machine.chip.platform != "gpu" or tokens > FEW_TOKENS:
        return more
    is_small = step.choice.weights is not None
    rate = efficiency.EXPERTS_OF_8_BITS if is_small else efficiency.EXPERTS_OF_16_BITS
    multiplied = step.number(max(tokens, 16), "tokens")
    for stack in step.sizes.generating:
        if stack.experts is None:
            continue
        layers = step.number(stack.layers, "layers")
        weights = layers * _touched(step, stack, tokens) / step.device.tp
        took = 2 * weights * multiplied / _peak(step, rate)
        read = step.device.used * weights / _bandwidth(step)
        more = more + (took if is_small else max(took - read, 0 * read))
    return more


def _met(step: StepModel, stacks: Sequence[StackSizes]) -> Number:
    """Weights of layers that a token meets, on a device; on the device with most experts of it."""
    device, number, total = step.device, step.number, 0
    for stack in stacks:
        on_all = stack.met + _copies(step, stack)
        met = number(on_all)
        if stack.experts is not None:
            experts = sum(matrix.met for matrix in stack.of_kind("expert"))
            slowest = number(experts * step.workload.imbalance) / device.ep
            met = number(on_all - experts) + slowest
        total = total + number(stack.layers, "layers") * met
    return total / device.tp


def _router_weights(stack: StackSizes) -> int:
    return sum(matrix.weights for matrix in stack.of_kind("router"))


def _copies(step: StepModel, stack: StackSizes) -> int:
    """Of a layer, the weights that tp does not split, once for each further device along it."""
    return (step.choice.size("tp") - 1) * stack.whole_weights


def _head(step: StepModel) -> Number:
    """Weights of the LM head, on a device."""
    sizes = step.sizes
    return step.number(sizes.dims["vocab"] * sizes.embed) / step.device.tp


def _cache_bytes(step: StepModel) -> Number:
    """Bytes of keys and values that a step reads."""
    number = step.number
    sequences = number(places(step.workload, step.choice), "sequences")
    cache: Number = 0
    for stack, seen in _read_tokens(step.workload):
        layers, tokens = number(stack.layers, "layers"), number(seen, "tokens")
        cache = cache + 2 * layers * sequences * tokens * _cached_heads(step.device)
    return step.device.cached * cache


def _bandwidth(step: StepModel) -> Number:
    chip = step.machine.chip
    bandwidth = chip.memory_bandwidth / chip.cores_per_chip * efficiency.MEMORY
    return step.number(bandwidth, "bytes/s")


def _matmul(step: StepModel, tokens: int) -> float:
    """Of the peak, in matmuls of so many tokens.

    Where GPUs have fp8 units, weights of fp8 meet activations of fp8, but for those that tp sums
    over: see ops/quantized.py.
    """
    chip = step.machine.chip
    rate = efficiency.matmul(chip, tokens)
    if step.choice.weights != "fp8" or chip.platform != "gpu" or not chip.fp8_flops:
        return rate
    matrices = [matrix for stack in step.sizes.stacks for matrix in stack.of_kind("matrix")]
    all_of_them = sum(matrix.weights for matrix in matrices)
    summed = sum(matrix.weights for matrix in matrices if matrix.adds_to_residual)
    as_before = summed / all_of_them if step.choice.size("tp") > 1 else 0.0
    return rate / (as_before + (1 - as_before) * efficiency.FP8_SERVED)


def _peak(step: StepModel, share: float) -> Number:
    chip = step.machine.chip
    return step.number(chip.bf16_flops / chip.cores_per_chip * share, "FLOP/s")


def _kernels(step: StepModel) -> Number:
    each = efficiency.KERNELS_OF_LAYER.get(step.machine.chip.platform, 0.0)
    layers = sum(stack.layers for stack in step.sizes.generating)
    return step.number(round(layers * each), "kernels")


def _gaps(step: StepModel) -> Number:
    return _kernels(step) / step.number(efficiency.GAPS_PER_SECOND, "kernels/s")


def _launching(step: StepModel) -> Number:
    return _kernels(step) / step.number(efficiency.LAUNCHES_PER_SECOND, "kernels/s")


SCHEDULE = Schedule(
    meshes=meshes,
    held=held,
    check=check,
    refusal=refusal,
    remat=lambda policies: policies,
    kinds=KINDS,
    always=lambda step: {},
    peaks=peaks,
    written=collectives,
    compiled=lambda step, written: written,
    work=work,
    seconds=seconds,
    splits_experts=True,
)
