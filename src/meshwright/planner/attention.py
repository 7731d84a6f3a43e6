"""How attention is split over a mesh, by which strategy, in which kernel, and what that costs."""

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping
from typing import Any

from meshwright.models import Attention, activation_layouts, choose_exchange, family_of
from meshwright.ops.attention import (
    FLOPS_PER_BYTE,
    STRATEGIES,
    Call,
    Mask,
    Split,
    calls_of,
    choose_strategy,
    padding,
    slow_kernel,
)
from meshwright.ops.attention import refusal as strategy_refusal
from meshwright.planner import efficiency
from meshwright.planner.sizes import StackSizes
from meshwright.planner.workload import Choice, Workload

Kernel = tuple[tuple[str, str] | None, float]
Splits = tuple[tuple[StackSizes, Attention, Split], ...]


def standard_rules(model: Any, axes: Collection[str], sequence_parallel: bool = False) -> Any:
    """The rules that the planner counts with, on a mesh of these axes."""
    return _rules(model, sequence_parallel, "ep" in axes)


@functools.lru_cache(maxsize=64)
def _rules(model: Any, sequence_parallel: bool, ep: bool) -> Any:
    return family_of(model).rules(sp=True, sequence_parallel=sequence_parallel, ep=ep)


def exchange_of(workload: Workload, choice: Choice) -> str | None:
    """How tokens reach experts of other devices; None where all devices have all of them."""
    experts = workload.sizes.experts
    if experts is None or choice.size("ep") == 1 or workload.kind == "serve":
        return None
    setting = workload.config.compute.experts
    return choose_exchange(setting, choice.size("ep"), experts.per_token)


def split_of(workload: Workload, choice: Choice) -> Split:
    """How the first attention of a model is split over sp; an error says why it cannot be."""
    splits = splits_of(workload, choice)
    return splits[0][2] if splits else _first_split(workload, choice.sizes)


def splits_of(
    workload: Workload, choice: Choice
) -> tuple[tuple[StackSizes, Attention, Split], ...]:
    """Every attention of a layer of each stack; an error says why sp cannot split it."""
    key = choice.tensor, choice.context
    found: Splits | None = workload.splits.get(key)
    if found is None:
        found = workload.splits[key] = _splits(workload, choice.sizes)
    return found


def _splits(
    workload: Workload, axes: Mapping[str, int]
) -> tuple[tuple[StackSizes, Attention, Split], ...]:
    first = _first_split(workload, axes)
    found = []
    for stack in workload.sizes.stacks:
        for attention in (block.attention for block in stack.blocks):
            if attention is not None:
                queries = workload.lengths[stack.field]
                keys = workload.lengths[attention.keys_from or stack.field]
                split = dataclasses.replace(
                    first, length=queries, mask=attention.mask.within(queries, keys),
                    biased=attention.biased, keys=None if keys == queries else keys,
                )  # fmt: skip
                found.append((stack, attention, split))
    return tuple(found)


def _first_split(workload: Workload, axes: Mapping[str, int]) -> Split:
    nontrivial = frozenset(axis for axis, size in axes.items() if size > 1)
    layouts = activation_layouts(standard_rules(workload.model, axes), nontrivial)
    split: Split = family_of(workload.model).sequence_split(
        workload.model, layouts, axes, workload.seq
    )
    return split


def keys_seen(attention: Attention, queries: int, keys: int) -> float:
    """Keys that a query attends to, on average over queries and layers."""

    def seen(mask: Mask) -> float:
        causal, mask = mask.causal, mask.within(queries, keys)
        if not mask.causal and not (causal and queries == keys):  # a single token sees itself
            return keys
        window = min(mask.window or keys, keys)
        return window * (2 * keys - window) / keys / 2

    masks = attention.masks or ((attention.mask, 1),)
    return sum(layers * seen(mask) for mask, layers in masks) / sum(n for _, n in masks)


def strategy_of(workload: Workload, choice: Choice) -> str:
    """The strategy of attention over sp; none where sequences are whole. It is not checked."""
    if choice.context == 1:
        return "none"
    if choice.context_parallel == "auto":
        return with_strategy(workload, choice).context_parallel
    return choice.context_parallel


def with_strategy(workload: Workload, choice: Choice) -> Choice:
    """The choice with its strategy of attention over sp named: what auto takes on this machine.

    A strategy that was named is kept, if it can serve.
    """
    if choice.context == 1:
        return choice
    chip = workload.machine.chip  # FLOP/s for each byte/s to its neighbour, as train takes it
    flops_per_byte = FLOPS_PER_BYTE if chip.platform == "cpu" else chip.flops_per_byte
    split = dataclasses.replace(split_of(workload, choice), flops_per_byte=flops_per_byte)
    strategy = choose_strategy(split, choice.context_parallel)
    return choice.changed(context_parallel=strategy)


def strategies(workload: Workload, choice: Choice) -> tuple[str, ...]:
    """Every strategy that can serve a mesh; an error says why none can."""
    if choice.context == 1:
        return (choice.context_parallel,)
    split = split_of(workload, choice)
    able = tuple(name for name in STRATEGIES if strategy_refusal(split, name) is None)
    return able or (choose_strategy(split),)  # which raises, with the reasons


def slow_attention(workload: Workload, choice: Choice) -> tuple[str, str] | None:
    """The kernel that is used where no fused one can be, and why; None where one can."""
    return next((slow for slow, _ in kernels_of(workload, choice) if slow is not None), None)


def plain_attention(
    workload: Workload, choice: Choice
) -> list[tuple[StackSizes, Attention, Split]]:
    """Those of splits_of that no fused kernel computes; CPUs have none."""
    if workload.machine.chip.platform == "cpu":
        return list(splits_of(workload, choice))
    kernels = zip(splits_of(workload, choice), kernels_of(workload, choice), strict=True)
    return [one for one, (slow, _) in kernels if slow is not None]


def attention_slowdown(workload: Workload, choice: Choice, index: int = 0) -> tuple[float, float]:
    """How much longer an attention takes than a fused kernel without padding, and its keys.

    `index` is that of the attention in splits_of. Keys are as many as the kernel computes with.
    """
    _, attention, split = splits_of(workload, choice)[index]
    slow, padded = kernels_of(workload, choice)[index]
    keys = split.keys or split.length
    if slow is None:
        return padded, keys * math.sqrt(padded)  # queries and keys are padded alike
    # plain JAX computes all keys, also those outside a window; a causal mask sees half of them
    masked = 1 if split.mask.causal else 2
    computed = keys * masked / 2 / keys_seen(attention, split.length, keys)
    return efficiency.PLAIN_ATTENTION[workload.machine.chip.platform] * computed, keys


def kernels_of(workload: Workload, choice: Choice) -> tuple[Kernel, ...]:
    """Of each of splits_of, its slow kernel, and how much longer padding makes it take."""
    chip, strategy = workload.machine.chip, strategy_of(workload, choice)
    if workload.schedule.fused_attention:  # scaled_dot_product_attention
        return ((None, 1.0),) * len(splits_of(workload, choice))
    key = choice.tensor, choice.context, strategy
    found: tuple[Kernel, ...] | None = workload.kernels.get(key)
    if found is None:
        kernel = workload.config.compute.attention
        of_splits = (
            calls_of(split, strategy, chip.platform, workload.dtype, segmented=True)
            for _, _, split in splits_of(workload, choice)
        )
        found = workload.kernels[key] = tuple(
            _kernel(calls, kernel, chip.platform, chip.device_kinds[0]) for calls in of_splits
        )
    return found


@functools.lru_cache(maxsize=4096)
def _kernel(calls: tuple[Call, ...], kernel: str, platform: str, kind: str) -> Kernel:
    if platform == "cpu":
        return None, 1.0
    return slow_kernel(calls, kernel, kind), padding(calls, kernel, kind)
