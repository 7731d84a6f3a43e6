"""What a compiler makes of the collectives it is given, as rules over typed transfers.

>>> from meshwright.machines import Machine
>>> scattered_by(64, Machine.parse("v5p:4x4x4")), scattered_by(32, Machine.parse("v5p:4x4x4"))
('all-reduce', 'reduce-scatter')

The compilers of TPUs and GPUs all-gather embedding and LM head anew for every micro-batch, and sum
norms once for all of them. The GPU compiler (jax 0.10.2) also sums the embedding's gradient over dp
once: its all-reduce leaves the loop over micro-batches.

The TPU compiler (libtpu 0.0.42, seen on v4, v5e, v5p and v6e, slices of 16 to 512 chips):
- emits an all-reduce, and slices afterwards, instead of a reduce-scatter over all devices of a
  slice: twice the bytes on the wire. Over a part of a slice it scatters, and over a flat slice
  that is not square (seen on v5e:4x8);
- emits an all-reduce of shards in zeros instead of an all-gather of at most 16 MiB over all devices
  of a flat slice of 8x8 or 8x16, of one slice and of several; smaller slices and 16x16, whose links
  close into rings, all-gather. Not counted of an axis that continues in other slices;
- emits an all-reduce, on v6e alone, for a table's gradient whose tokens do not divide into blocks
  of the size that it sends: a vocabulary of 151,936 = 128 · 1,187 with an embed below 2,560 over
  fsdp=2 (see `table_divides`);
- does the same with the embedding's gradient where an encoder and a decoder look it up, unless it
  is scattered along a dim of its own. What it would all-reduce because of its shape always is
  (ops.stacks);
- adds the two gradients of a tied embedding before they are sent, not after (as the GPU compiler
  does), except where dp continues in other slices;
- between slices sends only a device's part: an all-reduce is a reduce-scatter within slices, an
  all-reduce between them and an all-gather. Over all devices of one of several slices it does
  scatter, unless the axis continues in the others (seen on v5e);
- lets the gradients of keys make their first ring step before they become float32.
Not counted: where memory is nearly exhausted it may all-gather weights once more instead of keeping
them. It pads some reduce-scatters by up to an eighth, and sends their edges by permutes. It emits
all-reduces for gradients of queries, keys and values of 64 numbers a head in odd multiples of 128
of embed. Weights that fsdp, sp and ep
split together are all-gathered one axis after the other there (ops.all_gather).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Set
from typing import NamedTuple

from meshwright.arithmetic import divisors
from meshwright.audits import Collective, Payload
from meshwright.machines import Machine
from meshwright.meshes import axes_across_slices
from meshwright.ops import stacks
from meshwright.planner.device import ITEM_BYTES
from meshwright.planner.links import WITHIN_SLICES
from meshwright.planner.step import StepModel
from meshwright.planner.workload import Choice

SMALLEST = 16  # devices; of smaller slices only 2x2x2 was seen not to scatter
SMALLEST_PADDED = 64  # devices; smaller slices all-gather arrays of every size
LARGEST_PADDED = 16 * 2**20  # bytes; larger arrays are all-gathered on every slice


def scattered_by(ways: int, machine: Machine) -> str:
    """The operation by which the machine's compiler scatters sums over so many devices."""
    if not machine.is_tpu or machine.slices > 1 or ways < machine.num_devices:
        return "reduce-scatter"
    if len(set(machine.shape)) > 1 and len(machine.shape) == 2:
        return "reduce-scatter"
    return "all-reduce" if machine.shape == (2, 2, 2) or ways >= SMALLEST else "reduce-scatter"


def pads_shards(ways: int, machine: Machine) -> bool:
    """Whether small arrays over so many devices are all-reduced in zeros, not all-gathered."""
    if not machine.is_tpu or ways < max(machine.devices_per_slice, SMALLEST_PADDED):
        return False
    return len(machine.shape) == 2 and not all(machine.wraps[:2])


def table_divides(vocab: int, width: int, ways: int) -> bool:
    """Whether `vocab` tokens of `width` bytes are blocks of 8n tokens that v6e's compiler scatters.

    From 39 reduce-scatters compiled alone, of which two over 8 devices disagree. Over 2, 4 and 8
    devices blocks of 0.63, 1 and 1.5 MiB were scattered; of 0.59, 0.94 and 1.25 not, nor were 4.9
    MiB. Over more none was compiled, nor one of a vocabulary that 8 does not divide: taken as
    scattered.

    >>> [table_divides(151_936, 2 * embed, ways=2) for embed in (2048, 2560)]
    [False, True]
    """
    if ways > 8 or vocab % 8:
        return True
    least = {2: 5, 4: 8}.get(ways, 12) * 2**17
    return any(least <= 8 * each * width < 4.75 * 2**20 for each in divisors(vocab // 8))


def all_reduces(choice: Choice, machine: Machine) -> bool:
    """Whether gradients over fsdp alone are all-reduced within a slice, and sliced afterwards."""
    ways, across = choice.size("fsdp"), _across(choice, machine)["fsdp"]
    if ways < choice.shards:
        return False
    if across == 1:
        return scattered_by(ways, machine) == "all-reduce"
    return ways // across >= max(machine.devices_per_slice, SMALLEST)


def rewritten(step: StepModel, written: list[Collective]) -> list[Collective]:
    """The collectives of XLA's train step, as the machine's compiler has them."""
    choice, machine = step.choice, step.machine
    if step.sizes.is_tied and machine.chip.platform != "cpu":
        apart = 1 < math.gcd(choice.size("dp"), machine.slices) < choice.size("dp")
        written = [one for one in written if one.payload != "LM head gradient" or apart]
    if rules := _RULES.get(machine.chip.platform):
        program = _program(step)
        written = [
            changed
            for one in written
            for changed in (_rewritten(one, program, rules) if one.payload in rules else (one,))
        ]
    return written


def staged(step: StepModel) -> list[Collective]:
    """The collectives of a step; those over several slices as what is sent within and between."""
    return [stage for one in step.collectives for stage in in_stages(one, step)]


def in_stages(send: Collective, step: StepModel) -> tuple[Collective, ...]:
    """A send over axes that continue in other slices: what is sent within and between slices."""
    machine, sizes = step.machine, step.choice.sizes
    across = _across(step.choice, machine)
    far = tuple(axis for axis in send.axes if across[axis] > 1)
    near = tuple(axis for axis in send.axes if sizes[axis] > across[axis])
    if not far or not near or send.operation not in WITHIN_SLICES:
        return (send,)
    ways = math.prod(sizes[axis] // across[axis] for axis in near)
    before, after = WITHIN_SLICES[send.operation]
    if send.operation == "reduce-scatter" and ways >= max(machine.devices_per_slice, SMALLEST):
        before = ("all-reduce",)
    return (
        *(send.changed(operation=each, axes=near) for each in before),
        send.changed(axes=far, bytes=send.bytes // ways),
        *(send.changed(operation=each, axes=near) for each in after),
    )


def _across(choice: Choice, machine: Machine) -> Mapping[str, int]:
    """How many slices each axis spans."""
    sizes = choice.sizes
    factors = axes_across_slices(list(sizes.values()), machine.slices)
    return dict(zip(sizes, factors, strict=True))


class _Program(NamedTuple):
    """What the rules of a compiler depend on."""

    choice: Choice
    dtype: str
    scattered: Mapping[str, str]  # axis → the operation that scatters sums over it
    summed: Set[tuple[Payload, str]]  # gradients that are all-reduced over any devices of an axis
    across: Mapping[str, int]
    padded: frozenset[str]  # axes over which small all-gathers are all-reduces


def _program(step: StepModel) -> _Program:
    workload, choice, machine = step.workload, step.choice, step.machine
    shard = workload.sizes.embed // choice.shards
    summed: set[tuple[Payload, str]] = set()
    if len(workload.sizes.sequences) > 1 and not stacks(shard, is_last=True, table=True):
        summed = {("embedding gradient", axis) for axis in ("fsdp", "sp", "ep")}
    elif machine.chip.kind == "v6e":
        width = ITEM_BYTES[workload.dtype] * workload.sizes.embed
        if not table_divides(step.device.padded_vocab // choice.tensor, width, choice.size("fsdp")):
            summed = {("embedding gradient", "fsdp")}
    scattered = {axis: scattered_by(choice.size(axis), machine) for axis in ("fsdp", "sp", "ep")}
    across = _across(choice, machine)
    padded = frozenset(
        axis
        for axis, slices in across.items()
        if slices == 1 and pads_shards(choice.size(axis), machine)
    )
    return _Program(choice, workload.dtype, scattered, summed, across, padded)


Rule = Callable[[Collective, _Program], Iterator[Collective]]


def _micro_batches(send: Collective, program: _Program) -> Iterator[Collective]:
    """Embedding and LM head are all-gathered for each micro-batch; norms are summed once."""
    times = program.choice.accumulation if send.payload == "table" else 1
    yield send if send.times == times else send.changed(times=times)


def _first_ring_step(send: Collective, program: _Program) -> Iterator[Collective]:
    """The gradients of keys make their first ring step in the dtype of the matmuls."""
    if send.operation == "collective-permute":
        first = send.layers * program.choice.accumulation
        ratio = 4 // ITEM_BYTES[program.dtype]
        yield send.changed(bytes=send.bytes // ratio, times=first)
        send = send.changed(times=send.times - first)
    yield send


def _axis_by_axis(send: Collective, program: _Program) -> Iterator[Collective]:
    """Weights over sp in a device's part of fsdp, then over fsdp in full; before both over ep."""
    if len(send.axes) == 1 or not set(send.axes) <= {"fsdp", "sp", "ep"}:
        yield send
        return
    axes = sorted(send.axes, key=("fsdp", "sp", "ep").index)  # as the rules of weights have them
    for i, axis in reversed(list(enumerate(axes))):
        before = program.choice.size(*axes[:i])
        if before == 1:
            yield send.changed(axes=(axis,))
        else:
            pieces = tuple(size // before for size in send.piece_bytes)
            yield send.changed(axes=(axis,), bytes=send.bytes // before, piece_bytes=pieces)


def _all_reduce_shards(send: Collective, program: _Program) -> Iterator[Collective]:
    """An all-reduce in place of all-gathers of small arrays: each shard is put into zeros."""
    if send.operation != "all-gather" or not program.padded.issuperset(send.axes):
        yield send
        return
    pieces = send.piece_bytes or (send.bytes // send.pieces,) * send.pieces
    small = tuple(size for size in pieces if size <= LARGEST_PADDED)
    large = tuple(size for size in pieces if size > LARGEST_PADDED)
    if not small:
        yield send
        return
    if large:
        yield send.changed(bytes=sum(large), pieces=len(large), piece_bytes=large)
    origin = str(send.changed(phase=None))
    send = send.changed(bytes=sum(small), pieces=len(small), piece_bytes=small)
    yield send.changed(operation="all-reduce", rewrite_of=origin)


def _all_reduce_gradients(send: Collective, program: _Program) -> Iterator[Collective]:
    """An all-reduce in place of some reduce-scatters of gradients."""
    axes = send.axes
    if send.operation != "reduce-scatter":
        yield send
        return
    # over several slices in_stages says how it is summed within one
    if program.across[axes[0]] == 1 and (
        (send.payload, axes[0]) in program.summed or program.scattered[axes[0]] == "all-reduce"
    ):
        send = send.changed(operation="all-reduce", rewrite_of=str(send.changed(phase=None)))
    yield send


def _once_over_dp(send: Collective, program: _Program) -> Iterator[Collective]:
    """A gradient that is all-reduced over dp after the loop over micro-batches."""
    is_sum = send.operation == "all-reduce" and send.times == program.choice.accumulation
    yield send.changed(times=1) if is_sum else send


_WEIGHTS = (_axis_by_axis, _all_reduce_shards)
_GRADIENTS = (_axis_by_axis, _all_reduce_gradients)
_GPU_RULES: Mapping[Payload, tuple[Rule, ...]] = {
    "table": (_micro_batches,),
    "vector gradients": (_micro_batches,),
    "q/k norm gradients": (_micro_batches,),
    "embedding gradient": (_once_over_dp,),
    "key gradients": (_first_ring_step,),
}
_TPU_RULES: Mapping[Payload, tuple[Rule, ...]] = {
    "layer weights": _WEIGHTS,
    "table": (_micro_batches, *_WEIGHTS),
    "layer gradients": _GRADIENTS,
    "embedding gradient": _GRADIENTS,
    "LM head gradient": _GRADIENTS,
    "vector gradients": (_micro_batches,),
    "key gradients": (_first_ring_step,),
}


_RULES = {"gpu": _GPU_RULES, "tpu": _TPU_RULES}  # by platform


def _rewritten(
    send: Collective, program: _Program, rules: Mapping[Payload, tuple[Rule, ...]]
) -> list[Collective]:
    """What the rules for its kind make of a send, one after the other."""
    found = [send]
    for rule in rules.get(send.payload, ()):
        found = [changed for one in found for changed in rule(one, program)]
    return found
