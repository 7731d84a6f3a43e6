"""Context parallelism: attention over sequences that devices share, by a ring or an all-gather.

Ring: a ppermute sends keys and values to the next device while attention to the current ones is
computed, so no device ever holds a full sequence. The backward pass is the same ring again. The
gradients of keys and values follow them one ring step behind, and a last ppermute returns them.
All-gather: keys and values are all-gathered once, and every ring step reads its part. A
reduce-scatter returns their gradients.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.ops.attention.block import Block, Gradients, Method, Partial, with_gradient
from meshwright.ops.attention.mask import Mask
from meshwright.ops.attention.permute import permute
from meshwright.ops.attention.ring_steps import (
    Keys,
    RingStep,
    RingSteps,
    add_ring_step,
    gradients_of_ring_step,
    ring_steps_of,
    unrolled,
)
from meshwright.ops.collectives import varying_like


class Transport(NamedTuple):
    """How keys reach the devices that need them, and how their gradients return."""

    start: Any  # what a device holds at ring step 0
    onward: Callable[[Any], Any]  # what it holds at the next ring step
    keys: Callable[[Any, Any], Keys]  # (held, index) → the keys of a ring step
    along: Callable[[Any], Any]  # sums of gradients so far, sent to the device of the next step
    collect: Callable[[Any, Any, jax.Array], Any]  # (sums, index, gradient of the step) → sums
    returned: Callable[[Any], jax.Array]  # the sums, on the devices that own the keys


def attend(
    local: Block,
    mask: Mask,
    over: tuple[str, ...],
    ways: int,
    strategy: str,
    order: str,
    method: Method,
) -> jax.Array:
    """Inside shard_map: attention of this device's part of the sequences, split over `over`."""
    steps = ring_steps_of(mask, order, ways, local.q.shape[1])

    def transport(block: Block) -> Transport:
        keys = Keys(jnp.stack([block.k, block.v]), block.k_segments)
        if strategy == "ring":
            return _ring(keys, over, ways, steps.exchanges)
        return _all_gather(keys, over, ways)

    def at(index: Any) -> RingStep:
        return RingStep(lax.axis_index(over), index, ways)

    return with_gradient(
        lambda block: _forward(block, steps, transport(block), at, method),
        lambda block, output, dout: _backward(
            block, steps, transport(block), at, output, dout, method
        ),
    )(local)


def _ring(keys: Keys, axes: tuple[str, ...], ways: int, exchanges: int) -> Transport:
    """Each device sends its keys to the next one, and so their gradients."""

    def send(tree: Any, by: int = 1) -> Any:
        pairs = [(i, (i + by) % ways) for i in range(ways)]
        return jax.tree.map(lambda x: permute(x, axes, pairs), tree)

    def collect(sums: jax.Array | None, index: Any, more: jax.Array) -> jax.Array:
        return more if sums is None else sums + more

    return Transport(
        start=keys,
        onward=send,
        keys=lambda held, index: held,
        along=send,
        collect=collect,
        returned=lambda sums: send(sums, ways - exchanges) if exchanges else sums,
    )


def _all_gather(keys: Keys, axes: tuple[str, ...], ways: int) -> Transport:
    """All keys at once; a ring step reads those of one device."""
    all_keys = jax.tree.map(lambda x: lax.all_gather(x, axes, axis=0), keys)

    def owner(index: Any) -> jax.Array:
        return (lax.axis_index(axes) - index) % ways

    def at(_: Any, index: Any) -> Keys:
        return jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, owner(index), keepdims=False), all_keys
        )

    def collect(sums: jax.Array | None, index: Any, more: jax.Array) -> jax.Array:
        if sums is None:
            sums = varying_like(jnp.zeros((ways, *more.shape), more.dtype), more)
        return lax.dynamic_update_index_in_dim(sums, more, owner(index), 0)

    return Transport(
        start=(),
        onward=lambda held: held,
        keys=at,
        along=lambda sums: sums,
        collect=collect,
        returned=lambda sums: lax.psum_scatter(sums, axes, scatter_dimension=0),
    )


def _forward(
    local: Block,
    steps: RingSteps,
    transport: Transport,
    at: Callable[[Any], RingStep],
    method: Method,
) -> Partial:
    """The output of this device's queries over all keys they attend to."""

    def visit(done: Partial | None, held: Any, coming: Any, index: Any, mask: Mask | None) -> Any:
        keys = transport.keys(held, index)
        return add_ring_step(done, local, keys, steps, at(index), mask, method, in_flight=coming)

    output: Partial = _all_steps(steps, transport, visit, local.q)
    return output._replace(out=output.out.astype(local.q.dtype))


def _backward(
    local: Block,
    steps: RingSteps,
    transport: Transport,
    at: Callable[[Any], RingStep],
    output: Partial,
    dout: jax.Array,
    method: Method,
) -> Gradients:
    """Gradients of this device's queries, and of its keys from all queries that attend to them."""

    def visit(sums: Any, held: Any, coming: Any, index: Any, mask: Mask | None) -> Any:
        keys = transport.keys(held, index)
        done, arriving = (None, None) if sums is None else (sums[0], transport.along(sums[1]))
        dq, dkeys, (coming, arriving) = gradients_of_ring_step(
            output, dout, local, keys, steps, at(index), mask, method, in_flight=(coming, arriving)
        )
        dq = dq if done is None else done + dq
        return (dq, transport.collect(arriving, index, dkeys)), coming

    dq, dkeys = _all_steps(steps, transport, visit, local.q)
    dk, dv = transport.returned(dkeys)
    return Gradients(dq.astype(local.q.dtype), dk.astype(local.k.dtype), dv.astype(local.v.dtype))


def _all_steps(steps: RingSteps, transport: Transport, visit: Any, q: jax.Array) -> Any:
    """Run `visit` for every ring step; each but the last also sends the keys on."""

    def one_step(carry: Any, index: Any, mask: Mask | None, sends: bool) -> Any:
        state, held = carry
        coming = transport.onward(held) if sends else ()
        return visit(state, held, coming, index, mask)

    last = steps.exchanges
    carry = one_step((None, transport.start), 0, steps.first, sends=last > 0)
    looped = steps.full if steps.masked else steps.full - 1  # those that send keys on
    if looped > 0:
        carry, _ = lax.scan(
            lambda carry, index: (one_step(carry, index, None, sends=True), None),
            carry,
            jnp.arange(1, looped + 1),
            unroll=unrolled(looped, q),
        )
    if steps.full and not steps.masked:
        carry = one_step(carry, steps.full, None, sends=False)
    for index, mask in enumerate(steps.masked, steps.full + 1):
        carry = one_step(carry, index, mask, sends=index < last)
    return carry[0]
