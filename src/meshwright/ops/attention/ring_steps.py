"""Ring steps: what a device computes with the keys of each other device.

Each of the n devices of the ring holds a part of every sequence. At ring step t, device i has the
keys of device i - t (mod n). In *contiguous* order, device i holds part i. In *zig-zag* order, a
sequence has 2n chunks and device i holds chunks i and 2n-1-i, which balances a causal mask: every
device has the same work at every ring step. Step 0 is causal attention within its own two chunks.
After that, all queries attend to the first chunk of an earlier device's keys; or the queries of the
second chunk attend to both chunks of a later device's keys. Either is full attention over two pairs
of chunks. So only step 0 needs a mask, and no step computes scores that are masked out.

Block-causal masks whose blocks cross the boundaries of parts keep contiguous order. A block may
then reach into the parts of later devices. Blocks of complete parts need no mask: a part attends to
another entirely or not at all. Any other block size needs a different mask on every device, which
is computed from the positions at run time (Block.k_end).
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.ops.attention import kernels
from meshwright.ops.attention.block import Block, Gradients, Method, Partial, merge, where
from meshwright.ops.attention.mask import EVERYTHING, Mask
from meshwright.ops.collectives import current_platform

MOST_UNROLLED = 2**29  # bytes of output of all ring steps, which an unrolled ring keeps


class Keys(NamedTuple):
    """What the ring sends: keys and values in one array, and their segment ids."""

    both: jax.Array  # [2, batch, length, kv_heads, head_dim]
    segments: jax.Array | None  # [batch, length]


@dataclasses.dataclass(frozen=True)
class RingSteps:
    """The ring steps of a mask: step 0, then steps of full attention, then steps with a mask."""

    first: Mask  # of step 0
    full: int  # number of steps after step 0 with full attention (see order)
    masked: tuple[Mask, ...]  # masks of the steps after those
    order: str
    earlier_only: bool  # no query attends to keys of later devices
    parts_in_block: int | None = None  # parts in a block, if it is a multiple of a part
    block: int | None = None  # block size in tokens, if blocks cross parts

    @property
    def exchanges(self) -> int:
        """Number of times keys are sent on: once after every step but the last."""
        return self.full + len(self.masked)


def ring_steps_of(mask: Mask, order: str, ways: int, length: int) -> RingSteps:
    """The ring steps for sequences split over `ways` devices, `length` tokens on each."""
    others = ways - 1
    if not mask.causal:
        return RingSteps(EVERYTHING, others, (), "contiguous", earlier_only=False)
    if mask.block is not None and length % mask.block:
        steps = RingSteps(EVERYTHING, others, (), "contiguous", earlier_only=False)
        if mask.block % length:
            return dataclasses.replace(steps, block=mask.block)
        return dataclasses.replace(steps, parts_in_block=mask.block // length)
    if order == "zigzag":
        return RingSteps(mask, others, (), order, earlier_only=False)
    if mask.window is None:
        return RingSteps(mask, others, (), order, earlier_only=True)
    # a window: how many devices back it reaches, and how many of those it covers completely
    reach = min(others, (mask.window + length - 2) // length)
    full = min(reach, mask.window // length - 1) if mask.window >= length else 0
    rest = range(full + 1, reach + 1)
    masks = tuple(dataclasses.replace(mask, offset=index * length) for index in rest)
    return RingSteps(mask, full, masks, order, earlier_only=True)


class RingStep(NamedTuple):
    """A ring step on one device."""

    device: jax.Array  # its index along the ring
    index: Any  # of the step
    ways: int

    @property
    def before(self) -> jax.Array:
        """Whether the keys are those of an earlier device, or its own."""
        return self.device >= self.index

    @property
    def owner(self) -> jax.Array:
        """The device that owns the current keys."""
        return (self.device - self.index) % self.ways


def keys_seen(steps: RingSteps, step: RingStep) -> jax.Array | None:
    """Whether any query attends to the keys of this step; None if that is always so."""
    if steps.parts_in_block is not None:
        return step.device // steps.parts_in_block >= step.owner // steps.parts_in_block
    return step.before if steps.earlier_only else None


def key_ends(steps: RingSteps, step: RingStep, part: int) -> jax.Array | None:
    """For each query, the end of the keys it attends to; None where a static mask covers it."""
    if steps.block is None:
        return None
    positions = step.device * part + jnp.arange(part)
    return (positions // steps.block + 1) * steps.block - step.owner * part


def unrolled(steps: int, q: jax.Array) -> bool:
    """Whether to unroll the loop over ring steps.

    A GPU copies the loop carry at every step, which matters for short steps. Unrolled, the outputs
    of all steps are kept until they are merged at the end.
    """
    small = steps * q.size * q.dtype.itemsize <= MOST_UNROLLED
    return small and current_platform() == "gpu"


def add_ring_step(
    done: Partial | None, local: Block, keys: Keys, steps: RingSteps, step: RingStep,
    mask: Mask | None, method: Method, in_flight: Any = (),
) -> tuple[Partial, Any]:  # fmt: skip
    """Merge the output of this ring step into the output so far; also returns `in_flight`.

    `mask` is None in the steps of full attention. `in_flight` is what the devices send meanwhile.
    """
    if mask is None and steps.order == "zigzag":
        assert done is not None

        # keep the sums so far out of the conditional, which would copy them; split the queries
        # once, not in every step
        _, second = _chunks(local)

        def earlier() -> Partial:
            return kernels.forward(_earlier(local, keys), EVERYTHING, method)[0]

        def later() -> Partial:
            partial = kernels.forward(_with(second, keys), EVERYTHING, method)[0]
            return Partial(_behind(partial.out, 0), _behind(partial.lse, -jnp.inf))

        partial = lax.cond(step.before, earlier, later)
        partial, in_flight = lax.optimization_barrier((partial, in_flight))
        return merge(done, partial), in_flight
    block = _with(local, keys, key_ends(steps, step, local.q.shape[1]))
    partial, in_flight = kernels.forward(block, mask or EVERYTHING, method, in_flight)
    if done is None:
        return Partial(partial.out.astype(jnp.float32), partial.lse), in_flight
    seen = keys_seen(steps, step)
    if seen is not None:
        partial = partial._replace(lse=jnp.where(seen, partial.lse, -jnp.inf))
    return merge(done, partial), in_flight


def gradients_of_ring_step(
    output: Partial, dout: jax.Array, local: Block, keys: Keys, steps: RingSteps, step: RingStep,
    mask: Mask | None, method: Method, in_flight: Any = (),
) -> tuple[jax.Array, jax.Array, Any]:  # fmt: skip
    """dq and stacked (dk, dv) of this ring step, in float32; also returns `in_flight`."""
    if mask is None and steps.order == "zigzag":
        _, (second, output2, dout2) = _chunks((local, output, dout))

        def earlier() -> Gradients:
            gradients = kernels.backward(_earlier(local, keys), EVERYTHING, output, dout, method)[0]
            return Gradients(gradients.q, _ahead(gradients.k), _ahead(gradients.v))

        def later() -> Gradients:
            gradients = kernels.backward(_with(second, keys), EVERYTHING, output2, dout2, method)[0]
            return gradients._replace(q=_behind(gradients.q, 0))

        gradients = lax.cond(step.before, earlier, later)
        gradients, in_flight = lax.optimization_barrier((gradients, in_flight))
    else:
        block = _with(local, keys, key_ends(steps, step, local.q.shape[1]))
        gradients, in_flight = kernels.backward(
            block, mask or EVERYTHING, output, dout, method, in_flight
        )
        seen = keys_seen(steps, step)
        if seen is not None and mask is not steps.first:
            zeros = jax.tree.map(lambda x: jnp.zeros((), x.dtype), gradients)
            gradients = where(seen, gradients, zeros)
    dkeys = jnp.stack([gradients.k, gradients.v]).astype(jnp.float32)
    return gradients.q.astype(jnp.float32), dkeys, in_flight


def _with(local: Block, keys: Keys, k_end: jax.Array | None = None) -> Block:
    return local._replace(k=keys.both[0], v=keys.both[1], k_segments=keys.segments, k_end=k_end)


def _earlier(local: Block, keys: Keys) -> Block:
    """An earlier device's keys: all queries attend to their first chunk."""
    first, _ = _chunks(_with(local, keys))
    return local._replace(k=first.k, v=first.v, k_segments=first.k_segments)


def _behind(second: jax.Array, nothing: float) -> jax.Array:
    """Results of the second chunk, with `nothing` for the first."""
    return jnp.concatenate([jnp.full_like(second, nothing), second], axis=1)


def _ahead(first: jax.Array) -> jax.Array:
    """Results of the first chunk, with zeros for the second."""
    return jnp.concatenate([first, jnp.zeros_like(first)], axis=1)


def _chunks(tree: Any) -> tuple[Any, Any]:
    """Both chunks of the length, dim 1."""
    half = jax.tree.leaves(tree)[0].shape[1] // 2
    return (
        jax.tree.map(lambda x: x[:, :half], tree),
        jax.tree.map(lambda x: x[:, half:], tree),
    )
