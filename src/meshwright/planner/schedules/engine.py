"""The schedule of the inference engine: its meshes, its memory and its collectives.

A decode step reads the weights and the keys of all sequences once; tp adds up blocks. A step with a
chunk of a prompt computes the places of the whole batch beside it. Both are steps of
serving/engine.py with its default pages and chunks; engine_time.py says how long they take.
"""

import dataclasses
import math
from collections.abc import Iterator

from meshwright.arithmetic import round_up
from meshwright.audits import Collective
from meshwright.errors import MeshwrightError
from meshwright.models import LoraConfig, indivisible, serving_of
from meshwright.ops import FEW_TOKENS, is_hopper
from meshwright.planner.device import Device
from meshwright.planner.schedules import jax
from meshwright.planner.sizes import StackSizes, adapter_numbers
from meshwright.planner.step import Kinds, StepModel
from meshwright.planner.terms import Number
from meshwright.planner.workload import Choice, Workload
from meshwright.serving import EngineConfig, served_config

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


def engine_of(workload: Workload) -> EngineConfig:
    """Pages, chunks of prompts and memory."""
    assert workload.engine is not None
    return workload.engine


def check(workload: Workload) -> None:
    """Raise if the engine has slots of adapters, and the model takes none."""
    if engine_of(workload).max_adapters and serving_of(workload.model).adapter is None:
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
        padding = number(engine_of(workload).page_size, "tokens")  # which goes to a page
        tokens = sequences * number(kept, "tokens") + padding
        cache = cache + 2 * layers * tokens * cached_heads(device)
    mlp = number(max(stack.mlp.inner for stack in device.sizes.generating))
    if (experts := device.sizes.experts) is not None:  # and a copy of the token for each
        mlp = mlp + number(experts.per_token, "experts") * device.embed
    chunk = min(workload.seq, engine_of(workload).chunk)
    tokens = sequences + number(chunk, "tokens")
    copied: Number = 0
    if copies_experts(step, chunk + places(workload, step.choice)):
        most = max(stack.expert_weights for stack in device.sizes.generating)
        copied = device.used * number(most) / (device.tp * device.ep)
    yield (
        "prefill",
        {
            "parameters": _served_weights(step) + device.used * adapter_slots(step),
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
        whole = whole + layers * number(router_weights(stack)) / device.ep
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


def adapter_slots(step: StepModel) -> Number:
    """Numbers of the slots of adapters on a device.

    Matrices that an engine merges have one pair of factors, and each b has columns for all of their
    outputs: see models/serving.py.
    """
    engine, tp = engine_of(step.workload), step.choice.size("tp")
    if not engine.max_adapters:
        return 0
    rank, axes = engine.adapter_rank, tuple(step.choice.sizes.items())
    numbers = adapter_numbers(step.workload.model, LoraConfig(rank), axes)
    for stack in step.sizes.stacks:
        for block in stack.blocks:
            outputs = [one.outputs for one in block.matrices if not one.adds_to_residual]
            numbers += stack.layers * rank * (len(outputs) - 1) * sum(outputs) // tp
    return step.number(engine.max_adapters, "adapters") * step.number(numbers)


def cached_heads(device: Device) -> Number:
    """Numbers of a key on a device."""
    dims, number = device.sizes.dims, device.number
    return number(dims["kv_heads"], "heads") * number(dims["head_dim"]) / device.tp


def _kept_tokens(workload: Workload) -> list[tuple[StackSizes, int]]:
    """Attentions of the stacks that generate, and the tokens whose keys each keeps.

    The engine keeps whole pages of all tokens, also of those that a sliding window has left. Of
    latent attention it keeps keys and values of every head, which are as wide as keys.
    """
    kept = round_up(workload.seq, engine_of(workload).page_size)
    stacks = workload.sizes.generating
    return [(stack, kept) for stack in stacks for block in stack.blocks if block.attention]


# ---- collectives


def collectives(step: StepModel, tokens: int | None = None) -> Iterator[Collective]:
    """What a step of so many tokens sends; by default one of each sequence, as in a decode step.

    The residual stream's sums over tp, and of experts over ep too. Logits, of one token for each
    sequence, go to all.
    """
    device, number, stacks = step.device, step.number, step.sizes.generating
    many = places(step.workload, step.choice)
    sequences = number(many, "sequences")
    size = device.used * number(tokens or many, "sequences") * device.embed
    with_experts = sum(stack.layers for stack in stacks if stack.experts)
    mixtures = with_experts if step.choice.size("ep") > 1 else 0
    over = tuple(axis for axis in ("tp", "ep") if step.choice.size(axis) > 1)
    yield Collective("all-reduce", over, size, mixtures, "forward", "sums of a layer's experts")
    router = device.float32 * number(router_weights(stacks[-1]) + stacks[-1].router_biases)
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


def copies_experts(step: StepModel, tokens: int) -> bool:
    """Whether a step makes a copy in 16 bits of experts of 8: see ops/grouped.py."""
    chip, weights = step.machine.chip, step.choice.weights
    if weights is None or step.machine.is_tpu:
        return False
    if chip.platform == "gpu" and tokens <= FEW_TOKENS:
        return False
    return weights != "fp8" or not is_hopper(chip.device_kinds[0])


def router_weights(stack: StackSizes) -> int:
    return sum(matrix.weights for matrix in stack.of_kind("router"))
