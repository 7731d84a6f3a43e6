"""The attention function on any mesh; context parallelism where the length is split."""

import math

import jax
from jax.sharding import PartitionSpec as P

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.layouts import axes_of
from meshwright.ops.attention import ring, ulysses
from meshwright.ops.attention.block import Block
from meshwright.ops.attention.kernels import one_call
from meshwright.ops.attention.mask import Mask
from meshwright.ops.attention.strategy import ORDERS, Split, choose_strategy, sequence_order
from meshwright.ops.collectives import drop_trivial_axes, nontrivial_axes, spec_of


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None = None,
    mask: Mask | None = None,
    *,
    strategy: str = "auto",
    order: str = "contiguous",
    kernel: str = "auto",
) -> jax.Array:
    """Attention with a mask, within each packed document; the result is sharded as `q`.

    `order` is the order of a sequence over the devices that share it: see sequence_order and
    to_zigzag.
    """
    _check(q, k, v, segments)
    mask = (Mask() if mask is None else mask).within(q.shape[1], k.shape[1])
    specs = spec_of(q), spec_of(k)
    over = axes_of(specs[0][1], specs[0])
    split = split_of(q, k, mask)
    strategy = choose_strategy(split, strategy) if split.ways > 1 else "none"
    _check_order(order, split, strategy)
    if split.ways > 1 and mask.causal and q.shape[1] != k.shape[1]:
        raise MeshwrightError(
            f"a causal mask with context parallelism needs as many keys as queries, not "
            f"{k.shape[1]} and {q.shape[1]}"
        )

    def local(q: jax.Array, k: jax.Array, v: jax.Array, *optional: jax.Array) -> jax.Array:
        ids = optional[0] if optional else None
        block = Block(q, k, v, ids, ids)
        match strategy:
            case "none":
                return one_call(block, mask, kernel)
            case "ulysses":
                return ulysses.attend(block, mask, over, split.ways, kernel)
            case _:
                return ring.attend(block, mask, over, split.ways, strategy, order, kernel)

    optional = () if segments is None else (segments,)
    if jax.sharding.get_abstract_mesh().empty:
        return local(q, k, v, *optional)
    in_specs = (*specs, specs[1], *(spec_of(x) for x in optional))
    return jax.shard_map(local, in_specs=in_specs, out_specs=specs[0])(q, k, v, *optional)


def split_of(q: jax.Array, k: jax.Array, mask: Mask) -> Split:
    """How devices share the sequences, from the types of queries and keys."""
    sizes, spec = jax.sharding.get_abstract_mesh().shape, spec_of(q)
    length, heads = (math.prod(sizes[axis] for axis in axes_of(spec[d], spec)) for d in (1, 2))
    return Split(
        ways=length, length=q.shape[1], heads=q.shape[2] // heads, kv_heads=k.shape[2] // heads,
        head_dim=q.shape[3], mask=mask,
    )  # fmt: skip


def _check(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> None:
    """Check that shapes, dtypes and shardings match; query heads are where their keys are."""
    nontrivial = nontrivial_axes()
    spec, *others = (drop_trivial_axes(spec_of(x), nontrivial) for x in (q, k, v))
    batch, length, heads, head_dim = q.shape if q.ndim == 4 else (0,) * 4
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
    if segments is None:
        return
    if segments.shape != (batch, length) or k.shape[1] != length:
        raise MeshwrightError(
            f"segments have shape {segments.shape}; they must be [batch, length] = "
            f"({batch}, {length}), with as many keys as queries, not {k.shape[1]} and {length}"
        )
    if drop_trivial_axes(spec_of(segments), nontrivial) != P(*spec[:2]):
        raise MeshwrightError(
            f"segments are sharded as {spec_of(segments)}, queries as {spec}; batch and length "
            "must be sharded alike"
        )


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
