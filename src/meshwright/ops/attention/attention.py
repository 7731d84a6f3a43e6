"""The attention function on any mesh; context parallelism where the length is split."""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.layouts import axes_of
from meshwright.ops.attention import ring, ulysses
from meshwright.ops.attention.block import Block, Method
from meshwright.ops.attention.kernels import one_call
from meshwright.ops.attention.mask import Mask
from meshwright.ops.attention.strategy import (
    ORDERS,
    ContextParallel,
    Split,
    choose_strategy,
    sequence_order,
)
from meshwright.ops.collectives import drop_trivial_axes, nontrivial_axes, spec_of, varying_like

# [batch, length]; for queries and keys of two sequences, those of each
Segments = jax.Array | tuple[jax.Array, jax.Array]


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None = None,
    mask: Mask | None = None,
    *,
    bias: jax.Array | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    context: ContextParallel | None = None,
    kernel: str = "auto",
) -> jax.Array:
    """Attention with a mask, within each packed document; the result is sharded as `q`.

    `bias` [heads, queries, keys] is added to the scaled scores of every sequence of the batch, and
    has a gradient; it is split over heads as `q` is, and whole along the length. `softcap` keeps
    scores s within its size: softcap · tanh(s / softcap). `sinks` [heads], split over heads as `q`
    is, are the scores of one more key for each head, whose value is zero.
    """
    _check(q, k, v, *_of_both(segments))
    mask = (mask or Mask()).within(q.shape[1], k.shape[1])
    context = context or ContextParallel()
    specs = spec_of(q), spec_of(k)
    over = axes_of(specs[0][1], specs[0])
    split = dataclasses.replace(
        split_of(q, k, mask, biased=bias is not None), softcapped=softcap is not None
    )
    strategy = choose_strategy(split, context.strategy) if split.ways > 1 else "none"
    _check_order(context.order, split, strategy)
    if split.ways > 1 and mask.causal and q.shape[1] != k.shape[1]:
        raise MeshwrightError(
            f"a causal mask with context parallelism needs as many keys as queries, not "
            f"{k.shape[1]} and {q.shape[1]}"
        )

    method = Method(kernel, softcap)

    def local(q: jax.Array, k: jax.Array, v: jax.Array, more: Any) -> jax.Array:
        block = Block(q, k, v, *_of_both(more.get("segments")), bias=more.get("bias"))
        # their gradients are summed over the devices that split the batch
        if block.bias is not None:
            block = block._replace(bias=varying_like(block.bias, q))
        if "sinks" in more:
            block = block._replace(sinks=varying_like(more["sinks"], q))
        match strategy:
            case "none":
                return one_call(block, mask, method)
            case "ulysses":
                return ulysses.attend(block, mask, over, split.ways, method)
            case _:
                return ring.attend(block, mask, over, split.ways, strategy, context.order, method)

    more: dict[str, Any] = {} if segments is None else {"segments": segments}
    if bias is not None:
        more["bias"] = _checked_bias(bias, q, k)
    if sinks is not None:
        if sinks.shape != q.shape[2:3]:
            raise MeshwrightError(
                f"sinks of attention are [heads], here [{q.shape[2]}], not {list(sinks.shape)}"
            )
        more["sinks"] = sinks
    if jax.sharding.get_abstract_mesh().empty:
        return local(q, k, v, more)
    types = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, more)
    return jax.shard_map(local, in_specs=(*specs, specs[1], types), out_specs=specs[0])(
        q, k, v, more
    )


def _of_both(segments: Segments | None) -> tuple[jax.Array | None, jax.Array | None]:
    """Of the queries and of the keys."""
    return segments if isinstance(segments, tuple) else (segments, segments)


def split_of(q: jax.Array, k: jax.Array, mask: Mask, biased: bool = False) -> Split:
    """How devices share the sequences, from the types of queries and keys."""
    sizes, spec = jax.sharding.get_abstract_mesh().shape, spec_of(q)
    length, heads = (math.prod(sizes[axis] for axis in axes_of(spec[d], spec)) for d in (1, 2))
    return Split(
        ways=length, length=q.shape[1], heads=q.shape[2] // heads, kv_heads=k.shape[2] // heads,
        head_dim=q.shape[3], mask=mask, biased=biased,
    )  # fmt: skip


def _check(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_segments: jax.Array | None,
    k_segments: jax.Array | None,
) -> None:
    """Check that shapes, dtypes and shardings match; query heads are where their keys are."""
    nontrivial = nontrivial_axes()
    spec, *others = (drop_trivial_axes(spec_of(x), nontrivial) for x in (q, k, v))
    batch, _, heads, head_dim = q.shape if q.ndim == 4 else (0,) * 4
    if q.ndim != 4 or k.shape != v.shape or k.shape[::3] != (batch, head_dim):
        raise MeshwrightError(
            f"attention takes q as [batch, length, heads, head_dim], k and v as [batch, length, "
            f"kv_heads, head_dim], not {q.shape}, {k.shape} and {v.shape}"
        )
    if heads % k.shape[2]:
        raise MeshwrightError(
            f"{heads} heads cannot share {k.shape[2]} kv_heads evenly; heads must be a multiple of "
            "kv_heads"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise MeshwrightError(
            f"attention takes q, k and v of one dtype, not {q.dtype}, {k.dtype} and {v.dtype}"
        )
    if others != [spec, spec] or spec[3] is not None:
        raise MeshwrightError(
            f"attention needs q, k and v with the same sharding and head_dim not sharded; they are "
            f"{spec}, {others[0]} and {others[1]}"
        )
    for numbers, x, of in ((q_segments, q, "queries"), (k_segments, k, "keys")):
        if numbers is None:
            continue
        if numbers.shape != x.shape[:2]:
            raise MeshwrightError(
                f"segments have shape {numbers.shape}; for the {of} they must be [batch, length] = "
                f"({batch}, {x.shape[1]}), or a pair of these for queries and keys of different "
                "lengths"
            )
        if drop_trivial_axes(spec_of(numbers), nontrivial) != P(*spec[:2]):
            raise MeshwrightError(
                f"segments are sharded as {spec_of(numbers)}, queries as {spec}; batch and length "
                "must be sharded alike"
            )


def _checked_bias(bias: jax.Array, q: jax.Array, k: jax.Array) -> jax.Array:
    """The bias, of the right shape and split over heads as the queries are."""
    shape = q.shape[2], q.shape[1], k.shape[1]
    if bias.shape != shape:
        raise MeshwrightError(
            f"a bias of attention is [heads, queries, keys], here {list(shape)}, not "
            f"{list(bias.shape)}"
        )
    nontrivial = nontrivial_axes()
    wanted = P(drop_trivial_axes(spec_of(q), nontrivial)[2], None, None)
    if drop_trivial_axes(spec_of(bias), nontrivial) != wanted:
        raise MeshwrightError(
            f"a bias of attention is split over heads as the queries are: {wanted}, not "
            f"{spec_of(bias)}"
        )
    return bias


def _check_order(order: str, split: Split, strategy: str) -> None:
    if order not in ORDERS:
        raise MeshwrightError(
            f"order={order!r} is not a sequence order{did_you_mean(order, ORDERS)}"
        )
    if order == "contiguous" or split.ways == 1:
        return
    # without a mask the order does not matter; only some masks are implemented for zig-zag
    if strategy == "ulysses" or (split.mask.causal and sequence_order(split, strategy) != order):
        raise MeshwrightError(
            f"{strategy} attention with {split.mask} needs sequences in contiguous order, not in "
            f"{order}"
        )
