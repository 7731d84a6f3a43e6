"""What FSDP2 all-gathers and scatters as one array: the parameters of a block, and of the root."""

import functools
from typing import NamedTuple

from meshwright.models import DecoderConfig


class Group(NamedTuple):
    """Parameters on a tensor rank; dim 0 is cut as torch.chunk does, so shards may be padded."""

    shard: int  # numbers of the largest shard
    whole: int  # numbers of all shards, padded


@functools.lru_cache(maxsize=4096)
def block_group(model: DecoderConfig, tp: int, shards: int) -> Group:
    """The parameters of a decoder layer."""
    embed, mlp = model.embed, model.mlp // tp
    heads = model.heads * model.head_dim // tp
    kv_heads = model.kv_heads * model.head_dim // tp
    arrays = [
        (heads, embed), (kv_heads, embed), (kv_heads, embed), (embed, heads),
        (mlp, embed), (mlp, embed), (embed, mlp), (embed, 1), (embed, 1),
    ]  # fmt: skip
    if model.qkv_bias:
        arrays += [(heads, 1), (kv_heads, 1), (kv_heads, 1)]
    if model.output_bias:
        arrays.append((embed, 1))
    if model.qk_norm:
        arrays += 2 * [(model.head_dim, 1)]
    return _group(arrays, shards)


@functools.lru_cache(maxsize=4096)
def root_group(model: DecoderConfig, tp: int, shards: int) -> Group:
    """Embedding, last norm and LM head: all-gathered once, kept until the backward pass ends."""
    tables = 1 if model.tied_embeddings else 2
    return _group([(model.embed, 1), *tables * [(-(-model.vocab // tp), model.embed)]], shards)


def _group(arrays: list[tuple[int, int]], shards: int) -> Group:
    shard = sum(-(-size // shards) * numbers for size, numbers in arrays)
    return Group(shard, shards * shard)
