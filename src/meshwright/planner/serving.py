"""Serving: memory, the time of a first and of each further token, and how many sequences fit.

A decode step reads the weights and the keys of all sequences once; tp adds up blocks. A step with a
chunk of a prompt computes the places of the whole batch beside it. Both are steps of
serve/engine.py with its default pages and chunks. Formulas are written over numbers (terms.py).
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from meshwright.machines import Machine
from meshwright.models import generation_of
from meshwright.ops import QUANTIZED_DTYPES
from meshwright.planner import efficiency
from meshwright.planner.candidates import meshes, refusal
from meshwright.planner.constraints import Constraints
from meshwright.planner.device import Device
from meshwright.planner.largest import held_by_engine, largest_batch
from meshwright.planner.links import over
from meshwright.planner.memory import ENGINE, cached_heads, memory, read_tokens
from meshwright.planner.parts import keys_seen, padding, splits_of
from meshwright.planner.ranking import groups, simplicity
from meshwright.planner.result import Choice, Estimate, Job, Memory, Refusal, Serving, Transfer
from meshwright.planner.shares import place_axes
from meshwright.planner.terms import MakeNumber, Number, plain, term
from meshwright.present import count

WEIGHTS = (None, *QUANTIZED_DTYPES)  # as EngineConfig.weights


def serving(
    job: Job, machine: Machine, limits: Constraints, objective: str
) -> tuple[list[Estimate], list[Refusal]]:
    """Every mesh of dp and tp: weights stay where they are used, so fsdp and sp are 1.

    The best first: by the time of a token (latency), or by tokens a second where each mesh serves
    as many sequences as it holds (throughput), or by memory. Times that cannot be told apart are
    one group (planner/ranking.py). Quantized weights change what a model says, so they come after
    those that are not. What needs more memory than an engine takes by default comes last.
    """
    found: list[tuple[float, Estimate]] = []
    refused: list[Refusal] = []
    for mesh in meshes(machine.num_devices):
        if not _is_served(mesh) or not limits.allows(mesh):
            continue
        why = refusal(job, mesh)
        if why is not None:
            refused.append(Refusal(mesh, why))
            continue
        for choice in _choices(job, mesh, limits):
            need, weights = memory(job, choice, machine), choice.weights
            if not need.fits:
                why = f"needs {need.total / 2**30:.1f} of {need.limit / 2**30:.1f} GiB"
                why += f" with weights in {weights}" if weights else ""
                refused.append(Refusal(choice, why, need))
                continue
            one = _estimate(job, choice, machine, need)
            assert one.serving is not None
            rate = one.serving.full_tokens_per_second
            found.append((1 / rate if objective == "throughput" else one.step_seconds, one))
    ranked: list[Estimate] = []
    for held, weights in itertools.product((True, False), WEIGHTS):
        part = [
            (seconds, one) for seconds, one in found
            if (held_by_engine(one.memory), one.choice.weights) == (held, weights)
        ]  # fmt: skip
        ranked += _ranked(part, objective, ranked)
    return ranked, refused


def serves(job: Job, mesh: Choice, machine: Machine, limits: Constraints) -> bool:
    """Whether a mesh is not refused."""
    return (
        _is_served(mesh)
        and refusal(job, mesh) is None
        and any(memory(job, choice, machine).fits for choice in _choices(job, mesh, limits))
    )


def _is_served(mesh: Choice) -> bool:
    return mesh.fsdp == mesh.sp == 1


def _choices(job: Job, mesh: Choice, limits: Constraints) -> Iterator[Choice]:
    """A mesh with every way to keep the weights."""
    for weights in _weights(job, limits):
        yield dataclasses.replace(mesh, weights=weights, cache=limits.fixed.get("cache"))


def _weights(job: Job, limits: Constraints) -> tuple[str | None, ...]:
    """How the weights may be kept: only an engine quantizes them."""
    if "weights" in limits.fixed:
        return (limits.fixed["weights"],)
    return WEIGHTS if generation_of(job.model).serving is not None else (None,)


def _ranked(
    found: list[tuple[float, Estimate]], objective: str, before: list[Estimate]
) -> list[Estimate]:
    if objective == "memory":
        found.sort(key=lambda pair: (pair[1].memory.total, pair[0]))
        return [one for _, one in found]
    ranked: list[Estimate] = []
    first = 1 + max((one.group for one in before), default=0)
    alike = groups(found, lambda pair: pair[0], lambda pair: pair[1].memory)
    for number, (_, members) in enumerate(alike, first):
        estimates = [dataclasses.replace(one, group=number) for _, one in members]
        ranked += sorted(estimates, key=lambda one: simplicity(one.choice, one.memory))
    return ranked


class Send(NamedTuple):
    """A kind of collective of a decode step."""

    what: str
    operation: str
    bytes: Number
    times: int


def sends(job: Job, choice: Choice, machine: Machine, number: MakeNumber = plain) -> list[Send]:
    """What a decode step sends over tp: the residual stream's sums, and the logits to all."""
    if choice.tp == 1:
        return []
    device, stack = Device(job, choice, machine, number), job.sizes.stacks[-1]
    sequences = number(_places(job, choice), "sequences")
    sums = 1 + len(stack.blocks) * stack.layers
    return [
        Send(
            "sums of the embedding and of a layer's blocks", "all-reduce",
            device.used * sequences * device.embed, sums,
        ),
        Send("logits", "all-gather", device.float32 * sequences * device.vocab, 1),
    ]  # fmt: skip


def formulas(job: Job, estimate: Estimate, machine: Machine) -> dict[str, str]:
    """By part of a decode step, and for the `first token`, how its seconds came about.

    None where the formulas of this Meshwright do not give the estimate's numbers.
    """
    choice, served = estimate.choice, estimate.serving
    if served is None:
        return {}
    numbers = _decode(job, choice, machine, term)
    numbers["first token"] = prefill(job, choice, machine, ENGINE.chunk, number=term)
    wanted = {**estimate.seconds, "first token": served.first_token_seconds}
    if {part: number.value for part, number in numbers.items()} != wanted:
        return {}
    return {part: str(number) for part, number in numbers.items() if number}


def prefill(
    job: Job,
    choice: Choice,
    machine: Machine,
    chunk: int,
    prompts: int = 1,
    number: MakeNumber = plain,
) -> Number:
    """Seconds to compute prompts of seq tokens, `chunk` tokens in a step, with no other to do."""
    steps = math.ceil(prompts * job.seq / chunk)
    each = min(prompts * job.seq, chunk)
    attention: Number = 0
    for stack, kind, split in splits_of(job, choice):
        keys = split.keys or split.length
        seen = number(round(keys_seen(kind, split.length, keys)), "keys")
        heads = number(stack.layers, "layers") * number(split.heads * split.head_dim)
        rate = efficiency.attention(machine.chip, split.head_dim, keys)
        work = 4 * heads * number(prompts * split.length, "tokens") * seen
        attention = attention + work / _peak(machine, rate, number)
    return (
        number(steps, "steps") * _chunk_step(Device(job, choice, machine, number), each) + attention
    )


def _chunk_step(device: Device, chunk: int) -> Number:
    """Seconds of a step with a chunk, without attention: places of the batch are computed too."""
    job, choice, machine, number = device.job, device.choice, device.machine, device.number
    sizes, places = device.sizes, _places(job, choice)
    tokens = number(chunk + places, "tokens")
    bandwidth = _bandwidth(machine, number)
    read, _ = _weight_bytes(device)
    head = number(sizes.dims["vocab"] * sizes.embed) * number(places + 1, "tokens")
    flops = 2 * (number(sizes.layer_weights) * tokens + head) / device.tp
    rate = efficiency.PREFILL * efficiency.matmul(machine.chip, chunk + places)
    numbers = 0.0
    for stack in sizes.stacks:
        heads = sum(block.inner for block in stack.blocks if block.attention)
        numbers += stack.layers * (
            efficiency.ELEMENTWISE_EMBED * sizes.embed
            + efficiency.ELEMENTWISE_HEADS * heads / choice.tp
            + efficiency.ELEMENTWISE_MLP * stack.mlp.inner / choice.tp
        )
    # a forward pass: a third of a training step's
    elementwise = device.used * tokens * number(round(numbers / 3))
    links = sum(one.seconds for one in _transfers(job, choice, machine, chunk + places))
    busy = max(read / bandwidth, flops / _peak(machine, rate, number))
    busy = busy + elementwise / bandwidth + _gaps(job, machine, number) + number(links, "s")
    return max(busy, _launching(job, machine, number))


def _decode(
    job: Job, choice: Choice, machine: Machine, number: MakeNumber = plain
) -> dict[str, Number]:
    """Seconds of a decode step by part; `idle` is what the host takes longer to launch it."""
    chip, device = machine.chip, Device(job, choice, machine, number)
    places = _places(job, choice)
    sequences = number(places, "sequences")
    bandwidth = _bandwidth(machine, number)
    read, weights = _weight_bytes(device)
    flops = 2 * weights * sequences
    rate = efficiency.matmul(chip, places)
    parts = {
        "weights": max(read / bandwidth, flops / _peak(machine, rate, number)),
        "cache": _cache_bytes(device) / bandwidth,
        "gaps between kernels": _gaps(job, machine, number),
        "sequences": sequences / _sequences(number),
        "waiting for links": number(
            sum(one.seconds for one in _transfers(job, choice, machine, places)), "s"
        ),
    }
    busy = parts["weights"] + parts["cache"] + parts["gaps between kernels"]
    busy = busy + parts["waiting for links"]
    launching = _launching(job, machine, number)
    if launching > busy:
        parts["idle"] = launching - busy
    return parts


def _places(job: Job, choice: Choice) -> int:
    """Sequences of a replica's step."""
    return math.ceil(job.batch / choice.dp)


def _weight_bytes(device: Device) -> tuple[Number, Number]:
    """Bytes of the weights that a generated token meets, on a device, and their number."""
    sizes, number = device.sizes, device.number
    stack = sizes.stacks[-1]
    layers = number(stack.layers, "layers") * number(stack.weights) / device.tp
    head = number(sizes.dims["vocab"] * sizes.embed) / device.tp
    if device.choice.weights is None:
        return device.used * (layers + head), layers + head
    one = number(1, "bytes")
    return one * layers + (device.used if sizes.is_tied else one) * head, layers + head


def _cache_bytes(device: Device) -> Number:
    """Bytes of keys and values that a step reads."""
    number = device.number
    sequences = number(_places(device.job, device.choice), "sequences")
    cache: Number = 0
    for stack, seen in read_tokens(device.job):
        layers, tokens = number(stack.layers, "layers"), number(seen, "tokens")
        cache = cache + 2 * layers * sequences * tokens * cached_heads(device)
    return device.cached * cache


def _bandwidth(machine: Machine, number: MakeNumber) -> Number:
    chip = machine.chip
    bandwidth = chip.memory_bandwidth / chip.cores_per_chip * efficiency.MEMORY
    return number(bandwidth, "bytes/s")


def _peak(machine: Machine, share: float, number: MakeNumber) -> Number:
    chip = machine.chip
    return number(chip.bf16_flops / chip.cores_per_chip * share, "FLOP/s")


def _sequences(number: MakeNumber) -> Number:
    return number(efficiency.SEQUENCES_PER_SECOND, "sequences/s")


def _kernels(job: Job, machine: Machine, number: MakeNumber) -> Number:
    each = efficiency.KERNELS_OF_LAYER.get(machine.chip.platform, 0.0)
    return number(round(job.sizes.stacks[-1].layers * each), "kernels")


def _gaps(job: Job, machine: Machine, number: MakeNumber) -> Number:
    return _kernels(job, machine, number) / number(efficiency.GAPS_PER_SECOND, "kernels/s")


def _launching(job: Job, machine: Machine, number: MakeNumber) -> Number:
    return _kernels(job, machine, number) / number(efficiency.LAUNCHES_PER_SECOND, "kernels/s")


def _transfers(job: Job, choice: Choice, machine: Machine, tokens: int) -> tuple[Transfer, ...]:
    """What a step of so many tokens sends."""
    if choice.tp == 1:
        return ()
    link = over(place_axes(machine, (choice.dp, 1, choice.tp, 1)), ("tp",))
    found = []
    for send in sends(job, choice, machine):
        size = send.bytes
        if send.operation == "all-reduce":  # of all tokens, logits of one for each sequence
            size = size * tokens // _places(job, choice)
        found.append(
            Transfer(
                send.what, send.operation, ("tp",), int(size), send.times, "forward",
                link=link.words, seconds=send.times * link.seconds(send.operation, int(size)),
            )
        )  # fmt: skip
    return tuple(found)


def _estimate(job: Job, choice: Choice, machine: Machine, need: Memory) -> Estimate:
    chip = machine.chip
    peak = chip.bf16_flops / chip.cores_per_chip
    device = Device(job, choice, machine)
    parts = _decode(job, choice, machine)
    step = sum(parts.values())
    read, weights = _weight_bytes(device)
    flops = 2.0 * weights * _places(job, choice)
    is_compute = flops / (peak * efficiency.matmul(chip, _places(job, choice))) == parts["weights"]
    bounds = {
        "weights": "compute" if is_compute else "memory", "cache": "memory",
        "gaps between kernels": "idle", "sequences": "idle", "waiting for links": "tp",
        "idle": "idle",
    }  # fmt: skip
    by_bound: dict[str, float] = {}
    for part, seconds in parts.items():
        by_bound[bounds[part]] = by_bound.get(bounds[part], 0.0) + seconds
    full = largest_batch(job, choice, machine) or job.batch
    filled = dataclasses.replace(job, batch=full)
    served = Serving(
        first_token_seconds=prefill(job, choice, machine, ENGINE.chunk),
        largest_batch=full,
        full_step_seconds=sum(_decode(filled, choice, machine).values()),
    )
    return Estimate(
        choice=choice,
        memory=need,
        flops=flops,
        computed_flops=flops,
        memory_bytes=read + _cache_bytes(device),
        transfers=_transfers(job, choice, machine, _places(job, choice)),
        seconds=parts,
        step_seconds=step,
        mfu=flops / step / peak,
        bound=max(by_bound, key=lambda name: by_bound[name]),
        reason=_reason(job, choice, need, parts, served),
        serving=served,
    )


def _reason(
    job: Job, choice: Choice, need: Memory, parts: dict[str, float], served: Serving
) -> str:
    def ms(part: str) -> str:
        return f"{1e3 * parts.get(part, 0.0):.1f}"

    rest = parts["sequences"] + parts["gaps between kernels"] + parts.get("idle", 0.0)
    kept, cache = (need.kinds[kind] / 2**30 for kind in ("parameters", "key-value cache"))
    reason = (
        f"a token of {count(job.batch, 'sequence')} takes {1e3 * sum(parts.values()):.1f} ms: "
        f"weights {ms('weights')}, cache {ms('cache')}, links {ms('waiting for links')}, "
        f"launching and sampling {1e3 * rest:.1f}; weights {kept:.1f} GiB, cache {cache:.1f}; "
        f"full, with {count(served.largest_batch, 'sequence')}, "
        f"{1e3 * served.full_step_seconds:.1f} ms"
    )
    if not held_by_engine(need):
        part = f"{ENGINE.memory_fraction:.0%} of memory"
        reason += f"; more than the {part} that an engine takes: --engine.memory-fraction"
    if need.tight:
        reason += f"; tight: {100 * need.total / need.limit:.0f}% of memory"
    padded = padding(job, choice)
    return reason if padded is None else f"{reason}; {padded}"
