"""What a compiler makes of the collectives it is given.

>>> from meshwright.machines import Machine
>>> scattered_by(64, Machine.parse("v5p:4x4x4")), scattered_by(32, Machine.parse("v5p:4x4x4"))
('all-reduce', 'reduce-scatter')

The TPU compiler (libtpu 0.0.42, seen on v4, v5e, v5p and v6e, slices of 16 to 512 chips):
- sums gradients by an all-reduce, and cuts afterwards, where a reduce-scatter would go over all
  devices of a slice: twice the bytes on the wire. Over a part of a slice it scatters;
- sums whole what it would have to cut within its 128 lanes: the embedding's gradient where a
  device's part of embed is no multiple of that, and the head's where the vocabulary is none either;
- sums the head's whole, too, where the vocabulary is one;
- sums whole what it would scatter along the last dim in parts of exactly 128: the gradients of the
  weights that lead back to the residual stream (wo, down) and of the embedding;
- adds the two of a tied embedding before they are sent, not after (as the GPU compiler does), but
  where dp goes on in other slices;
- of what goes on in other slices sends between them only a device's part: an all-reduce is a
  reduce-scatter within slices, an all-reduce between them and an all-gather. Over all devices of
  one of several slices it does scatter, unless the axis goes on in the others (seen on v5e);
- gathers the ends anew for every micro-batch, and sums norms once for all of them;
- lets the gradients of keys make their first hop before they become float32.
Not counted: where memory is nearly full it may gather weights once more instead of keeping them.
Weights that fsdp and sp split together are gathered one axis after the other there
(ops.collectives.gather).
"""

import math
from collections.abc import Iterator

from meshwright.machines import Machine
from meshwright.meshes import axes_across_slices
from meshwright.planner.candidates import with_strategy
from meshwright.planner.links import WITHIN_SLICES
from meshwright.planner.parts import LANES, item_bytes, vocab
from meshwright.planner.result import Choice, Job, Transfer
from meshwright.planner.traffic import EMBEDDING, HEAD, KEY_GRADIENTS, Row, rows_of

SMALLEST = 16  # devices; smaller slices were seen to scatter
TOGETHER = ("fsdp", "sp")


def scattered_by(ways: int, machine: Machine) -> str:
    """The operation by which the machine's compiler scatters sums over so many devices."""
    whole = machine.is_tpu and machine.slices == 1 and ways >= max(machine.num_devices, SMALLEST)
    return "all-reduce" if whole else "reduce-scatter"


def compiled_traffic(job: Job, choice: Choice, machine: Machine) -> tuple[Transfer, ...]:
    """What one optimizer step sends on a machine, as its compiler has it."""
    rows = compiled_rows(job, choice, machine)
    parts = (part for row in rows for part in in_stages(row, choice, machine))
    return tuple(Transfer(*row[:7], formula=row[7]) for row in parts)


def in_stages(row: Row, choice: Choice, machine: Machine) -> tuple[Row, ...]:
    """A row over axes that go on in other slices: what is sent within slices, and between them."""
    what, operation, axes, size, times, phase, pieces, words, kind = row
    sizes = choice.sizes
    factors = axes_across_slices(list(sizes.values()), machine.slices)
    across = dict(zip(sizes, factors, strict=True))
    far = tuple(axis for axis in axes if across[axis] > 1)
    near = tuple(axis for axis in axes if sizes[axis] > across[axis])
    if not far or not near or operation not in WITHIN_SLICES:
        return (row,)
    ways = math.prod(sizes[axis] // across[axis] for axis in near)
    less = f"{words} / {ways} of a slice"
    between = what, operation, far, size // ways, times, phase, pieces, less, kind
    before, after = WITHIN_SLICES[operation]
    if operation == "reduce-scatter" and ways >= max(machine.devices_per_slice, SMALLEST):
        before = ("all-reduce",)
    return (
        *((what, each, near, size, times, phase, pieces, words, kind) for each in before),
        between,
        *((what, each, near, size, times, phase, pieces, words, kind) for each in after),
    )


def compiled_rows(job: Job, choice: Choice, machine: Machine) -> list[Row]:
    """traffic.rows_of, as the machine's compiler has them."""
    if choice.strategy == "auto":
        choice = with_strategy(job, choice, machine)
    rows = rows_of(job, choice)
    if job.model.tied_embeddings and machine.chip.platform != "cpu":
        rows = [row for row in rows if row[0] != HEAD or _apart(choice, machine)]
    return list(_on_tpu(rows, job, choice, machine)) if machine.is_tpu else rows


def _apart(choice: Choice, machine: Machine) -> bool:
    """Whether sums over dp have a stage within slices and one between them."""
    return 1 < math.gcd(choice.dp, machine.slices) < choice.dp


def _on_tpu(rows: list[Row], job: Job, choice: Choice, machine: Machine) -> Iterator[Row]:
    model = job.model
    narrow = model.embed // (choice.fsdp * choice.sp) % LANES != 0
    ragged = vocab(job, choice) // choice.tp % LANES != 0
    exact = model.embed // choice.fsdp == LANES  # what a scatter over fsdp leaves
    whole = {
        EMBEDDING: narrow or exact,
        HEAD: narrow or exact or not ragged,
    }
    back = {  # of a gradient, what is scattered along the last dim
        "attention": model.heads / (2 * (model.heads + model.kv_heads)),
        "mlp": 1 / 3,
    }
    factors = axes_across_slices(list(choice.sizes.values()), machine.slices)
    spans = {axis: n > 1 for axis, n in zip(choice.sizes, factors, strict=True)}
    for row in rows:
        what, operation, axes, size, times, phase, pieces, words, kind = row
        if what in ("the embedding", "the output head"):
            times = choice.accumulation
        elif what in ("gradients of norms", "gradients of biases"):
            times = 1
        elif what == KEY_GRADIENTS and operation == "collective-permute":
            first = model.layers * choice.accumulation
            small = size * item_bytes(job.dtype) // 4
            said = f"{words}, in {job.dtype}"
            yield what, operation, axes, small, first, phase, pieces, said, kind
            times -= first
        row = what, operation, axes, size, times, phase, pieces, words, kind
        is_weight = set(axes) <= set(TOGETHER) and _is_weight(what)
        for part in _one_by_one(row, choice) if is_weight else (row,):
            if is_weight and operation == "reduce-scatter":
                ways = choice.fsdp if part[2] == ("fsdp",) else choice.sp
                by = "all-reduce" if whole.get(what) else scattered_by(ways, machine)
                if spans[part[2][0]]:  # in_stages says how it is summed within a slice
                    by = operation
                share = next((back[name] for name in back if name in what), 0.0)
                if exact and by == "reduce-scatter" and part[2] == ("fsdp",) and share:
                    cut = int(share * part[3])
                    yield what, "all-reduce", part[2], cut, part[4], phase, 1, words, kind
                    part = (what, by, part[2], part[3] - cut, *part[4:])
                part = (what, by, *part[2:])
            yield part


def _is_weight(what: str) -> bool:
    return "weights" in what or what in (EMBEDDING, HEAD, "the embedding", "the output head")


def _one_by_one(row: Row, choice: Choice) -> tuple[Row, ...]:
    """Over sp a device's part of fsdp, then over fsdp the whole."""
    what, operation, axes, size, times, phase, pieces, words, kind = row
    if axes != TOGETHER:
        return (row,)
    part, less = size // choice.fsdp, f"{words} / fsdp {choice.fsdp}"
    return (
        (what, operation, ("sp",), part, times, phase, pieces, less, kind),
        (what, operation, ("fsdp",), size, times, phase, pieces, words, kind),
    )
