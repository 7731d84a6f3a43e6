"""What a device does with the keys of each other one, turn by turn.

n devices along the ring each hold a part of every row. At turn t device i has the keys of device
i - t (mod n). In *contiguous* order device i holds the i-th part. In *zig-zag* order a row is cut
into 2n chunks and device i holds chunks i and 2n-1-i: of a causal mask every device then has the
same work at every turn. At turn 0 its own two chunks, causal. After that, keys of an earlier device
are seen in their first chunk only, by all queries; keys of a later one are seen whole, by the
queries of the second chunk only: two chunks' worth of full attention either way. So no turn but the
first needs a mask, and none computes what is thrown away.

Block-causal masks whose blocks lie across the edges of parts keep contiguous order. A block may
then reach into the parts of later devices. Blocks of whole parts need no mask: a part sees another
entirely or not at all. Any other block gives every device a mask of its own, which is made from the
positions while the program runs (Block.k_end).
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.ops.attention import kernels
from meshwright.ops.attention.block import Block, Gradients, Partial, merge, where
from meshwright.ops.attention.mask import EVERYTHING, Mask
from meshwright.ops.collectives import current_platform

MOST_UNROLLED = 2**29  # bytes of output of all turns, which are then kept side by side


class Keys(NamedTuple):
    """What travels: keys and values in one array, and their documents."""

    both: jax.Array  # [2, batch, length, kv_heads, head_dim]
    segments: jax.Array | None  # [batch, length]


@dataclasses.dataclass(frozen=True)
class RingSteps:
    """The turns of a mask over n devices: one at home, some all alike, some with their own mask."""

    first: Mask
    alike: int  # turns 1 .. alike: full attention, by the order
    last: tuple[Mask, ...]  # turns after those
    order: str
    earlier_only: bool  # whether keys of later devices are not seen at all
    parts_in_block: int | None = None  # a block is so many whole parts, which see each other
    block: int | None = None  # tokens of a block that lies across the edges of parts

    @property
    def hops(self) -> int:
        """How often keys move on; after the last turn they need not."""
        return self.alike + len(self.last)


def ring_steps_of(mask: Mask, order: str, ways: int, length: int) -> RingSteps:
    """The turns for rows split `ways` ways, `length` tokens of each on a device."""
    others = ways - 1
    if not mask.causal:
        return RingSteps(EVERYTHING, others, (), "contiguous", earlier_only=False)
    if mask.block is not None and length % mask.block:
        turns = RingSteps(EVERYTHING, others, (), "contiguous", earlier_only=False)
        if mask.block % length:
            return dataclasses.replace(turns, block=mask.block)
        return dataclasses.replace(turns, parts_in_block=mask.block // length)
    if order == "zigzag":
        return RingSteps(mask, others, (), order, earlier_only=False)
    if mask.window is None:
        return RingSteps(mask, others, (), order, earlier_only=True)
    # a window: the last device whose keys the first query reaches, and those seen whole
    reach = min(others, (mask.window + length - 2) // length)
    whole = min(reach, mask.window // length - 1) if mask.window >= length else 0
    rest = range(whole + 1, reach + 1)
    masks = tuple(dataclasses.replace(mask, offset=turn * length) for turn in rest)
    return RingSteps(mask, whole, masks, order, earlier_only=True)


class Step(NamedTuple):
    """A turn on a device."""

    device: jax.Array  # its index along the ring
    turn: Any
    ways: int

    @property
    def before(self) -> jax.Array:
        """Whether the keys are those of an earlier device, or its own."""
        return self.device >= self.turn

    @property
    def owner(self) -> jax.Array:
        """The device whose keys are here."""
        return (self.device - self.turn) % self.ways


def keys_seen(turns: RingSteps, step: Step) -> jax.Array | None:
    """Whether the keys of this turn are seen at all; None if they always are."""
    if turns.parts_in_block is not None:
        return step.device // turns.parts_in_block >= step.owner // turns.parts_in_block
    return step.before if turns.earlier_only else None


def key_ends(turns: RingSteps, step: Step, part: int) -> jax.Array | None:
    """Where the keys end that each query sees, by its position; None where a mask says it."""
    if turns.block is None:
        return None
    positions = step.device * part + jnp.arange(part)
    return (positions // turns.block + 1) * turns.block - step.owner * part


def unrolled(turns: int, q: jax.Array) -> bool:
    """Whether turns are written out instead of looped over.

    A GPU copies what a loop carries at every turn, which short turns feel. Written out, the outputs
    of all turns are added up at the end in one go, and until then kept.
    """
    small = turns * q.size * q.dtype.itemsize <= MOST_UNROLLED
    return small and current_platform() == "gpu"


def add_ring_step(
    done: Partial | None, here: Block, keys: Keys, turns: RingSteps, step: Step,
    mask: Mask | None, kernel: str, under_way: Any = (),
) -> tuple[Partial, Any]:  # fmt: skip
    """The outputs so far and those of this turn, together; and what was under way meanwhile.

    `mask` is None in the turns that are alike.
    """
    if mask is None and turns.order == "zigzag":
        assert done is not None

        # the sums so far stay outside, a conditional would copy them in and out; and so does what
        # every turn takes of the queries, cut once
        _, second = _chunks(here)

        def earlier() -> Partial:
            return kernels.forward(_earlier(here, keys), EVERYTHING, kernel)[0]

        def later() -> Partial:
            found = kernels.forward(_with(second, keys), EVERYTHING, kernel)[0]
            return Partial(_behind(found.out, 0), _behind(found.log_sum, -jnp.inf))

        found = lax.cond(step.before, earlier, later)
        found, under_way = lax.optimization_barrier((found, under_way))
        return merge(done, found), under_way
    block = _with(here, keys, key_ends(turns, step, here.q.shape[1]))
    found, under_way = kernels.forward(block, mask or EVERYTHING, kernel, under_way)
    if done is None:
        return Partial(found.out.astype(jnp.float32), found.log_sum), under_way
    seen = keys_seen(turns, step)
    if seen is not None:
        found = found._replace(log_sum=jnp.where(seen, found.log_sum, -jnp.inf))
    return merge(done, found), under_way


def gradients_of_ring_step(
    whole: Partial, given: jax.Array, here: Block, keys: Keys, turns: RingSteps, step: Step,
    mask: Mask | None, kernel: str, under_way: Any = (),
) -> tuple[jax.Array, jax.Array, Any]:  # fmt: skip
    """This turn's part of the gradients, of the queries here and of keys and values, in float32;
    and what was under way meanwhile."""
    if mask is None and turns.order == "zigzag":
        _, (second, some, gradient) = _chunks((here, whole, given))

        def earlier() -> Gradients:
            found = kernels.backward(_earlier(here, keys), EVERYTHING, whole, given, kernel)[0]
            return Gradients(found.q, _ahead(found.k), _ahead(found.v))

        def later() -> Gradients:
            found = kernels.backward(_with(second, keys), EVERYTHING, some, gradient, kernel)[0]
            return found._replace(q=_behind(found.q, 0))

        found = lax.cond(step.before, earlier, later)
        found, under_way = lax.optimization_barrier((found, under_way))
    else:
        block = _with(here, keys, key_ends(turns, step, here.q.shape[1]))
        found, under_way = kernels.backward(
            block, mask or EVERYTHING, whole, given, kernel, under_way
        )
        seen = keys_seen(turns, step)
        if seen is not None and mask is not turns.first:
            found = where(seen, found, jax.tree.map(lambda x: jnp.zeros((), x.dtype), found))
    of_keys = jnp.stack([found.k, found.v]).astype(jnp.float32)
    return found.q.astype(jnp.float32), of_keys, under_way


def _with(here: Block, keys: Keys, k_end: jax.Array | None = None) -> Block:
    return here._replace(k=keys.both[0], v=keys.both[1], k_segments=keys.segments, k_end=k_end)


def _earlier(here: Block, keys: Keys) -> Block:
    """An earlier device's keys: all queries see the first chunk of them."""
    first, _ = _chunks(_with(here, keys))
    return here._replace(k=first.k, v=first.v, k_segments=first.k_segments)


def _behind(second: jax.Array, nothing: float) -> jax.Array:
    """What was found for the second chunk, with nothing for the first."""
    return jnp.concatenate([jnp.full_like(second, nothing), second], axis=1)


def _ahead(first: jax.Array) -> jax.Array:
    """What was found for the first chunk, with zeros for the second."""
    return jnp.concatenate([first, jnp.zeros_like(first)], axis=1)


def _chunks(tree: Any) -> tuple[Any, Any]:
    """Both chunks of the length, dim 1."""
    half = jax.tree.leaves(tree)[0].shape[1] // 2
    return (
        jax.tree.map(lambda x: x[:, :half], tree),
        jax.tree.map(lambda x: x[:, half:], tree),
    )
