"""Latent attention (MLA, DeepSeek): queries, keys and values of all heads by way of small vectors.

A token's keys and values are made of one latent, and of a key part that is rotated and that all
heads share. Here both are expanded to each head before attention, also in an engine's cache, and
values are padded with zeros to the size of keys, which kernels take alike.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from meshwright.models.blocks import Params, gather_weight, project
from meshwright.models.compute import Compute
from meshwright.models.decoder.kinds import LayerKind
from meshwright.ops import all_gather, normalize, split_axes

_EPS = 1e-6  # of the norms of latents, whatever the model's other norms have


def latent_heads(
    normed: jax.Array,
    w: Params,
    rope: Callable[[jax.Array], jax.Array],
    kind: LayerKind,
    compute: Compute,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values [batch, length, heads, head_dim], of the norm before attention."""
    of, layouts = kind.attention, compute.layouts
    assert of.rope_dim is not None
    assert of.value_dim is not None
    by_token = layouts.residual.partitions[:2]
    # with sequence parallelism latents are made of the tokens that a device has between blocks
    between = tuple(axis for axis in split_axes(by_token) if axis not in layouts.token_axes)
    norm = dataclasses.replace(kind.norm, eps=_EPS)
    across = layouts.all_gathered(layouts.heads)  # the axes that split heads

    def small(name: str) -> jax.Array:
        """[batch, length, rank]"""
        weight = gather_weight(w[name], compute, also=between)
        return project("ble,ec->blc", normed, weight, P(*by_token, None), compute)

    def latent(name: str, norm_name: str) -> jax.Array:
        """The norm of one, on every device that has heads of these tokens."""
        scale = all_gather(w[norm_name], split_axes(by_token))
        return all_gather(normalize(small(name), scale, norm), across)

    def heads(name: str, latent: jax.Array, layout: P) -> jax.Array:
        weight = gather_weight(w[name], compute)
        return project("blc,chd->blhd", latent, weight, layout, compute, of_embed=False)

    if of.q_rank is None:
        weight = gather_weight(w["wq"], compute)
        inputs = all_gather(normed, across)
        q = project("ble,ehd->blhd", inputs, weight, layouts.heads, compute)
    else:
        q = heads("wq_b", latent("wq_a", "q_norm"), layouts.heads)
    kept = of.head_dim - of.rope_dim  # dims of a head that are not rotated, the first
    q = jnp.concatenate([q[..., :kept], rope(q[..., kept:])], axis=-1)
    if of.scale is not None:  # attention multiplies scores with head_dim^-0.5
        q = q * (of.scale * of.head_dim**0.5)
    keys_and_values = latent("wkv_a", "kv_norm")
    k = heads("wk_b", keys_and_values, layouts.kv_heads)
    shared = reshard(small("wk_rope"), P(*layouts.heads.partitions[:2], None))
    rotated = jnp.broadcast_to(
        rope(shared[:, :, None]), (*k.shape[:3], of.rope_dim), out_sharding=layouts.kv_heads
    )
    k = jnp.concatenate([k, rotated], axis=-1)
    v = heads("wv_b", keys_and_values, layouts.kv_heads)
    v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, of.head_dim - of.value_dim)))
    return checkpoint_name(q, "q"), checkpoint_name(k, "k"), checkpoint_name(v, "v")
