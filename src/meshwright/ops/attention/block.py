"""Blocks: attention of some queries to some keys, forward and backward. Kernels compute these.

A kernel returns the output and the log-sum-exp (lse) of each query, so that outputs over several
blocks of keys can be merged. Its backward pass takes the output and lse over *all* keys, and
returns this block's part of the gradients. Partial results are float32: rounding each of them to
bfloat16 would add an error per block.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from meshwright.ops.attention.mask import Mask


class Block(NamedTuple):
    """Queries and keys on one device; consecutive query heads share a key head."""

    q: jax.Array  # [batch, queries, heads, head_dim]
    k: jax.Array  # [batch, keys, kv_heads, head_dim]
    v: jax.Array
    q_segments: jax.Array | None = (
        None  # [batch, queries] segment ids; attention stays within a segment
    )
    k_segments: jax.Array | None = None
    # [queries], int32: a query attends to the keys before this index, where the mask is known only
    # at run time; None: the static mask applies
    k_end: jax.Array | None = None
    bias: jax.Array | None = None  # [heads, queries, keys], float32: added to the scaled scores
    # [heads]: the score of a key that every query sees, whose value is zero; kernels leave it out,
    # and `with_gradient` adds it to their results
    sinks: jax.Array | None = None

    @property
    def lengths(self) -> tuple[int, int]:
        """The numbers of queries and keys."""
        return self.q.shape[1], self.k.shape[1]


class Partial(NamedTuple):
    """The output over some of the keys, and its log-sum-exp."""

    out: jax.Array  # [batch, queries, heads, head_dim]
    lse: jax.Array  # [batch, queries, heads], float32; -inf where a query has no key


class Gradients(NamedTuple):
    """Gradients of a block's queries, keys and values, and of the bias if there is one."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    bias: jax.Array | None = None


class Method(NamedTuple):
    """How a block is computed: by which kernel, or the fastest, and with which cap of scores."""

    kernel: str = "auto"
    softcap: float | None = None


@dataclasses.dataclass(frozen=True)
class Call:
    """The static description of a kernel call; a kernel accepts or refuses it."""

    platform: str
    dtype: str
    queries: int
    keys: int
    head_dim: int
    mask: Mask
    segmented: bool
    dynamic: bool = False  # the mask is known only at run time (k_end)
    partial: bool = False  # results are partial, in float32
    biased: bool = False  # a bias is added to the scores
    softcapped: bool = False  # scores are capped

    @property
    def lengths(self) -> tuple[int, int]:
        return self.queries, self.keys


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Forward and backward passes, each with an optional post-processing function.

    Both take the dtype of their results last, None for that of their inputs. A kernel that supports
    only the latter ignores it. A kernel that accepts calls with capped scores takes `softcap` too.
    """

    forward: Callable[..., Any]  # block, mask, dtype
    backward: Callable[..., Any]  # block, mask, output over all keys, its cotangent, dtype
    refuses: Callable[[Call], str | None]  # the reason, None if it supports the call
    partial: Callable[[Any], Partial] = lambda result: result  # after forward
    gradients: Callable[[Any], Gradients] = lambda result: result  # after backward
    # numbers of queries and keys after padding
    lengths: Callable[[Call], tuple[int, int]] = lambda call: call.lengths


def merge(a: Partial, b: Partial) -> Partial:
    """Merge the outputs over two sets of keys, in float32."""
    most = jnp.maximum(a.lse, b.lse)
    most = jnp.where(jnp.isneginf(most), 0.0, most)
    of_a, of_b = jnp.exp(a.lse - most), jnp.exp(b.lse - most)
    total = of_a + of_b
    some = jnp.where(total == 0, 1.0, total)  # a query without any key so far
    out = a.out.astype(jnp.float32) * (of_a / some)[..., None]
    out += b.out.astype(jnp.float32) * (of_b / some)[..., None]
    return Partial(out, jnp.log(total) + most)


def where(condition: jax.Array, a: Any, b: Any) -> Any:
    """jnp.where over trees, with one condition for all leaves."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)


def with_sinks(output: Partial, sinks: jax.Array | None) -> Partial:
    """The output where each head also sees a key with this score, whose value is zero."""
    if sinks is None:
        return output
    scores = _by_query(sinks, output)
    out = output.out * jax.nn.sigmoid(output.lse - scores)[..., None]
    return Partial(out.astype(output.out.dtype), jnp.logaddexp(output.lse, scores))


def _by_query(sinks: jax.Array, output: Partial) -> jax.Array:
    """[1, .., heads]: beside the log-sum-exp of queries."""
    return sinks.astype(jnp.float32).reshape(*(1,) * (output.lse.ndim - 1), -1)


def _gradient_of_sinks(output: Partial, dout: jax.Array, sinks: jax.Array) -> jax.Array:
    """From the output with the sinks: as of any key, but its value is zero."""
    weights = jnp.exp(_by_query(sinks, output) - output.lse)
    product = output.out.astype(jnp.float32) * dout.astype(jnp.float32)
    return -jnp.sum(weights * jnp.sum(product, axis=-1), axis=(0, 1)).astype(sinks.dtype)


def with_gradient(
    forward: Callable[[Block], Partial], backward: Callable[[Block, Partial, jax.Array], Gradients]
) -> Callable[[Block], jax.Array]:
    """The output alone, as a function of a block, with `backward` as its vjp.

    Sinks need no kernel: a backward pass takes the output over all keys, and they are one.
    """

    def run_forward(block: Block) -> Partial:
        return with_sinks(forward(block), block.sinks)

    @jax.custom_vjp
    def run(*arrays: Any) -> jax.Array:
        return run_forward(Block(*arrays)).out

    def keep(*arrays: Any) -> Any:
        # jax.checkpoint: otherwise jax hoists what all layers share (masks, constants), of all ring
        # steps, out of the loop over layers and keeps it
        found = jax.checkpoint(run_forward, prevent_cse=False)(Block(*arrays))
        # named, so that a remat policy can keep them for the backward pass
        output = jax.tree.map(lambda x: checkpoint_name(x, "attention"), found)
        return output.out, (arrays, output)

    def gradients(kept: Any, dout: jax.Array) -> Any:
        arrays, output = kept
        block = Block(*arrays)
        *of_qkv, of_bias = backward(block, output, dout)
        of_sinks = None if block.sinks is None else _gradient_of_sinks(output, dout, block.sinks)
        return *of_qkv, *(None,) * (len(arrays) - 5), of_bias, of_sinks

    run.defvjp(keep, gradients)
    return lambda block: run(*block)
