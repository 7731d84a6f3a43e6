"""The forward pass of every dense decoder here: Llama, Mistral, Qwen.

One code for every mesh: sharding is in the types (explicit mesh axes), and each step that sends
something says so (gather, reduce_to, out_sharding).
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from meshwright.models.activations import ActivationLayouts
from meshwright.models.blocks import (
    Params,
    along_residual,
    enter,
    mlp,
    prepare_weights,
    through_layers,
)
from meshwright.models.compute import Compute
from meshwright.models.decoder.config import DecoderConfig
from meshwright.models.decoder.sequence import SequencePlan, sequence_plan
from meshwright.models.loss import LmHead, LossConfig, next_token_loss
from meshwright.ops import (
    add_bias,
    all_gather,
    embed,
    norm_alone,
    partial_sums,
    reduce_to,
    rms_norm,
    rotate,
)
from meshwright.ops.attention import attention


def hidden_states(
    params: Params,
    tokens: jax.Array,
    config: DecoderConfig,
    compute: Compute,
    *,
    segments: jax.Array | None = None,
    positions: jax.Array | None = None,
    as_arranged: bool = False,
) -> jax.Array:
    """Tokens [batch, length] to [batch, length, embed] after the last norm.

    `segments` numbers the documents of a row; `positions` count within them. Without: one document.
    Where sequences are split, devices may hold them in another order (sequence_plan): the result is
    in the order of the tokens, unless it is wanted `as_arranged`.
    """
    x, _, rows = _through_layers(params, tokens, config, compute, segments, positions)
    return x if as_arranged else _restored(x, rows, compute.layouts)


def hidden_states_and_keys(
    params: Params, tokens: jax.Array, config: DecoderConfig, compute: Compute
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """hidden_states, and every layer's keys and values [layers, batch, length, kv_heads, head_dim].

    For a cache: rows are one document each, and everything is in the order of the tokens.
    """
    x, keys, rows = _through_layers(params, tokens, config, compute, keep_keys=True)
    return _restored(x, rows, compute.layouts), *keys


def _restored(x: jax.Array, rows: SequencePlan, layouts: ActivationLayouts) -> jax.Array:
    if rows.context.order == "contiguous":
        return x
    return reshard(rows.restored(reshard(x, layouts.block)), layouts.residual)


def _through_layers(
    params: Params,
    tokens: jax.Array,
    config: DecoderConfig,
    compute: Compute,
    segments: jax.Array | None = None,
    positions: jax.Array | None = None,
    keep_keys: bool = False,
) -> tuple[jax.Array, Any, SequencePlan]:
    """The hidden states after the last norm as the devices hold them; keys in the tokens' order."""
    layouts = compute.layouts
    rows = sequence_plan(config, compute, tokens.shape[1])
    whole_rows = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    positions = whole_rows if positions is None else positions

    def placed(x: jax.Array) -> jax.Array:
        return rows.arranged(reshard(x, layouts.tokens))

    table = all_gather(params["embedding"].astype(compute.dtype), layouts.token_axes)
    x = embed(table, placed(tokens), layouts.residual)
    layer = functools.partial(
        _layer,
        config=config,
        compute=compute,
        rope=config.rope.tables(placed(positions), config.head_dim),
        segments=None if segments is None else placed(segments),
        rows=rows,
    )
    weights = prepare_weights(params["layers"], layouts, compute)
    if keep_keys:

        def with_keys(x: jax.Array, w: Params) -> Any:
            x, update, keys = layer(x, None, w)
            return x + update, jax.tree.map(rows.restored, keys)

        (x, keys), update = lax.scan(with_keys, x, weights), None
    else:
        keys = None
        x, update = through_layers(
            lambda x, update, w: layer(x, update, w)[:2], x, weights, config.layers, compute
        )
    scale = along_residual(params["norm"], layouts)
    return norm_alone(x, scale, config.norm_eps, update), keys, rows


def logits(
    params: Params,
    tokens: jax.Array,
    config: DecoderConfig,
    compute: Compute,
    *,
    segments: jax.Array | None = None,
    positions: jax.Array | None = None,
) -> jax.Array:
    """Tokens [batch, length] to logits [batch, length, vocab], in float32."""
    layouts = compute.layouts
    x = hidden_states(params, tokens, config, compute, segments=segments, positions=positions)
    x = all_gather(x, layouts.axes(layouts.logits))
    head = lm_head(params, config)
    found = jnp.einsum(
        "ble,ve->blv" if head.tied else "ble,ev->blv",
        x, head.gathered(compute), preferred_element_type=jnp.float32, out_sharding=layouts.logits,
    )  # fmt: skip
    if found.shape[2] == config.vocab:
        return found
    # without padding the vocabulary does not divide, so every device gets all of it
    return reshard(found, P(*layouts.logits.partitions[:2], None))[..., : config.vocab]


def lm_head(params: Params, config: DecoderConfig) -> LmHead:
    """The LM head, which may be padded: entries from `config.vocab` on are no tokens."""
    tied = config.tied_embeddings
    return LmHead(params["embedding" if tied else "output"], tied)


def loss(
    params: Params,
    batch: Mapping[str, jax.Array],
    scale: jax.Array,
    config: DecoderConfig,
    compute: Compute,
    settings: LossConfig,
) -> tuple[jax.Array, jax.Array]:
    """Of a micro-batch [batch, length]: `scale` × its summed loss, and the summed entropy."""
    x = hidden_states(
        params, batch["tokens"], config, compute,
        segments=batch.get("segments"), positions=batch.get("positions"), as_arranged=True,
    )  # fmt: skip
    targets = reshard(batch["targets"], compute.layouts.tokens)
    targets = sequence_plan(config, compute, targets.shape[1]).arranged(targets)
    head = lm_head(params, config)
    return next_token_loss(x, head, targets, scale, config.vocab, compute, settings)


def _layer(
    x: jax.Array,
    update: jax.Array | None,
    w: Params,
    *,
    config: DecoderConfig,
    compute: Compute,
    rope: tuple[jax.Array, jax.Array],
    segments: jax.Array | None,
    rows: SequencePlan,
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array]]:
    """The residual stream after one layer but for its last addition, that, and keys and values."""
    with jax.named_scope("attention"):
        attended = _attention(x, update, w["attention"], config, compute, rope, segments, rows)
        x, update, keys = attended
    with jax.named_scope("mlp"):
        x, update = mlp(x, update, w["mlp"], config.norm_eps, compute)
    return x, update, keys


def _attention(
    x: jax.Array,
    update: jax.Array | None,
    w: Params,
    config: DecoderConfig,
    compute: Compute,
    rope: tuple[jax.Array, jax.Array],
    segments: jax.Array | None,
    rows: SequencePlan,
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array]]:
    """x with the update, what is to be added to it next, and the keys and values."""
    layouts = compute.layouts
    over, eps = layouts.axes(layouts.heads), config.norm_eps
    # [batch, length, embed], for q, k and v; where it is gathered, once for all
    x, normed = enter(x, update, w["norm"], 1 if over else 3, "input", eps, compute)
    normed = normed if not over else [all_gather(normed[0], over)] * 3

    def project(name: str, h: jax.Array, layout: Any) -> jax.Array:
        weight = all_gather(w[f"w{name}"], layouts.token_axes)
        y = jnp.einsum("ble,ehd->blhd", h, weight, out_sharding=layout)
        if config.qkv_bias:
            y = add_bias(y, w[f"b{name}"].astype(y.dtype))
        if name == "v":
            return checkpoint_name(y, "v")
        if config.qk_norm:  # whose gradient needs what went in
            return rotate(rms_norm(checkpoint_name(y, name), w[f"{name}_norm"], eps), *rope)
        return checkpoint_name(rotate(y, *rope), name)

    each = (layouts.heads, layouts.kv_heads, layouts.kv_heads)
    q, k, v = (
        project(name, h, layout) for name, h, layout in zip("qkv", normed, each, strict=True)
    )
    mixed = attention(
        q, k, v, segments, rows.mask, context=rows.context, kernel=compute.kernel,
    )  # fmt: skip
    out = jnp.einsum(
        "blhd,hde->ble", mixed, all_gather(w["wo"], layouts.token_axes),
        out_sharding=partial_sums(layouts.block, over),
    )  # fmt: skip
    out = reduce_to(out, over, layouts.residual)
    return x, (add_bias(out, w["bo"].astype(out.dtype)) if config.output_bias else out), (k, v)
