"""How long the engine's steps take: decode steps, chunks of prompts, what is scheduled."""

import bisect
import functools
import math
from collections.abc import Callable, Mapping, Sequence

from meshwright.ops import FEW_TOKENS
from meshwright.planner import efficiency
from meshwright.planner.attention import keys_seen, splits_of
from meshwright.planner.links import over, place_axes
from meshwright.planner.schedules.engine import (
    adapter_slots,
    cached_heads,
    collectives,
    copies_experts,
    engine_of,
    places,
    router_weights,
)
from meshwright.planner.sizes import StackSizes
from meshwright.planner.step import StepModel, Work
from meshwright.planner.terms import Number
from meshwright.planner.workload import Workload
from meshwright.serving import EngineConfig, ScheduledStep


def work(step: StepModel) -> Work:
    """The work of a decode step; `sequences`: logits, choice of a token, the host's account."""
    number = step.number
    many = places(step.workload, step.choice)
    sequences = number(many, "sequences")
    bandwidth = _bandwidth(step)
    read = _weight_bytes(step, many)
    met = _met(step, step.sizes.generating) + _head(step) + adapter_slots(step)
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
    chunk = engine_of(workload).chunk
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
        return engine_of(self._sized(1).workload)

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
        for one in collectives(plain, tokens)
    )


def _weight_bytes(step: StepModel, tokens: int) -> Number:
    """Bytes of the weights that a step of so many tokens reads, on a device.

    Of experts, those that at least one token is expected to choose: experts that are chosen with
    equal probability. Adapters of all slots are read, whichever of them a token has.
    """
    device, sizes, number = step.device, step.sizes, step.number
    used, head = device.used, _head(step)
    one = used if step.choice.weights is None else number(1, "bytes")  # see _served_weights
    read = (used if sizes.is_tied else one) * head + used * adapter_slots(step)
    for stack in sizes.generating:
        router = step.choice.size("tp") * router_weights(stack)
        rest = stack.weights + _copies(step, stack) - stack.expert_weights - router
        weights = one * number(rest)
        if stack.experts is not None:
            of_experts = used if step.machine.is_tpu else one
            weights = weights + used * number(router)
            weights = weights + of_experts * _touched(step, stack, tokens)
            if copies_experts(step, tokens):  # written and read
                weights = weights + 2 * used * number(stack.expert_weights) / device.ep
        read = read + number(stack.layers, "layers") * weights / device.tp
    return read


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
            most = step.workload.load_of_experts(stack, step.choice.size("ep"))
            slowest = number(experts * most) / device.ep
            met = number(on_all - experts) + slowest
        total = total + number(stack.layers, "layers") * met
    return total / device.tp


def _copies(step: StepModel, stack: StackSizes) -> int:
    """Of a layer, the weights that tp does not split, once for each further device along it."""
    return (step.choice.size("tp") - 1) * stack.whole_weights


def _head(step: StepModel) -> Number:
    """Weights of the LM head, on a device."""
    sizes = step.sizes
    return step.number(sizes.dims["vocab"] * sizes.embed) / step.device.tp


def _read_tokens(workload: Workload) -> list[tuple[StackSizes, int]]:
    """Attentions of the stacks that generate, and the tokens whose keys a new one reads."""
    seq, found = workload.seq, []
    for stack in workload.sizes.generating:
        for attention in (block.attention for block in stack.blocks if block.attention):
            masks = attention.masks or ((attention.mask, 1),)
            read = sum(layers * min(seq, mask.window or seq) for mask, layers in masks)
            found.append((stack, round(read / sum(layers for _, layers in masks))))
    return found


def _cache_bytes(step: StepModel) -> Number:
    """Bytes of keys and values that a step reads."""
    number = step.number
    sequences = number(places(step.workload, step.choice), "sequences")
    cache: Number = 0
    for stack, seen in _read_tokens(step.workload):
        layers, tokens = number(stack.layers, "layers"), number(seen, "tokens")
        cache = cache + 2 * layers * sequences * tokens * cached_heads(step.device)
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
    peak = efficiency.peak(step.machine.chip, step.workload.dtype)
    return step.number(peak * share, "FLOP/s")


def _kernels(step: StepModel) -> Number:
    each = efficiency.KERNELS_OF_LAYER.get(step.machine.chip.platform, 0.0)
    layers = sum(stack.layers for stack in step.sizes.generating)
    return step.number(round(layers * each), "kernels")


def _gaps(step: StepModel) -> Number:
    return _kernels(step) / step.number(efficiency.GAPS_PER_SECOND, "kernels/s")


def _launching(step: StepModel) -> Number:
    return _kernels(step) / step.number(efficiency.LAUNCHES_PER_SECOND, "kernels/s")
