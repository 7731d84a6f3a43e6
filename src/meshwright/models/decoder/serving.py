"""The weights of a decoder as an engine's steps read them: a list of layers, matmuls merged.

A scan over stacked weights copies each layer before its matmuls, which triples the bytes that a
decode step reads. So layers are unstacked once, when a model is loaded. The projections to queries,
keys and values become one matrix, and so do gate and up: fewer, larger matmuls. Matrices may be
quantized (ops/quantized.py), but for the embedding and a tied LM head.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from meshwright.models.blocks import Params
from meshwright.models.decoder.config import DecoderConfig
from meshwright.ops import quantize, spec_of

Merge = Callable[..., jax.Array]
_INPUTS = {"wqkv": 1, "wo": 2, "gate_up": 1, "down": 1}  # dims that a matmul sums over


def serving_weights(
    params: Params, config: DecoderConfig, dtype: str | None = None, release: bool = False
) -> Params:
    """Parameters whose `layers` are a list; with `release`, arrays that were copied are deleted.

    `dtype` is that of quantized weights: int8 or fp8.

    `wqkv` is [embed, kv_heads, group + 2, head_dim]: for each key head the queries that share it,
    the key and the value. So tp splits it by key heads. `gate_up` is [embed, 2, mlp].
    """
    attention, mlp = (dict(params["layers"][block]) for block in ("attention", "mlp"))
    layers: list[Params] = [{"attention": {}, "mlp": {}} for _ in range(config.layers)]

    def move(block: str, name: str, arrays: tuple[jax.Array, ...], merge: Merge) -> None:
        inputs = _INPUTS.get(name, 0) if dtype else 0
        for index, layer in enumerate(layers):
            layer[block][name] = _layer(jnp.int32(index), arrays, merge, inputs, dtype)
        if release:
            jax.block_until_ready([layer[block][name] for layer in layers])
            for array in arrays:
                array.delete()

    move("attention", "wqkv", tuple(attention.pop(f"w{name}") for name in "qkv"), _merge_qkv)
    move("mlp", "gate_up", (mlp.pop("gate"), mlp.pop("up")), _merge_gate_up)
    for block, arrays in (("attention", attention), ("mlp", mlp)):
        for name, array in arrays.items():
            move(block, name, (array,), _same)
    head = {}
    if dtype and "output" in params:
        head["output"] = _quantize(params["output"], 1, dtype)
        if release:
            jax.block_until_ready(head["output"])
            params["output"].delete()
    return {**params, "layers": layers, **head}


_quantize = jax.jit(quantize, static_argnums=(1, 2))


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _layer(
    index: jax.Array, arrays: tuple[jax.Array, ...], merge: Merge, inputs: int, dtype: str | None
) -> Any:
    of_layer = (lax.dynamic_index_in_dim(array, index, 0, keepdims=False) for array in arrays)
    merged = merge(*of_layer)
    return merged if dtype is None or not inputs else quantize(merged, inputs, dtype)


def _same(array: jax.Array) -> jax.Array:
    return array


def _merge_qkv(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    embed, kv_heads, head_dim = k.shape
    over = spec_of(k)
    grouped = jnp.reshape(
        q, (embed, kv_heads, -1, head_dim), out_sharding=P(over[0], over[1], None, None)
    )
    return jnp.concatenate([grouped, k[:, :, None], v[:, :, None]], axis=2)


def _merge_gate_up(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jnp.stack([gate, up], axis=1)
