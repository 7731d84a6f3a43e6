"""Whether a mesh divides what the rules split: the model's dims, the batch and the sequence."""

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax

from meshwright.arithmetic import divisors
from meshwright.layouts import Rules
from meshwright.meshes import MOST_TRIED, nearest_sizes
from meshwright.models.lora import is_layer_matrix
from meshwright.models.registry import family_of
from meshwright.ops import NF4, NF4_BLOCK
from meshwright.present import count, mesh_text, nearest_sizes_text

_MOST = 2**31 - 1  # dims of arrays are counted in int32
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
    """Why a mesh cannot split this model and batch; None if it can.

    "kv_heads=8 cannot be split in tp=16, but in 2, 4 or 8"

    With `seq` None the length is not checked.
    """
    split_dims = family_of(model).split_dims
    dim_axes, batch_axes, lengths = _split_axes(
        rules, tuple(mesh_shape), tuple(split_dims.values())
    )
    for field, dim in split_dims.items():
        axes = dim_axes.get(dim, ())
        size, parts = getattr(model, field, None) or 0, _parts(axes, mesh_shape)
        if not size and parts > 1 and dim == "experts":
            return f"the model has no {dim} to be split in {'·'.join(axes)}={parts}"
        if size % parts:
            why = f"{field}={size} cannot be split in {'·'.join(axes)}={parts}"
            split = [axis for axis in axes if mesh_shape[axis] > 1]
            if len(split) > 1:
                return why
            # sizes of this axis that divide all of the model's dims
            others = [
                (getattr(model, name, None) or 0, _parts(dim_axes.get(other, ()), mesh_shape))
                for name, other in split_dims.items()
                if split[0] in dim_axes.get(other, ())
            ]
            fits = [n for n in divisors(size) if not any(s * parts % (n * p) for s, p in others)]
            return f"{why}, but in {nearest_sizes_text(parts, fits)}" if fits else why
    parts = accumulation * _parts(batch_axes, mesh_shape)
    if batch % parts:
        over = "·".join([*batch_axes, *(["accumulation"] if accumulation > 1 else [])])
        return f"batch={batch} is not divisible by {over}={parts}"
    for axes in lengths:
        parts = _parts(axes, mesh_shape)
        if seq is not None and seq % parts:
            return f"seq={seq} is not divisible by {'·'.join(axes)}={parts}"
    return None


def indivisible_blocks(
    model: Any, base: str, rules: Rules, mesh_shape: Mapping[str, int]
) -> str | None:
    """Why a mesh cannot split the frozen matrices of a run with LoRA; None if it can.

    `base` is what they are kept in: a device has whole blocks of nf4.
    """
    if base != NF4:
        return None
    for dim, inputs in _matrix_inputs(model):
        axes = tuple(axis for axis in rules.layout(dim).axes[0] if mesh_shape.get(axis, 1) > 1)
        blocks, parts = inputs // NF4_BLOCK, _parts(axes, mesh_shape)
        if blocks % parts:
            return (
                f"{dim} has {count(blocks, 'block')} of {NF4_BLOCK} inputs, which share a scale in "
                f"nf4, and they cannot be split in {'·'.join(axes)}={parts}"
            )
    return None


@functools.lru_cache(maxsize=64)
def _matrix_inputs(model: Any) -> tuple[tuple[str, int], ...]:
    """Of each matrix of the layers its first dim and how many inputs it has, none twice."""
    specs = filter(is_layer_matrix, jax.tree.leaves(family_of(model).arrays(model)))
    return tuple(
        {(str(spec.dims[1]), math.prod(spec.shape[1 : 1 + spec.inputs])) for spec in specs}
    )


class Refuses(Protocol):
    """Whether a mesh is refused with a batch and a sequence length."""

    def __call__(self, mesh_shape: Mapping[str, int], /, batch: int, seq: int) -> bool: ...


def what_fits(
    mesh_shape: Mapping[str, int],
    batch: int,
    seq: int,
    refuses: Refuses,
    accumulation: int = 1,
    accepts: Callable[[int], bool] = lambda accumulation: False,
) -> str:
    """The end of a message about a mesh that is refused: what would not be.

    Another accumulation, another batch or length (`"batch=60 or 80 would fit"`), another mesh of as
    many devices, or both. All checks are in `refuses`, and for an accumulation in `accepts`:
    nothing is proposed that these refuse.
    """
    devices = math.prod(mesh_shape.values())
    other = _other_accumulation(accumulation, batch, accepts) if accumulation > 1 else ""
    # of which one is divided by all that splits
    units = [unit * times for times in {1, accumulation} for unit in divisors(2 * devices)]
    for name, size in (("batch", batch), ("seq", seq)):
        numbers = {"batch": batch, "seq": seq}
        multiples = sorted({n for unit in units for n in _around(size, unit)})
        fits = [n for n in multiples if not refuses(mesh_shape, **numbers | {name: n})]
        if fits:
            nearest = [n for n in fits if n < size][-1:] + [n for n in fits if n > size][:1]
            sizes = f"{name}={' or '.join(map(str, nearest))}"
            return f"{other}, or {sizes}" if other else f"{sizes} would fit"
    if other:
        return other
    others = nearest_sizes(tuple(mesh_shape.values()), devices)
    meshes: list[Mapping[str, int]] = [
        dict(zip(mesh_shape, sizes, strict=True)) for sizes in itertools.islice(others, MOST_TRIED)
    ]
    # context parallelism changes more than the other axes do
    meshes.sort(key=lambda shape: shape.get("sp") != mesh_shape.get("sp"))
    for shape in meshes:
        if not refuses(shape, batch, seq):
            return f"mesh '{mesh_text(shape)}' would fit"
    for shape in (mesh_shape, *meshes):
        batches, lengths = ((size, *_around(size, max(units))) for size in (batch, seq))
        for new_batch, new_seq in itertools.product(batches, lengths):
            if not refuses(shape, new_batch, new_seq):
                numbers = {"batch": new_batch} | ({} if new_seq == seq else {"seq": new_seq})
                return f"mesh '{mesh_text(shape)}' with {mesh_text(numbers)} would fit"
    return f"no mesh of {count(devices, 'device')} with these axes would"


def _other_accumulation(accumulation: int, batch: int, accepts: Callable[[int], bool]) -> str:
    """The nearest that divide the batch and would fit, in words; empty if none would."""
    nearest = sorted(divisors(batch), key=lambda number: abs(math.log(number / accumulation)))
    fits = list(itertools.islice(filter(accepts, nearest), 3))
    return f"accumulation={nearest_sizes_text(accumulation, fits)} would fit" if fits else ""


def _around(size: int, unit: int) -> list[int]:
    """The multiples of a unit on both sides of a size."""
    below = size // unit * unit
    return [multiple for multiple in (below, below + unit) if 0 < multiple <= _MOST]


@functools.lru_cache(maxsize=64)
def _split_axes(
    rules: Rules, mesh_axes: tuple[str, ...], split_dims: tuple[str, ...]
) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...], list[tuple[str, ...]]]:
    """The mesh axes of each of the model's dims, of the batch, and of the length."""

    def of_mesh(axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if axis in mesh_axes)

    layouts = [rules.layout(dims).axes for dims in ACTIVATIONS]
    named = {rule.dim for rule in rules.rules}
    dims = {dim: of_mesh(rules.layout(dim).axes[0]) for dim in split_dims if dim in named}
    return dims, of_mesh(layouts[0][0]), [of_mesh(axes[1]) for axes in layouts]


def _parts(axes: tuple[str, ...], mesh_shape: Mapping[str, int]) -> int:
    return math.prod(mesh_shape[axis] for axis in axes)
