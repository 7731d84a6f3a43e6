"""Attention of one new token per sequence to a contiguous cache and to itself."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from meshwright.ops.collectives import spec_of


def cached_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    lengths: jax.Array,
    *,
    window: int | None = None,
    bias: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """The output [batch, 1, heads, head_dim], softmax in float32; query heads share key heads.

    `keys` and `values` are [batch, kv_heads, room, head_dim], each head's tokens together, as a
    matmul reads them; `lengths` [batch] of them are valid. The token's own key and value `k`, `v`
    [batch, 1, kv_heads, head_dim] are not in the cache yet: so a loop over layers only reads the
    cache, which is written once after it. `bias`, added to the scaled scores, is [heads, 1, room]
    for the cache and [heads, 1, 1] for the token itself.
    """

    def local(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        lengths: jax.Array,
        bias: tuple[jax.Array, ...],
    ) -> jax.Array:
        batch, _, heads, head_dim = q.shape
        kv_heads, room = keys.shape[1:3]
        groups = (kv_heads, heads // kv_heads)
        grouped = q.reshape(batch, *groups, head_dim)
        scores = jnp.einsum("bkgd,bksd->bkgs", grouped, keys, preferred_element_type=jnp.float32)
        own = jnp.einsum("bkgd,bkd->bkg", grouped, k[:, 0], preferred_element_type=jnp.float32)
        distance = lengths[:, None] - jnp.arange(room)[None]  # [batch, room]
        visible = distance > 0
        if window is not None:
            visible &= distance < window
        scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
        scores = jnp.concatenate([scores, own[..., None]], axis=-1) * head_dim**-0.5
        if bias:
            scores = scores + jnp.concatenate(bias, axis=-1).reshape(1, *groups, room + 1)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        mixed = jnp.einsum("bkgs,bksd->bkgd", weights[..., :room], values)
        mixed = mixed + weights[..., room:] * v[:, 0, :, None]
        return mixed.reshape(q.shape)

    heads = spec_of(q)
    cache = spec_of(keys)
    by_head = tuple(P(heads[2], None, None) for _ in bias or ())
    specs = (heads, heads, heads, cache, cache, P(heads[0]), by_head)
    return jax.shard_map(local, in_specs=specs, out_specs=heads)(
        q, k, v, keys, values, lengths, bias or ()
    )
