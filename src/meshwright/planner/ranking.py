"""The order of choices, no finer than their times are known.

The fastest choice and all within UNCERTAINTY of it are one group; the fastest of the rest begins
the next. Inside a group the simplest comes first. Choices that need some of memory's reserve come
after all others, in groups of their own.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from meshwright.planner.result import Choice, Memory

Item = TypeVar("Item")
# of a predicted step time: how far it is from published and compiled steps (docs/plan/plan.md)
UNCERTAINTY = 0.10


def groups(
    items: Iterable[Item], seconds: Callable[[Item], float], memory: Callable[[Item], Memory]
) -> list[tuple[float, Sequence[Item]]]:
    """The items in groups, the fastest first; with each, the longest time that belongs to it."""
    found: list[tuple[float, list[Item]]] = []
    for item in sorted(items, key=lambda one: (memory(one).tight, seconds(one))):
        bound, members = found[-1] if found else (0.0, [item])
        if seconds(item) <= bound and memory(item).tight == memory(members[0]).tight:
            members.append(item)
        else:
            found.append(((1 + UNCERTAINTY) * seconds(item), [item]))
    return list(found)


def simplicity(choice: Choice, memory: Memory) -> tuple[int, int, int, int]:
    """For an order: the fewest axes, micro-batches and settings, then the least memory."""
    axes = sum(size > 1 for size in choice.sizes.values())
    settings = choice.sequence_parallel + bool(choice.mlp_chunk)
    return axes, choice.accumulation, settings, memory.total
