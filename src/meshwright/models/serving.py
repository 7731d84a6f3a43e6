"""The weights of a stack of layers as an engine's steps read them: a list, with matmuls merged.

A scan over stacked weights copies each layer before its matmuls, which triples the bytes that a
decode step reads. So layers are unstacked once, when a model is loaded. Matrices that take the same
input become one: fewer, larger matmuls. They may be quantized (ops/quantized.py).
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from meshwright.models.blocks import Params
from meshwright.ops import current_platform, quantize, spec_of

Merge = Callable[..., jax.Array]
Merged = Mapping[str, tuple[tuple[str, ...], Merge]]
"""A name to the weights that it is made of, and how."""


def unstacked(
    stacked: Params,
    specs: Params,
    merged: Mapping[str, Merged],
    dtype: str | None,
    release: bool,
) -> list[Params]:
    """The weights of each layer; with `release`, arrays that were copied are deleted.

    `specs` describe the stacked arrays. `merged` says by block which weights become one. `dtype` is
    that of quantized weights: int8 or fp8.
    """
    count = jax.tree.leaves(stacked)[0].shape[0]
    layers: list[Params] = [{block: {} for block in stacked} for _ in range(count)]

    def move(block: str, name: str, parts: tuple[str, ...], merge: Merge) -> None:
        arrays = tuple(stacked[block][part] for part in parts)
        spec = specs[block][parts[0]]
        in_bfloat16 = any(array.dtype == jnp.bfloat16 for array in stacked[block].values())
        if spec.kind == "router" and in_bfloat16 and all(map(_is_bfloat16, arrays)):
            merge = _in_bfloat16
        how = dtype if spec.kind in _quantized_kinds() else None
        groups = 1 if spec.kind == "expert" else 0
        for index, layer in enumerate(layers):
            index = jnp.int32(index)
            layer[block][name] = _layer(index, arrays, merge, spec.inputs, how, groups)
            if current_platform() == "cpu":  # programs with collectives, one after another
                jax.block_until_ready(layer[block][name])
        if release:
            jax.block_until_ready([layer[block][name] for layer in layers])
            for array in arrays:
                array.delete()

    for block, arrays in stacked.items():
        # experts stay apart: their matmuls are large, and both copies would be there at once
        apart = any(spec.kind == "expert" for spec in specs[block].values())
        for name, (parts, merge) in _made_of(
            arrays, {} if apart else merged.get(block, {})
        ).items():
            move(block, name, parts, merge)
    return layers


def _made_of(arrays: Params, merged: Merged) -> Merged:
    """The weights of a block as steps read them, merged or as they are."""
    into = {  # a model may lack some: an mlp that is not gated has no gate
        name: made for name, made in merged.items() if {*made[0]} <= {*arrays}
    }
    gone = {part for parts, _ in into.values() for part in parts}
    return {**into, **{name: ((name,), _same) for name in arrays if name not in gone}}


def unstacked_factors(stacked: Params, merged: Mapping[str, Merged]) -> list[Params]:
    """The factors of an adapter of each layer, beside the weights of `unstacked`.

    Weights that are merged have one pair: the a of all side by side, each b in its own columns of
    the outputs, with zeros in the others. That is more memory, and two matmuls instead of six.
    """

    def joined(pairs: list[Params], merge: Merge) -> Params:
        zeros = [jnp.zeros_like(pair["b"]) for pair in pairs]
        own = [
            merge(*(pair["b"] if i == j else zeros[j] for j, pair in enumerate(pairs)))
            for i in range(len(pairs))
        ]
        return {
            "a": jnp.concatenate([pair["a"] for pair in pairs], axis=-1),
            "b": jnp.concatenate(own, axis=0),
        }

    def layer(index: int) -> Params:
        of_layer = jax.tree.map(lambda array: array[index], stacked)
        return {
            block: {
                name: joined([arrays[part] for part in parts], merge)
                for name, (parts, merge) in _made_of(arrays, merged.get(block, {})).items()
            }
            for block, arrays in of_layer.items()
        }

    return [layer(index) for index in range(jax.tree.leaves(stacked)[0].shape[0])]


def quantized_head(params: Params, dtype: str | None, release: bool) -> Params:
    """The LM head under its name if it is quantized: it must be there, not tied."""
    if dtype is None or "output" not in params:
        return {}
    head = _quantize(params["output"], 1, dtype)
    if release:
        jax.block_until_ready(head)
        params["output"].delete()
    return {"output": head}


def merge_qkv(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """[embed, kv_heads, group + 2, head_dim]: for each key head its queries, the key, the value.

    So tp splits it by key heads.
    """
    embed, kv_heads, head_dim = k.shape
    over = spec_of(k)
    grouped = jnp.reshape(
        q, (embed, kv_heads, -1, head_dim), out_sharding=P(over[0], over[1], None, None)
    )
    return jnp.concatenate([grouped, k[:, :, None], v[:, :, None]], axis=2)


def merge_kv(k: jax.Array, v: jax.Array) -> jax.Array:
    """[embed, kv_heads, 2, head_dim]."""
    return jnp.stack([k, v], axis=2)


def merge_gate_up(gate: jax.Array, up: jax.Array) -> jax.Array:
    """[embed, 2, mlp]."""
    return jnp.stack([gate, up], axis=1)


_quantize = jax.jit(quantize, static_argnums=(1, 2))


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5))
def _layer(
    index: jax.Array,
    arrays: tuple[jax.Array, ...],
    merge: Merge,
    inputs: int,
    dtype: str | None,
    groups: int,
) -> Any:
    of_layer = (lax.dynamic_index_in_dim(array, index, 0, keepdims=False) for array in arrays)
    merged = merge(*of_layer)
    return merged if dtype is None else quantize(merged, inputs, dtype, groups)


def _same(array: jax.Array) -> jax.Array:
    return array


def _quantized_kinds() -> tuple[str, ...]:
    """On TPUs no kernel takes experts of 8 bits: each step would make a copy in 16 bits of all."""
    return ("matrix",) if current_platform() == "tpu" else ("matrix", "expert")


def _is_bfloat16(array: jax.Array) -> bool:
    """Whether bfloat16 has all of these numbers: as it has of most files, and of no numbers."""
    if isinstance(array, jax.core.Tracer):
        return True
    rounded = lax.reduce_precision(array, exponent_bits=8, mantissa_bits=7)
    return bool(jnp.all(rounded == array))


def _in_bfloat16(array: jax.Array) -> jax.Array:
    """Of a router: a third of the matmul, and the same results (ops/float32_matmul.py)."""
    return array.astype(jnp.bfloat16)
