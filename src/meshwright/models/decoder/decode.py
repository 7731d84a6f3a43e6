"""The forward pass over a cache of keys and values: a prompt at once, then a token at a time.

    hidden, keys, values = prefill(params, tokens, lengths, config)
    hidden, new_keys, new_values = step(params, token, positions, keys, values, config)
    logits = next_logits(params, hidden, config)

Training gathers weights over fsdp, since its activations are larger. Here a step has one token a
row, so weights stay where they are stored and activations travel: each device multiplies with its
own part of a matrix and the partial sums are added. A model that fits only when split still works,
and no device reads more than its part. With sp a prompt's length is split over it and goes through
the forward of training, where activations are the larger part; steps use sp as more fsdp.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from meshwright.layouts import Rules, axes_of
from meshwright.models.blocks import Params
from meshwright.models.compute import Compute
from meshwright.models.decoder.config import DecoderConfig
from meshwright.models.decoder.forward import hidden_states_and_keys, lm_head
from meshwright.models.decoder.rules import decoder_rules
from meshwright.ops import (
    add_bias,
    drop_trivial_axes,
    nontrivial_axes,
    partial_sums,
    reduce_to,
    rms_norm,
    rotate,
    split_axes,
)
from meshwright.ops.attention import Mask, attention

Layer = tuple[jax.Array, jax.Array]  # one layer's keys and values
Attend = Callable[[jax.Array, jax.Array, jax.Array, Any], jax.Array]  # q, k, v, the layer's cache


def generation_rules() -> Rules:
    """Weights as in training with sp; attention and cache split `batch` over all but tp.

    Where a weight is used its embed dim is over fsdp and sp, so `rows` of tokens are over dp alone.
    """
    return Rules(
        [
            ("batch", ("dp", "fsdp", "sp")),
            ("rows", "dp"),
            *((dim, "tp") for dim in ("vocab", "heads", "kv_heads", "mlp")),
            ("embed", ("fsdp", "sp")),
            *((dim, None) for dim in ("length", "head_dim", "layers", "norm")),
        ],
        optional=("batch", "rows", "length"),
    )


@dataclasses.dataclass(frozen=True)
class DecodeLayouts:
    residual: P  # [rows, length, embed]
    mlp: P  # [rows, length, mlp]
    used_heads: P  # [rows, length, heads, head_dim], beside a weight
    heads: P  # [batch, length, heads, head_dim], in attention
    cache: P  # [layers, batch, kv_heads, length, head_dim]
    logits: P  # [batch, vocab]

    @property
    def batch(self) -> P:
        return P(self.heads.partitions[0])

    @property
    def rows(self) -> P:
        return P(self.residual.partitions[0])

    @property
    def embed(self) -> tuple[str, ...]:
        """The axes that split embed: partial sums are added over them."""
        return axes_of(self.residual.partitions[2], self.residual)

    @property
    def tensor(self) -> tuple[str, ...]:
        """The axes that split heads, mlp and vocab."""
        return axes_of(self.mlp.partitions[2], self.mlp)


def decode_layouts() -> DecodeLayouts:
    """The layouts of generation on the current mesh."""
    return _layouts(nontrivial_axes())


@functools.lru_cache(maxsize=64)
def _layouts(wide: frozenset[str]) -> DecodeLayouts:
    rules = generation_rules()

    def spec(dims: str) -> P:
        return drop_trivial_axes(P(*rules.layout(dims).axes), wide)

    return DecodeLayouts(
        residual=spec("rows length embed"),
        mlp=spec("rows length mlp"),
        used_heads=spec("rows length heads head_dim"),
        heads=spec("batch length heads head_dim"),
        cache=spec("layers batch kv_heads length head_dim"),
        logits=spec("batch vocab"),
    )


def prefill(
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    config: DecoderConfig,
    kernel: str = "auto",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Prompts [batch, length], each filled up behind its end, through the model.

    Gives the last token's hidden state [batch, embed], and the keys and values of all
    [layers, batch, length, kv_heads, head_dim]. What stands behind a prompt's end is seen by no
    token of it; its keys are to be written over, or never looked at.
    """
    layouts = decode_layouts()
    if "sp" in nontrivial_axes():
        dtype = params["layers"]["attention"]["wq"].dtype
        compute = Compute(decoder_rules(sp=True), dtype, kernel=kernel)
        x, keys, values = hidden_states_and_keys(params, tokens, config, compute)
        x = _at(reshard(x, layouts.residual), reshard(lengths - 1, layouts.rows))
        of_all = P(None, *layouts.heads.partitions)
        return x, reshard(keys, of_all), reshard(values, of_all)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, _: Any) -> jax.Array:
        return attention(q, k, v, mask=Mask(window=config.sliding_window), kernel=kernel)

    x, keys, values = _layers(params, tokens, positions, attend, None, config)
    x = _at(x, reshard(lengths - 1, layouts.rows))
    return _normed(x, params, config), keys, values


def step(
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    config: DecoderConfig,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The next token of each row [batch], at its position [batch], over what is in the cache.

    Keys and values are [layers, batch, kv_heads, length, head_dim], each head's tokens together, as
    a matrix product reads them; a row's hold its positions below this one. Gives the hidden state
    [batch, embed] and the tokens' own keys and values [layers, batch, kv_heads, head_dim], to be
    put into the cache.
    """
    batch = reshard(positions, decode_layouts().batch)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, cached: Layer) -> jax.Array:
        return _attend_to_cache(q, k, v, *cached, batch, config.sliding_window)

    x, new_keys, new_values = _layers(
        params, tokens[:, None], positions[:, None], attend, (keys, values), config
    )
    return _normed(x[:, 0], params, config), new_keys[:, :, 0], new_values[:, :, 0]


def next_logits(params: Params, hidden: jax.Array, config: DecoderConfig) -> jax.Array:
    """Hidden states [batch, embed] to logits [batch, vocab] in float32, each row on one device."""
    layouts = decode_layouts()
    batch, vocab = layouts.logits.partitions
    head = lm_head(params, config)
    partial = jnp.einsum(
        "be,ve->bv" if head.tied else "be,ev->bv",
        hidden, head.weight,
        preferred_element_type=jnp.float32,
        out_sharding=partial_sums(P(*layouts.rows, vocab), layouts.embed),
    )  # fmt: skip
    whole = reshard(reduce_to(partial, layouts.embed, layouts.logits), P(batch, None))
    return whole[:, : config.vocab]  # without padding


def _layers(
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    attend: Attend,
    cached: Layer | None,
    config: DecoderConfig,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens [batch, length] through all layers, each with its own part of the cache."""
    layouts = decode_layouts()
    (rows,), (batch,) = layouts.rows, layouts.batch
    x = _embedded(params["embedding"], reshard(tokens, P(rows, None)), layouts)
    rope = config.rope.tables(reshard(positions, P(batch, None)), config.head_dim)

    def layer(x: jax.Array, part: Any) -> tuple[jax.Array, Layer]:
        w, cached = part
        with jax.named_scope("attention"):
            out, new = _attention(x, w["attention"], rope, attend, cached, config, layouts)
        x = x + out
        with jax.named_scope("mlp"):
            return x + _mlp(x, w["mlp"], config, layouts), new

    x, (keys, values) = lax.scan(layer, x, (_prepared(params["layers"], layouts), cached))
    return x, keys, values


def _prepared(layers: Params, layouts: DecodeLayouts) -> Params:
    """The stacked weights, with vectors over embed split as the residual stream is."""
    along = P(None, layouts.residual.partitions[2])
    return {
        block: {
            name: reshard(w, along) if name in ("norm", "bo") else w for name, w in arrays.items()
        }
        for block, arrays in layers.items()
    }


def _normed(x: jax.Array, params: Params, config: DecoderConfig) -> jax.Array:
    along = P(decode_layouts().residual.partitions[2])
    return rms_norm(x, reshard(params["norm"], along), config.norm_eps)


def _embedded(table: jax.Array, tokens: jax.Array, layouts: DecodeLayouts) -> jax.Array:
    """Rows of the table, split over embed as it is; vocabulary split over tp."""
    over = layouts.tensor

    def local(table: jax.Array, tokens: jax.Array) -> jax.Array:
        if not over:
            return table[tokens]
        tokens = tokens - lax.axis_index(over) * table.shape[0]
        here = (tokens >= 0) & (tokens < table.shape[0])
        found = table[jnp.where(here, tokens, 0)]
        return lax.psum(jnp.where(here[..., None], found, jnp.zeros((), table.dtype)), over)

    specs = (P(over or None, layouts.embed or None), P(*layouts.rows, None))
    return jax.shard_map(local, in_specs=specs, out_specs=layouts.residual)(
        reshard(table, specs[0]), tokens
    )


def _attention(
    x: jax.Array,
    w: Params,
    rope: tuple[jax.Array, jax.Array],
    attend: Attend,
    cached: Any,
    config: DecoderConfig,
    layouts: DecodeLayouts,
) -> tuple[jax.Array, Layer]:
    h = rms_norm(x, w["norm"], config.norm_eps)

    def project(name: str) -> jax.Array:
        partial = jnp.einsum(
            "ble,ehd->blhd", h, w[f"w{name}"],
            out_sharding=partial_sums(layouts.used_heads, layouts.embed),
        )  # fmt: skip
        y = reduce_to(partial, layouts.embed, layouts.heads)  # each device now has its own rows
        if config.qkv_bias:
            y = add_bias(y, w[f"b{name}"].astype(y.dtype))
        if name == "v":
            return y
        if config.qk_norm:
            y = rms_norm(y, w[f"{name}_norm"], config.norm_eps)
        return rotate(y, *rope)

    q, k, v = (project(name) for name in "qkv")
    mixed = reshard(attend(q, k, v, cached), layouts.used_heads)
    partial = jnp.einsum(
        "blhd,hde->ble", mixed, w["wo"],
        out_sharding=partial_sums(layouts.residual, layouts.tensor),
    )  # fmt: skip
    out = reduce_to(partial, layouts.tensor, layouts.residual)
    return (add_bias(out, w["bo"].astype(out.dtype)) if config.output_bias else out), (k, v)


def _mlp(x: jax.Array, w: Params, config: DecoderConfig, layouts: DecodeLayouts) -> jax.Array:
    h = rms_norm(x, w["norm"], config.norm_eps)

    def project(name: str) -> jax.Array:
        partial = jnp.einsum(
            "ble,em->blm", h, w[name], out_sharding=partial_sums(layouts.mlp, layouts.embed)
        )
        return reduce_to(partial, layouts.embed, layouts.mlp)

    partial = jnp.einsum(
        "blm,me->ble", jax.nn.silu(project("gate")) * project("up"), w["down"],
        out_sharding=partial_sums(layouts.residual, layouts.tensor),
    )  # fmt: skip
    return reduce_to(partial, layouts.tensor, layouts.residual)


def _attend_to_cache(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    window: int | None,
) -> jax.Array:
    """One query a row over its cache and itself, softmax in float32; query heads share key heads.

    The token's own key is not in the cache yet: so the cache is only read in the loop over layers,
    and written once after it.
    """
    layouts = decode_layouts()

    def local(
        q: jax.Array, k: jax.Array, v: jax.Array, keys: jax.Array, values: jax.Array, at: jax.Array
    ) -> jax.Array:
        rows, _, heads, head_dim = q.shape
        kv_heads, length = keys.shape[1:3]
        grouped = q.reshape(rows, kv_heads, heads // kv_heads, head_dim)
        scores = jnp.einsum("bkgd,bksd->bkgs", grouped, keys, preferred_element_type=jnp.float32)
        own = jnp.einsum("bkgd,bkd->bkg", grouped, k[:, 0], preferred_element_type=jnp.float32)
        behind = at[:, None] - jnp.arange(length)[None]  # [rows, length]
        seen = behind > 0
        if window is not None:
            seen &= behind < window
        scores = jnp.where(seen[:, None, None], scores, jnp.finfo(jnp.float32).min)
        scores = jnp.concatenate([scores, own[..., None]], axis=-1) * head_dim**-0.5
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        mixed = jnp.einsum("bkgs,bksd->bkgd", weights[..., :length], values)
        mixed = mixed + weights[..., length:] * v[:, 0, :, None]
        return mixed.reshape(q.shape)

    cache = P(*layouts.cache.partitions[1:])
    specs = (layouts.heads, layouts.heads, layouts.heads, cache, cache, layouts.batch)
    return jax.shard_map(local, in_specs=specs, out_specs=layouts.heads)(
        q, k, v, keys, values, positions
    )


def _at(x: jax.Array, index: jax.Array) -> jax.Array:
    """[rows, length, embed] at one place of each row: [rows, embed]."""
    rows, _, embed = decode_layouts().residual.partitions
    return jax.shard_map(
        lambda x, index: x[jnp.arange(x.shape[0]), index],
        in_specs=(P(rows, None, embed), P(rows)),
        out_specs=P(rows, embed),
    )(x, index)


def batch_multiple(mesh_shape: Any) -> int:
    """A batch must be a multiple of this on a mesh: the devices its rows are split over."""
    size = 1
    for axis in split_axes(P(*generation_rules().layout("batch").axes)):
        size *= mesh_shape.get(axis, 1)
    return size
