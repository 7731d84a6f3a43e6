"""Packed documents, for a fused kernel that does not support segment ids (cuDNN).

Short sequences: the mask is a bias [queries, keys], added to the scores. For long ones that would
need too much memory. But where queries and keys are different parts of a sequence, only a document
that crosses the boundary is in both, and usually there is none. So full attention visits one
document at a time, in all sequences of the batch at once: its queries and keys are moved to the
front, and the kernel gets their counts. Tokens without any of these keys are not computed. A causal
part is split into shorter ones, each with a bias, and full attention between them, in pairs: 1 to
0, 3 to 2, ..; then 2-3 to 0-1, ..; and so on. Any segment ids are correct; ascending ids are fast.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.arithmetic import round_up
from meshwright.ops.attention.block import Block, Gradients, Partial, merge
from meshwright.ops.attention.fused import Inputs
from meshwright.ops.collectives import varying_like

BIAS_UP_TO = 2**26  # elements: 128 MiB of bfloat16
_TOO_MUCH = 2**30
_NONE = jnp.iinfo(jnp.int32).max  # not a segment id

Forward = Callable[[Inputs], Partial]
Backward = Callable[[Inputs, Partial, jax.Array], Gradients]


def forward(call: Forward, block: Block, causal: bool, bias_up_to: int = BIAS_UP_TO) -> Partial:
    """Output and lse of a block with segment ids, from kernel calls without them."""
    if not causal:
        return _full_forward(call, block, bias_up_to)
    length = block.q.shape[1]
    size = length // parts_of(block.q.shape[0], length, bias_up_to)
    done = call(_with_bias(_cut(block, size), causal=True))
    while size < length:
        size *= 2
        found = _full_forward(call, _later_to_earlier(block, size), bias_up_to)
        first, second = _halves(done, size)
        first = first._replace(out=first.out.astype(jnp.float32))
        done = _from_halves(first, merge(second, found))
    done = _cut(done, length)
    return done._replace(out=done.out.astype(block.q.dtype))


def backward(
    call: Backward,
    block: Block,
    causal: bool,
    output: Partial,
    dout: jax.Array,
    bias_up_to: int = BIAS_UP_TO,
) -> Gradients:
    """This block's part of the gradients; `output` may be over more keys."""
    if not causal:
        return _full_backward(call, block, output, dout, bias_up_to)
    length = block.q.shape[1]
    size = length // parts_of(block.q.shape[0], length, bias_up_to)
    sums = _in_float32(
        call(_with_bias(_cut(block, size), causal=True), *_cut((output, dout), size))
    )
    while size < length:
        size *= 2
        later = _later_to_earlier(block, size)
        _, (some, gradient) = _halves((output, dout), size)
        found = _in_float32(_full_backward(call, later, some, gradient, bias_up_to))
        first, second = _halves(sums, size)
        first = first._replace(k=first.k + found.k, v=first.v + found.v)
        sums = _from_halves(first, second._replace(q=second.q + found.q))
    return jax.tree.map(lambda x, of: x.astype(of.dtype), _cut(sums, length), Gradients(*block[:3]))


def parts_of(batch: int, length: int, bias_up_to: int = BIAS_UP_TO) -> int:
    """Number of parts of a causal block, a power of two: the fewest with a small enough bias."""
    parts = 1
    while batch * length * (length // parts) > bias_up_to and length % (4 * parts) == 0:
        parts *= 2
    return parts


def padded_length(length: int) -> int:
    """The padded length: even, and divisible by two until the [n, n] bias is small enough.

    >>> [padded_length(n) for n in (1000, 1001, 40_000, 40_002)]
    [1000, 1002, 40000, 40004]
    """
    multiple, padded = 2, length + length % 2
    while padded * (padded // parts_of(1, padded)) > _TOO_MUCH and multiple < length:
        multiple *= 2
        padded = round_up(length, multiple)
    return padded


def _full_forward(call: Forward, block: Block, bias_up_to: int) -> Partial:
    if _small(block, bias_up_to):
        return call(_with_bias(block, causal=False))
    out = varying_like(jnp.zeros_like(block.q), *_arrays(block))
    nothing = jnp.full(out.shape[:3], -jnp.inf, jnp.float32)

    def visit(done: Partial, of: "_Document") -> Partial:
        found = call(_inputs(block, of))
        return jax.tree.map(lambda old, new: of.queries.put(old, new), done, found)

    return _one_at_a_time(block, visit, Partial(out, varying_like(nothing, out)))


def _full_backward(
    call: Backward, block: Block, output: Partial, dout: jax.Array, bias_up_to: int
) -> Gradients:
    if _small(block, bias_up_to):
        return call(_with_bias(block, causal=False), output, dout)
    varies = (*_arrays(block), *output, dout)
    nothing = Gradients(*(varying_like(jnp.zeros_like(x), *varies) for x in block[:3]))

    def visit(done: Gradients, of: "_Document") -> Gradients:
        some = jax.tree.map(of.queries.take, (output, dout))
        # zero cotangents past the count, so the kernel adds nothing there
        found = call(_inputs(block, of), some[0], of.queries.only(some[1]))
        return Gradients(
            of.queries.put(done.q, found.q),
            of.keys.put(done.k, found.k),
            of.keys.put(done.v, found.v),
        )

    return _one_at_a_time(block, visit, nothing)


class _Front(NamedTuple):
    """Some tokens of each sequence, and the order that moves them to the front."""

    chosen: jax.Array  # [batch, length]
    order: jax.Array  # [batch, length] source index of each token
    places: jax.Array  # [batch, length] target index of each token
    many: jax.Array  # [batch] number of chosen tokens

    def take(self, x: jax.Array) -> jax.Array:
        return _along(x, self.order)

    def only(self, x: jax.Array) -> jax.Array:
        """`x` of the chosen tokens at the front, zero after them."""
        is_one = jnp.arange(x.shape[1])[None] < self.many[:, None]
        return jnp.where(_like(is_one, x), x, jnp.zeros((), x.dtype))

    def put(self, old: jax.Array, new: jax.Array) -> jax.Array:
        """`old`, with the chosen tokens replaced by the front of `new`."""
        return jnp.where(_like(self.chosen, old), _along(new, self.places).astype(old.dtype), old)


class _Document(NamedTuple):
    queries: _Front
    keys: _Front


def _one_at_a_time(block: Block, visit: Callable[[Any, _Document], Any], start: Any) -> Any:
    """`start`, updated by a visit to every document with both queries and keys in the block."""
    assert block.q_segments is not None
    assert block.k_segments is not None
    both = block.q_segments.astype(jnp.int32), block.k_segments.astype(jnp.int32)

    def one(carry: Any) -> Any:
        done, now = carry
        fronts = (_front((of == now[:, None]) & (now < _NONE)[:, None]) for of in both)
        following = jnp.minimum(now, _NONE - 1) + 1  # _NONE stays _NONE
        return visit(done, _Document(*fronts)), _first_shared(*both, following)

    least = jnp.full(both[0].shape[:1], jnp.iinfo(jnp.int32).min, jnp.int32)
    first = _first_shared(*both, varying_like(least, *jax.tree.leaves(start)))
    return lax.while_loop(lambda carry: jnp.any(carry[1] < _NONE), one, (start, first))[0]


def _first_shared(queries: jax.Array, keys: jax.Array, least: jax.Array) -> jax.Array:
    """Per sequence, the smallest segment id >= `least` that queries and keys share; or _NONE.

    The larger of both sides' smallest ids is a lower bound for a shared id: repeat from there.
    """

    def firsts(least: jax.Array) -> tuple[jax.Array, jax.Array]:
        ours, theirs = (jnp.where(of >= least[:, None], of, _NONE) for of in (queries, keys))
        return jnp.min(ours, axis=1), jnp.min(theirs, axis=1)

    def differ(found: Any) -> jax.Array:
        return jnp.any(found[0] != found[1])

    return lax.while_loop(differ, lambda found: firsts(jnp.maximum(*found)), firsts(least))[0]


def _front(chosen: jax.Array) -> _Front:
    many = jnp.sum(chosen, axis=1, dtype=jnp.int32)
    before = jnp.cumsum(chosen, axis=1, dtype=jnp.int32) - chosen.astype(jnp.int32)
    numbers = jnp.broadcast_to(jnp.arange(chosen.shape[1], dtype=jnp.int32)[None], chosen.shape)
    places = jnp.where(chosen, before, many[:, None] + numbers - before)
    order = jax.vmap(lambda at, of: jnp.zeros_like(at).at[at].set(of, unique_indices=True))
    return _Front(chosen, order(places, numbers), places, many)


def _inputs(block: Block, of: _Document) -> Inputs:
    # at least 1, since kernels may not support 0; those results are not used
    counts = jnp.maximum(of.queries.many, 1), jnp.maximum(of.keys.many, 1)
    k, v = of.keys.take(block.k), of.keys.take(block.v)
    return Inputs(of.queries.take(block.q), k, v, counts=counts)


def _with_bias(block: Block, causal: bool) -> Inputs:
    assert block.q_segments is not None
    assert block.k_segments is not None
    dtype = block.q.dtype
    same = block.q_segments[:, None, :, None] == block.k_segments[:, None, None, :]
    # finite, since cuDNN subtracts masked scores from each other
    never = jnp.asarray(-(2.0**15) if dtype == jnp.float16 else -(2.0**41), dtype)
    bias = jnp.where(same, jnp.zeros((), dtype), never)
    return Inputs(block.q, block.k, block.v, causal=causal, bias=bias)


def _small(block: Block, bias_up_to: int) -> bool:
    (batch, queries), keys = block.q.shape[:2], block.k.shape[1]
    return batch * queries * keys <= bias_up_to and queries % 2 == keys % 2 == 0


def _in_float32(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def _cut(tree: Any, size: int) -> Any:
    """Reshape [batch, length, ..] to [-1, size, ..]."""
    return jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[2:]), tree)


def _halves(tree: Any, size: int) -> tuple[Any, Any]:
    """Both halves of every part of `size` tokens."""
    tree, half = _cut(tree, size), size // 2
    return jax.tree.map(lambda x: x[:, :half], tree), jax.tree.map(lambda x: x[:, half:], tree)


def _from_halves(first: Any, second: Any) -> Any:
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y.astype(x.dtype)], axis=1), first, second)


def _later_to_earlier(block: Block, size: int) -> Block:
    """For every part of `size` tokens: queries of its second half, keys of its first."""
    first, second = _halves(block, size)
    return first._replace(q=second.q, q_segments=second.q_segments)


def _along(x: jax.Array, places: jax.Array) -> jax.Array:
    """Tokens of each sequence [batch, length, ..] by index."""
    return jax.vmap(lambda tokens, at: tokens[at])(x, places)


def _like(condition: jax.Array, x: jax.Array) -> jax.Array:
    """[batch, length], broadcastable to `x`."""
    return condition.reshape(*condition.shape, *(1,) * (x.ndim - 2))


def _arrays(block: Block) -> list[jax.Array]:
    return jax.tree.leaves(block)
