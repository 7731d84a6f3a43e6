"""The kernel calls of an attention, known before anything is traced.

>>> whole = Split(ways=1, length=1000, heads=8, kv_heads=8, head_dim=128, mask=Mask())
>>> calls = calls_of(whole, "none", "tpu", "bfloat16", segmented=True)
>>> slow_kernel(calls, "auto", "TPU v5 lite"), padding(calls, "auto", "TPU v5 lite")
(None, 1.048576)
>>> slow_kernel(calls, "blockwise", "TPU v5 lite")
('blockwise', 'as requested')
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from meshwright.ops.attention.block import Call
from meshwright.ops.attention.kernels import FUSED, KERNELS, explain_kernel
from meshwright.ops.attention.mask import EVERYTHING, Mask
from meshwright.ops.attention.ring_steps import ring_steps_of
from meshwright.ops.attention.strategy import Split, sequence_order


def calls_of(
    split: Split, strategy: str, platform: str, dtype: str, *, segmented: bool
) -> tuple[Call, ...]:
    """The distinct kernel calls of a forward pass on one device."""

    def call(queries: int, keys: int, mask: Mask, dynamic: bool = False) -> Call:
        mask = mask.within(queries, keys)
        return Call(
            platform, dtype, queries, keys, split.head_dim, mask, segmented, dynamic, not whole,
            split.biased, split.softcapped,
        )  # fmt: skip

    whole = split.ways == 1 or strategy == "ulysses"
    if whole:
        return (call(split.length, split.keys or split.length, split.mask),)
    part = split.part
    steps = ring_steps_of(split.mask, sequence_order(split, strategy), split.ways, part)
    dynamic = steps.block is not None
    found = [call(part, part, steps.first, dynamic)]
    if steps.full and steps.order == "zigzag":
        found += [call(part, part // 2, EVERYTHING), call(part // 2, part, EVERYTHING)]
    elif steps.full:
        found.append(call(part, part, EVERYTHING, dynamic))
    found += [call(part, part, mask) for mask in steps.masked]
    return tuple(dict.fromkeys(found))


def slow_kernel(calls: Sequence[Call], kernel: str, device_kind: str) -> tuple[str, str] | None:
    """The plain-JAX kernel that computes one of these calls, and why; None if all are fused.

    None on CPUs, which have no fused kernel.
    """
    for call in calls:
        able = FUSED.get(call.platform, ())
        with _on(call.platform, device_kind):
            name, _ = explain_kernel(call, kernel)
            if not able or name in able:
                continue
            if kernel != "auto":
                return name, "as requested"
            return name, "; ".join(f"not {each}: {KERNELS[each].refuses(call)}" for each in able)
    return None


def padding(calls: Sequence[Call], kernel: str, device_kind: str) -> float:
    """Query-key pairs computed, divided by those needed: the cost of padding."""
    needed = computed = 0
    for call in calls:
        with _on(call.platform, device_kind):
            queries, keys = KERNELS[explain_kernel(call, kernel)[0]].lengths(call)
        needed += call.queries * call.keys
        computed += queries * keys
    return computed / needed


def _on(platform: str, device_kind: str) -> AbstractContextManager[Any]:
    """A current mesh of one abstract device, which kernels are asked about."""
    device = AbstractDevice(device_kind=device_kind, num_cores=None, platform=platform)
    mesh = AbstractMesh((1,), ("device",), (AxisType.Auto,), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)
