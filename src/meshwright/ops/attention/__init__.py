"""Attention: one function, on any mesh, by the fastest kernel that can serve the call.

    out = attention(q, k, v, segments, Mask(window=4096))

q is [batch, length, heads, head_dim], k and v [batch, length, kv_heads, head_dim]: query heads
share key heads in order. A token sees what the mask says, of its own document (`segments`, 0 is
padding). Runs on each device's rows and heads; where the length is split, by a strategy: keys
travel around a ring, are gathered, or heads change places with the length (ulysses).
"""

from meshwright.ops.attention.attention import Segments, attention, split_of
from meshwright.ops.attention.block import Call
from meshwright.ops.attention.blockwise import ROWS
from meshwright.ops.attention.calls import calls_of, padding, slow_kernel
from meshwright.ops.attention.kernels import KERNELS, choose
from meshwright.ops.attention.mask import EVERYTHING, Mask
from meshwright.ops.attention.order import from_zigzag, to_zigzag
from meshwright.ops.attention.ring_steps import ring_steps_of
from meshwright.ops.attention.splash import backward_kernels, padded_length
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
    "EVERYTHING",
    "FLOPS_PER_BYTE",
    "KERNELS",
    "ROWS",
    "STRATEGIES",
    "Call",
    "ContextParallel",
    "Mask",
    "Segments",
    "Split",
    "attention",
    "backward_kernels",
    "calls_of",
    "choose",
    "choose_strategy",
    "explain_strategy",
    "from_zigzag",
    "padded_length",
    "padding",
    "refusal",
    "ring_steps_of",
    "sequence_order",
    "slow_kernel",
    "split_of",
    "to_zigzag",
]
