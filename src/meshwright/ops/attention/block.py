"""Attention of one run of queries to one run of keys, forward and backward: what kernels compute.

A kernel gives each query's output and the log of its sum of weights, so that outputs over several
runs of keys can be put together; its backward pass takes the output and the sum over *all* keys,
and gives this run's part of the gradients. Where several parts are summed they are asked for in
float32: rounding every part to bfloat16 first would add an error for each.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from meshwright.ops.attention.mask import Mask


class Block(NamedTuple):
    """Queries and keys that lie on one device; query heads share key heads in order."""

    q: jax.Array  # [batch, queries, heads, head_dim]
    k: jax.Array  # [batch, keys, kv_heads, head_dim]
    v: jax.Array
    q_segments: jax.Array | None = None  # [batch, queries]: documents; only equals see each other
    k_segments: jax.Array | None = None
    # [queries], int32: a query sees the keys before this index, where the mask is not known until
    # the program runs; None: what the mask says
    k_end: jax.Array | None = None
    bias: jax.Array | None = None  # [heads, queries, keys], float32: added to the scaled scores

    @property
    def lengths(self) -> tuple[int, int]:
        """The numbers of queries and keys."""
        return self.q.shape[1], self.k.shape[1]


class Partial(NamedTuple):
    """The output over some of the keys, and the log of the sum of their weights."""

    out: jax.Array  # [batch, queries, heads, head_dim]
    log_sum: jax.Array  # [batch, queries, heads], float32; -inf where nothing was seen


class Gradients(NamedTuple):
    """Gradients of a block's queries, keys and values, and of the bias if there is one."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    bias: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Call:
    """What a kernel is asked to do; each says whether it can, from this alone."""

    platform: str
    dtype: str
    queries: int
    keys: int
    head_dim: int
    mask: Mask
    segmented: bool
    dynamic: bool = False  # which keys a query sees is known only when the program runs (k_end)
    partial: bool = False  # results are parts of sums, asked for in float32
    biased: bool = False  # a bias is added to the scores

    @property
    def lengths(self) -> tuple[int, int]:
        return self.queries, self.keys


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Forward and backward, each in two steps where what a fused call gives needs finishing.

    Both take the dtype of their results last, None for that of their inputs; a kernel that can only
    give the latter gives that.
    """

    forward: Callable[..., Any]  # block, mask, dtype
    backward: Callable[..., Any]  # block, mask, output over all keys, its cotangent, dtype
    refuses: Callable[[Call], str | None]  # why not, None if it can
    partial: Callable[[Any], Partial] = lambda found: found  # from what forward gives
    gradients: Callable[[Any], Gradients] = lambda found: found  # from what backward gives
    # queries and keys it computes with: the call's lengths, or what they must be padded to
    lengths: Callable[[Call], tuple[int, int]] = lambda call: call.lengths


def merge(a: Partial, b: Partial) -> Partial:
    """Outputs over two sets of keys as one over both, in float32."""
    most = jnp.maximum(a.log_sum, b.log_sum)
    most = jnp.where(jnp.isneginf(most), 0.0, most)
    of_a, of_b = jnp.exp(a.log_sum - most), jnp.exp(b.log_sum - most)
    total = of_a + of_b
    some = jnp.where(total == 0, 1.0, total)  # a query that has seen nothing yet
    out = a.out.astype(jnp.float32) * (of_a / some)[..., None]
    out += b.out.astype(jnp.float32) * (of_b / some)[..., None]
    return Partial(out, jnp.log(total) + most)


def where(condition: jax.Array, a: Any, b: Any) -> Any:
    """One tree or the other, by a condition that holds for all of it."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)


def with_gradient(
    forward: Callable[[Block], Partial], backward: Callable[[Block, Partial, jax.Array], Gradients]
) -> Callable[[Block], jax.Array]:
    """The output alone, as a function that jax can differentiate by the backward given."""

    @jax.custom_vjp
    def run(*arrays: Any) -> jax.Array:
        return forward(Block(*arrays)).out

    def keep(*arrays: Any) -> Any:
        # as a checkpoint: in a loop over layers jax would compute what is the same in all of them
        # (masks, constants) before the loop, of all turns of a ring, and keep it
        found = jax.checkpoint(forward, prevent_cse=False)(Block(*arrays))
        # by name, so that what is kept for the backward pass need not be made again
        whole = jax.tree.map(lambda x: checkpoint_name(x, "attention"), found)
        return whole.out, (arrays, whole)

    def gradients(kept: Any, given: jax.Array) -> Any:
        arrays, whole = kept
        *of_qkv, of_bias = backward(Block(*arrays), whole, given)
        return *of_qkv, *(None,) * (len(arrays) - 4), of_bias

    run.defvjp(keep, gradients)
    return lambda block: run(*block)
