"""Attention: one function on any mesh, with the fastest kernel that supports the call.

    out = attention(q, k, v, segments, Mask(window=4096))

q is [batch, length, heads, head_dim], k and v are [batch, length, kv_heads, head_dim]; consecutive
query heads share a key head. The mask applies within each packed document (`segments` are segment
ids, 0 is padding). Each device computes its own sequences and heads. Where devices share a sequence
(context parallelism), the methods are a ring, an all-gather of keys, or Ulysses (all-to-all).
"""

from typing import TYPE_CHECKING

from meshwright.lazy import import_when_used

if TYPE_CHECKING:
    from meshwright.ops.attention.attention import Segments, attention
    from meshwright.ops.attention.block import Call
    from meshwright.ops.attention.blockwise import BLOCK_QUERIES
    from meshwright.ops.attention.calls import calls_of, padding, slow_kernel
    from meshwright.ops.attention.kernels import KERNELS, choose, explain_kernel
    from meshwright.ops.attention.mask import EVERYTHING, Mask
    from meshwright.ops.attention.order import from_zigzag, to_zigzag
    from meshwright.ops.attention.paged import (
        CACHE_DTYPES,
        attend_to_pages,
        fill_pages,
        paged_attention,
    )
    from meshwright.ops.attention.paged_kernels import (
        PagedCall,
        choose_paged,
        most_pages,
        not_for_triton,
        pool_shape,
    )
    from meshwright.ops.attention.paged_tokens import (
        PagedBias,
        PagedKeys,
        PagedTokens,
        page_size_of,
    )
    from meshwright.ops.attention.paged_triton import (
        Heads,
        decode_parts,
        paged_decode,
        product_of_parts,
        write_heads,
    )
    from meshwright.ops.attention.ring_steps import ring_steps_of
    from meshwright.ops.attention.splash import backward_kernels, query_gradients
    from meshwright.ops.attention.strategy import (
        FLOPS_PER_BYTE,
        STRATEGIES,
        ContextParallel,
        Split,
        choose_strategy,
        explain_strategy,
        refusal,
        sequence_order,
    )

__all__ = [
    "BLOCK_QUERIES", "CACHE_DTYPES", "EVERYTHING", "FLOPS_PER_BYTE", "KERNELS", "STRATEGIES",
    "Call", "ContextParallel", "Heads", "Mask", "PagedBias", "PagedCall", "PagedKeys",
    "PagedTokens", "Segments", "Split", "attend_to_pages", "attention", "backward_kernels",
    "calls_of", "choose", "choose_paged", "choose_strategy", "decode_parts", "explain_kernel",
    "explain_strategy", "fill_pages", "from_zigzag", "most_pages", "not_for_triton", "padding",
    "page_size_of", "paged_attention", "paged_decode", "pool_shape", "product_of_parts",
    "query_gradients", "refusal", "ring_steps_of", "sequence_order", "slow_kernel", "to_zigzag",
    "write_heads",
]  # fmt: skip

import_when_used(__name__)
