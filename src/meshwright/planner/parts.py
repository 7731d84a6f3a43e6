"""A device's part of a job under a choice: its sequences, tokens, and how attention is split."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from meshwright.arithmetic import divisors, round_up
from meshwright.errors import MeshwrightError
from meshwright.models import Attention, activation_layouts, describe_padding, family_of
from meshwright.ops.attention import Mask, Split
from meshwright.planner.result import Choice, Job
from meshwright.planner.sizes import StackSizes

LANES = 128  # a TPU's arrays are this wide at least: a last dim of 64 takes the room of 128
SUBLANES = 8  # and the dim before it is a multiple of this
_ITEM = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int8": 1}


def item_bytes(dtype: str) -> int:
    """Bytes of a number."""
    return _ITEM[dtype]


def sequences(job: Job, choice: Choice) -> int:
    """Sequences of a micro-batch on a device."""
    return job.batch // (choice.size("dp", "fsdp") * choice.accumulation)


def length(job: Job, choice: Choice) -> int:
    """Tokens on a device of the sequence that meets the LM head."""
    return job.lengths["tokens"] // choice.size("sp")


def tokens(job: Job, choice: Choice) -> int:
    """Tokens of a micro-batch on a device that meet the LM head."""
    return sequences(job, choice) * length(job, choice)


def vocab(job: Job, choice: Choice) -> int:
    """The vocabulary in memory, padded to a multiple of tp."""
    return round_up(job.model.vocab, choice.size("tp"))


def padding(job: Job, choice: Choice) -> str | None:
    """What is padded, in words: `vocab 128257 padded to 128258 for tp=2`."""
    return describe_padding(job.model, standard_rules(job.model), choice.sizes)


@functools.lru_cache(maxsize=64)
def standard_rules(model: Any, sequence_parallel: bool = False) -> Any:
    """The rules that the planner counts with."""
    return family_of(model).rules(sp=True, sequence_parallel=sequence_parallel)


def split_of(job: Job, choice: Choice) -> Split:
    """How the first attention of a model is split over sp; an error says why it cannot be."""
    splits = splits_of(job, choice)
    return splits[0][2] if splits else _first_split(job, choice.sizes)


def splits_of(job: Job, choice: Choice) -> tuple[tuple[StackSizes, Attention, Split], ...]:
    """Every attention of a layer of each stack; an error says why sp cannot split it."""
    key = choice.size("tp"), choice.size("sp")
    found: tuple[tuple[StackSizes, Attention, Split], ...] | None = job.splits.get(key)
    if found is None:
        found = job.splits[key] = _splits(job, choice.sizes)
    return found


def _splits(job: Job, axes: Mapping[str, int]) -> tuple[tuple[StackSizes, Attention, Split], ...]:
    first = _first_split(job, axes)
    found = []
    for stack in job.sizes.stacks:
        for attention in (block.attention for block in stack.blocks):
            if attention is not None:
                queries = job.lengths[stack.field]
                keys = job.lengths[attention.keys_from or stack.field]
                split = dataclasses.replace(
                    first, length=queries, mask=attention.mask.within(queries, keys),
                    biased=attention.biased, keys=None if keys == queries else keys,
                )  # fmt: skip
                found.append((stack, attention, split))
    return tuple(found)


def _first_split(job: Job, axes: Mapping[str, int]) -> Split:
    nontrivial = frozenset(axis for axis, size in axes.items() if size > 1)
    layouts = activation_layouts(standard_rules(job.model), nontrivial)
    split: Split = family_of(job.model).sequence_split(job.model, layouts, axes, job.seq)
    return split


def strategy_of(job: Job, choice: Choice) -> str:
    """The strategy of attention over sp; none where sequences are whole. It is not checked.

    `auto` depends on the machine: candidates.with_strategy makes it one of the others first.
    """
    if choice.size("sp") == 1:
        return "none"
    if choice.strategy == "auto":
        raise MeshwrightError(
            f"'{choice.mesh}' leaves the strategy of attention over sp to the machine; "
            "planner.candidates.with_strategy(job, choice, machine) names it"
        )
    return choice.strategy


def mlp_chunks(length: int, choice: Choice) -> int:
    """In how many chunks the mlp takes so many tokens: as ops.chunks cuts them."""
    if not choice.mlp_chunk:
        return 1
    least = math.ceil(length / choice.mlp_chunk)
    return next(n for n in divisors(length) if n >= least)


def loss_chunks(job: Job, choice: Choice) -> tuple[int, int]:
    """How many chunks of tokens the loss takes, and the tokens of one."""
    on_device = tokens(job, choice)
    size = min(job.loss_chunk, on_device)
    return math.ceil(on_device / size), size


def keys_seen(attention: Attention, queries: int, keys: int) -> float:
    """Keys that a query attends to, on average over queries and layers."""

    def seen(mask: Mask) -> float:
        mask = mask.within(queries, keys)
        if not mask.causal:
            return keys
        window = min(mask.window or keys, keys)
        return window * (2 * keys - window) / keys / 2

    masks = attention.masks or ((attention.mask, 1),)
    return sum(layers * seen(mask) for mask, layers in masks) / sum(n for _, n in masks)
