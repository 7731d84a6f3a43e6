"""Attention over rows that are split over devices: keys travel around a ring, or are gathered.

Ring: keys and values hop to the next device while the present ones are computed with, so that
nothing with a whole row exists anywhere. Backward it is the same ring again; the gradients of keys
and values travel with them, one turn behind, and a last hop takes them home. All-gather: keys and
values are gathered once and the turns read their parts; their gradients are added up and scattered
once.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.ops.attention.block import Block, Gradients, Partial, with_gradient
from meshwright.ops.attention.mask import Mask
from meshwright.ops.attention.permute import permute
from meshwright.ops.attention.ring_steps import (
    Keys,
    RingSteps,
    Step,
    add_ring_step,
    gradients_of_ring_step,
    ring_steps_of,
    unrolled,
)
from meshwright.ops.collectives import varying_like


class Transport(NamedTuple):
    """How keys come to where they are needed, and how their gradients go home."""

    start: Any  # what a device holds at turn 0
    onward: Callable[[Any], Any]  # what it holds at the next turn
    keys: Callable[[Any, Any], Keys]  # the keys of a turn, from what it holds
    along: Callable[[Any], Any]  # the sums of gradients so far, where the next turn needs them
    collect: Callable[[Any, Any, jax.Array], Any]  # those, turn, this turn's gradient
    home: Callable[[Any], jax.Array]  # the sums, where their keys live


def attend(
    here: Block,
    mask: Mask,
    over: tuple[str, ...],
    ways: int,
    strategy: str,
    order: str,
    kernel: str,
) -> jax.Array:
    """Inside shard_map: attention of this device's part of the rows, split over `over`."""
    turns = ring_steps_of(mask, order, ways, here.q.shape[1])

    def transport(block: Block) -> Transport:
        keys = Keys(jnp.stack([block.k, block.v]), block.k_segments)
        if strategy == "ring":
            return _ring(keys, over, ways, turns.hops)
        return _gathered(keys, over, ways)

    def step(turn: Any) -> Step:
        return Step(lax.axis_index(over), turn, ways)

    return with_gradient(
        lambda block: _forward(block, turns, transport(block), step, kernel),
        lambda block, whole, given: _backward(
            block, turns, transport(block), step, whole, given, kernel
        ),
    )(here)


def _ring(keys: Keys, axes: tuple[str, ...], ways: int, hops: int) -> Transport:
    """Keys hop from each device to the next, and so do their gradients."""

    def hop(tree: Any, by: int = 1) -> Any:
        places = [(i, (i + by) % ways) for i in range(ways)]
        return jax.tree.map(lambda x: permute(x, axes, places), tree)

    def collect(sums: jax.Array | None, turn: Any, more: jax.Array) -> jax.Array:
        return more if sums is None else sums + more

    return Transport(
        start=keys,
        onward=hop,
        keys=lambda held, turn: held,
        along=hop,
        collect=collect,
        home=lambda sums: hop(sums, ways - hops) if hops else sums,
    )


def _gathered(keys: Keys, axes: tuple[str, ...], ways: int) -> Transport:
    """All keys at once; a turn reads those of its device."""
    everyone = jax.tree.map(lambda x: lax.all_gather(x, axes, axis=0), keys)

    def owner(turn: Any) -> jax.Array:
        return (lax.axis_index(axes) - turn) % ways

    def at(_: Any, turn: Any) -> Keys:
        return jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, owner(turn), keepdims=False), everyone
        )

    def collect(sums: jax.Array | None, turn: Any, more: jax.Array) -> jax.Array:
        if sums is None:
            sums = varying_like(jnp.zeros((ways, *more.shape), more.dtype), more)
        return lax.dynamic_update_index_in_dim(sums, more, owner(turn), 0)

    return Transport(
        start=(),
        onward=lambda held: held,
        keys=at,
        along=lambda sums: sums,
        collect=collect,
        home=lambda sums: lax.psum_scatter(sums, axes, scatter_dimension=0),
    )


def _forward(
    here: Block, turns: RingSteps, transport: Transport, step: Callable[[Any], Step], kernel: str
) -> Partial:
    """The output of this device's queries over all keys they see."""

    def visit(done: Partial | None, held: Any, coming: Any, turn: Any, mask: Mask | None) -> Any:
        keys = transport.keys(held, turn)
        return add_ring_step(done, here, keys, turns, step(turn), mask, kernel, under_way=coming)

    whole: Partial = _around(turns, transport, visit, here.q)
    return whole._replace(out=whole.out.astype(here.q.dtype))


def _backward(
    here: Block,
    turns: RingSteps,
    transport: Transport,
    step: Callable[[Any], Step],
    whole: Partial,
    given: jax.Array,
    kernel: str,
) -> Gradients:
    """Gradients of this device's queries, and of its keys from all queries that see them."""

    def visit(sums: Any, held: Any, coming: Any, turn: Any, mask: Mask | None) -> Any:
        keys = transport.keys(held, turn)
        done, arriving = (None, None) if sums is None else (sums[0], transport.along(sums[1]))
        of_q, of_keys, (coming, arriving) = gradients_of_ring_step(
            whole, given, here, keys, turns, step(turn), mask, kernel, under_way=(coming, arriving)
        )
        of_q = of_q if done is None else done + of_q
        return (of_q, transport.collect(arriving, turn, of_keys)), coming

    of_q, of_keys = _around(turns, transport, visit, here.q)
    of_k, of_v = transport.home(of_keys)
    return Gradients(
        of_q.astype(here.q.dtype), of_k.astype(here.k.dtype), of_v.astype(here.v.dtype)
    )


def _around(turns: RingSteps, transport: Transport, visit: Any, q: jax.Array) -> Any:
    """Every turn's visit, one after the other; keys move on meanwhile, but not after the last."""

    def turn_of(carry: Any, turn: Any, mask: Mask | None, moves: bool) -> Any:
        state, held = carry
        coming = transport.onward(held) if moves else ()
        return visit(state, held, coming, turn, mask)

    last = turns.hops
    carry = turn_of((None, transport.start), 0, turns.first, moves=last > 0)
    looped = turns.alike if turns.last else turns.alike - 1  # all that move keys on
    if looped > 0:
        carry, _ = lax.scan(
            lambda carry, turn: (turn_of(carry, turn, None, moves=True), None),
            carry,
            jnp.arange(1, looped + 1),
            unroll=unrolled(looped, q),
        )
    if turns.alike and not turns.last:
        carry = turn_of(carry, turns.alike, None, moves=False)
    for turn, mask in enumerate(turns.last, turns.alike + 1):
        carry = turn_of(carry, turn, mask, moves=turn < last)
    return carry[0]
