"""Tokens through the experts that a router chose for them, on one device or over several.

Everything here runs inside shard_map, on the tokens of one device. Where a mesh axis splits the
experts and the tokens, tokens are exchanged over it, in one of two ways:

- `ring`: every device gets all tokens (all-gather), computes what its experts add to each, and the
  sums go back to where the tokens are (reduce-scatter): (ways - 1) rows per token and direction.
- `all-to-all`: a token goes to the devices of its experts, and what these make of it comes back:
  k · (ways - 1) / ways rows per token and direction. Less, where there are more devices than
  experts of a token.

Neither drops a token, however uneven the choice is. With a capacity, an expert takes only so many
tokens of a sequence, and an all-to-all has room for these.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.ops.collectives import current_platform, varying_like
from meshwright.ops.grouped import repeat_rows, sum_rows

EXCHANGES = ("ring", "all-to-all")


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of tokens, sorted by the expert that they go to; those of no expert here are last."""

    values: jax.Array  # [rows, embed]
    sizes: jax.Array  # [experts]: how many each has, with rows of zeros up to the alignment
    experts: jax.Array  # [rows]: which, from 0; the number of experts for those of none
    weights: jax.Array | None  # [rows], by which what an expert makes of a row is multiplied


@dataclasses.dataclass(frozen=True)
class Mlp:
    """What experts do with rows, and at multiples of how many rows those of an expert begin."""

    run: Callable[[Rows], jax.Array]
    """Rows to what their experts make of them, multiplied with their weights."""
    alignment: int = 1


def exchange_by_bytes(ways: int, per_token: int) -> str:
    """The exchange that sends less."""
    return "ring" if ways <= per_token else "all-to-all"


def rows_per_token(exchange: str, ways: int, per_token: int) -> float:
    """Rows of a token that leave its device on the way to the experts, if their load is even."""
    return ways - 1 if exchange == "ring" else per_token * (ways - 1) / ways


def expert_capacity(factor: float, length: int, per_token: int, experts: int) -> int:
    """Tokens of a sequence that an expert takes: `factor` times the average, as MaxText rounds."""
    return int(max(math.ceil(length * per_token / experts) * factor, factor, 1))


def over_capacity(chosen: jax.Array, capacity: int) -> jax.Array:
    """Of the experts that tokens chose [batch, length, k], which are full: the first tokens enter.

    A token chooses an expert at most once.
    """
    keys = chosen.reshape(chosen.shape[0], -1)
    order = jnp.argsort(keys, axis=1, stable=True)
    ordered = jnp.take_along_axis(keys, order, axis=1)
    places = lax.broadcasted_iota(jnp.int32, keys.shape, 1)
    places = varying_like(places, keys)
    begins = ordered != jnp.roll(ordered, 1, axis=1)  # the first of its expert
    first = lax.cummax(jnp.where(begins, places, 0), axis=1)
    full = places - first >= capacity
    return jnp.take_along_axis(full, jnp.argsort(order, axis=1), axis=1).reshape(chosen.shape)


def through_experts(
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    mlp: Mlp,
    experts: int,
    axes: tuple[str, ...],
    exchange: str | None,
    room: int | None = None,
) -> jax.Array:
    """What the chosen experts add to tokens x [tokens, embed].

    Arguments:
        chosen: [tokens, k], the experts of a token.
        weights: [tokens, k], what the results of these experts are multiplied with.
        experts: how many a device has.
        axes: the mesh axes over which the experts are split, if any.
        exchange: how tokens reach them; None where all devices of these axes have the same tokens:
            their results are still to be summed over the axes.
        room: where tokens may be dropped, how many rows a device sends to another at most. What is
            dropped has a number from that of all experts on, and the weight 0.
    """
    if not axes:
        return _through_own(x, chosen, weights, mlp, experts, some=room is not None)
    first = lax.axis_index(axes) * experts
    if exchange is None:
        return _through_own(x, chosen - first, weights, mlp, experts, some=True)
    if exchange == "ring":
        return _ring(x, chosen, weights, mlp, experts, axes)
    return _all_to_all(x, chosen, weights, mlp, experts, axes, room)


def _through_own(
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    mlp: Mlp,
    experts: int,
    some: bool = False,
) -> jax.Array:
    """Through the experts of this device, from 0; with `some`, tokens may have chosen others."""
    per_token = chosen.shape[1]
    if some:
        own = (chosen >= 0) & (chosen < experts)
        chosen, weights = jnp.where(own, chosen, experts), jnp.where(own, weights, 0)
    order, inverse, sizes = _sorted(chosen.reshape(-1), experts, mlp.alignment)
    rows = Rows(
        repeat_rows(x, order, inverse, per_token),
        sizes,
        _experts_of(order, chosen.reshape(-1), experts),
        repeat_rows(weights.reshape(-1, 1), order, inverse, 1)[:, 0],
    )
    y = _masked(rows, mlp, experts) if some else mlp.run(rows)
    return sum_rows(y, order, inverse, per_token)


def _experts_of(order: jax.Array, chosen: jax.Array, experts: int) -> jax.Array:
    """Those of rows in an order, some of which may be of none."""
    return chosen.at[order].get(mode="fill", fill_value=experts)


def _masked(rows: Rows, mlp: Mlp, experts: int) -> jax.Array:
    """Zero for rows of no expert here, and so is their gradient."""
    valid = (rows.experts < experts)[:, None]
    values = jnp.where(valid, rows.values, 0)
    return jnp.where(valid, mlp.run(dataclasses.replace(rows, values=values)), 0)


def _sorted(
    keys: jax.Array, experts: int, alignment: int = 1
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The order that sorts keys [n], its inverse, and how many of them each expert has.

    With an alignment the order has places between experts that are of none (n), and the sizes
    count these. Keys from `experts` on are of no expert, and last.
    """
    count = keys.shape[0]
    order = jnp.argsort(keys, stable=True)
    sizes = jnp.sum(keys[:, None] == jnp.arange(experts)[None], axis=0, dtype=jnp.int32)
    places = varying_like(jnp.arange(count, dtype=jnp.int32), order)
    if alignment > 1:
        sorted_keys = jnp.minimum(keys[order], experts)
        aligned = -(-sizes // alignment) * alignment
        # by how much the rows of an expert move, and those of none
        moved = _starts(jnp.append(aligned, 0)) - _starts(jnp.append(sizes, 0))
        places, sizes = places + moved[sorted_keys], aligned
        most = min(count * alignment, count + experts * (alignment - 1))
        rows = -(-most // alignment) * alignment
    inverse = jnp.zeros(count, jnp.int32).at[order].set(places, unique_indices=True)
    if alignment > 1:
        order = jnp.full(rows, count, jnp.int32).at[places].set(order, unique_indices=True)
    return order, inverse, sizes


def _ring(
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    mlp: Mlp,
    experts: int,
    axes: tuple[str, ...],
) -> jax.Array:
    """All-gather the tokens, reduce-scatter what the experts add; one device's tokens at a time.

    So there is room for every token of a device, should all of them choose experts of one. What
    the experts compute of a device's tokens is computed again in the backward pass.
    """
    first = lax.axis_index(axes) * experts

    @jax.checkpoint
    def of_device(tokens: Any) -> jax.Array:
        x, chosen, weights = tokens
        return _through_own(x, chosen - first, weights, mlp, experts, some=True)

    tokens = [lax.all_gather(array, axes) for array in (x, chosen, weights)]
    return lax.psum_scatter(lax.map(of_device, tokens), axes)


def _all_to_all(
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    mlp: Mlp,
    experts: int,
    axes: tuple[str, ...],
    room: int | None,
) -> jax.Array:
    """Send rows to the devices of their experts, and back what these make of them.

    A device has room for all that others may send it.
    """
    ways, per_token = lax.axis_size(axes), chosen.shape[1]
    order, inverse, sizes = _sorted(chosen.reshape(-1), ways * experts)
    rows = repeat_rows(x, order, inverse, per_token)
    # how many rows each device sends to each expert: [ways, ways, experts]
    sent = lax.all_gather(sizes, axes).reshape(ways, ways, experts)
    me = lax.axis_index(axes)
    received = lax.dynamic_index_in_dim(sent, me, 1, keepdims=False)  # [ways, experts]
    most = min(per_token, experts) * x.shape[0]
    room = most if room is None else min(most, room)
    moves = _Moves(
        to=jnp.sum(lax.dynamic_index_in_dim(sent, me, 0, keepdims=False), axis=1),
        of=jnp.sum(received, axis=1),
        room=room,
        axes=axes,
    )
    places = jnp.arange(room, dtype=jnp.int32)
    ends = jnp.cumsum(received, axis=1)  # of the rows of each expert, in what a device sent
    of_rows = jax.vmap(lambda end: jnp.searchsorted(end, places, side="right"))(ends)

    @jax.checkpoint
    def compute(arrived: jax.Array) -> jax.Array:
        keys = of_rows.reshape(-1)
        order, inverse, sizes = _sorted(keys, experts, mlp.alignment)
        of_order = _experts_of(order, keys, experts)
        sorted_rows = Rows(repeat_rows(arrived, order, inverse, 1), sizes, of_order, None)
        return sum_rows(_masked(sorted_rows, mlp, experts), order, inverse, 1)

    back = moves.back(compute(moves.there(rows)), rows.shape[0])
    back = back * repeat_rows(weights.reshape(-1, 1), order, inverse, 1).astype(back.dtype)
    return sum_rows(back, order, inverse, per_token)


@dataclasses.dataclass(frozen=True)
class _Moves:
    """How many rows go to each device and come of each, and for how many of one there is room."""

    to: jax.Array  # [ways]
    of: jax.Array
    room: int
    axes: tuple[str, ...]

    def there(self, rows: jax.Array) -> jax.Array:
        """Rows, sorted by where they go, to [ways · room, ..] of where they come from."""
        if current_platform() == "cpu":  # which has no ragged all-to-all
            return self._padded(self._spread(rows, self.to))
        start = _starts(self.to)
        slot = lax.axis_index(self.axes) * self.room
        return self._ragged(
            rows, self.to.shape[0] * self.room, start, self.to, jnp.full_like(start, slot), self.of
        )

    def back(self, rows: jax.Array, count: int) -> jax.Array:
        """The reverse, to `count` rows."""
        if current_platform() == "cpu":
            return self._close(self._padded(rows), self.to, count)
        places = jnp.arange(self.to.shape[0], dtype=jnp.int32) * self.room
        # where the rows that a device gets back begin, told by that device
        starts = lax.all_to_all(_starts(self.to), self.axes, 0, 0)
        return self._ragged(rows, count, places, self.of, starts, self.to)

    def _ragged(self, rows: jax.Array, count: int, *sizes: jax.Array) -> jax.Array:
        into = varying_like(jnp.zeros((count, rows.shape[1]), rows.dtype), rows)
        return lax.ragged_all_to_all(rows, into, *sizes, axis_name=self.axes)

    def _padded(self, rows: jax.Array) -> jax.Array:
        parts = rows.reshape(-1, self.room, rows.shape[-1])
        return lax.all_to_all(parts, self.axes, 0, 0).reshape(rows.shape)

    def _spread(self, rows: jax.Array, sizes: jax.Array) -> jax.Array:
        """Rows in groups of these sizes, each group at the start of its room."""
        places = jnp.arange(self.room, dtype=jnp.int32)
        index = _starts(sizes)[:, None] + places[None]
        inside = places[None] < sizes[:, None]
        found = rows[jnp.where(inside, index, 0)]
        return jnp.where(inside[..., None], found, 0).reshape(-1, rows.shape[1])

    def _close(self, rows: jax.Array, sizes: jax.Array, count: int) -> jax.Array:
        """The reverse of `_spread`."""
        places = jnp.arange(count, dtype=jnp.int32)
        group = jnp.searchsorted(jnp.cumsum(sizes), places, side="right")
        index = group * self.room + places - _starts(sizes)[group]
        return rows.at[index].get(mode="fill", fill_value=0)  # of rows that were dropped


def _starts(sizes: jax.Array) -> jax.Array:
    return jnp.cumsum(sizes) - sizes
