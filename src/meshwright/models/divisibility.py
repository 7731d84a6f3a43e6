"""Whether a mesh divides what the rules split: the model's dims, the batch and the sequence."""

import functools
import math
from collections.abc import Mapping
from typing import Any

from meshwright.arithmetic import divisors
from meshwright.layouts import Rules
from meshwright.models.registry import family_of
from meshwright.present import nearest_multiples

# the length may be split differently between blocks and inside of them
ACTIVATIONS = ("batch length embed", "batch length mlp")


def indivisible(
    model: Any,
    rules: Rules,
    mesh_shape: Mapping[str, int],
    batch: int,
    seq: int | None,
    accumulation: int = 1,
) -> str | None:
    """Why a mesh cannot split this model and batch, with what would fit; None if it can.

    "kv_heads=8 cannot be split in tp=16; tp=8 would fit"

    With `seq` None the length is not checked.
    """
    dim_axes, batch_axes, lengths = _split_axes(
        rules, tuple(mesh_shape), family_of(model).split_dims
    )
    for dim, axes in dim_axes.items():
        size, parts = getattr(model, dim), _parts(axes, mesh_shape)
        if size % parts:
            over, fit = "·".join(axes), max(d for d in divisors(size) if d <= parts)
            return f"{dim}={size} cannot be split in {over}={parts}; {over}={fit} would fit"
    parts = accumulation * _parts(batch_axes, mesh_shape)
    if batch % parts:
        over = "·".join([*batch_axes, *(["accumulation"] if accumulation > 1 else [])])
        return _not_divisible("batch", batch, over, parts)
    for axes in lengths:
        parts = _parts(axes, mesh_shape)
        if seq is not None and seq % parts:
            return _not_divisible("seq", seq, "·".join(axes), parts)
    return None


@functools.lru_cache(maxsize=64)
def _split_axes(
    rules: Rules, mesh_axes: tuple[str, ...], split_dims: tuple[str, ...]
) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...], list[tuple[str, ...]]]:
    """The mesh axes of each of the model's dims, of the batch, and of the length."""

    def of_mesh(axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if axis in mesh_axes)

    layouts = [rules.layout(dims).axes for dims in ACTIVATIONS]
    dims = {dim: of_mesh(rules.layout(dim).axes[0]) for dim in split_dims}
    return dims, of_mesh(layouts[0][0]), [of_mesh(axes[1]) for axes in layouts]


def _parts(axes: tuple[str, ...], mesh_shape: Mapping[str, int]) -> int:
    return math.prod(mesh_shape[axis] for axis in axes)


def _not_divisible(name: str, size: int, over: str, parts: int) -> str:
    fit = nearest_multiples(size, parts)
    return f"{name}={size} is not divisible by {over}={parts}; {name}={fit} would fit"
