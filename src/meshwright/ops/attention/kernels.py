"""The kernels, and the choice among them: the fastest that can serve."""

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.ops.attention.block import Block, Call, Gradients, Kernel, Partial, with_gradient
from meshwright.ops.attention.blockwise import blockwise, dense
from meshwright.ops.attention.cudnn import cudnn
from meshwright.ops.attention.hopper import hopper
from meshwright.ops.attention.mask import Mask
from meshwright.ops.attention.padding import (
    cut_gradients,
    cut_output,
    pad_block,
    pad_cotangent,
    pad_output,
)
from meshwright.ops.attention.splash import splash
from meshwright.ops.collectives import current_platform

_log = logging.getLogger("meshwright")

KERNELS: dict[str, Kernel] = {
    "hopper": hopper,
    "cudnn": cudnn,
    "splash": splash,
    "dense": dense,
    "blockwise": blockwise,
}
# the fused kernels of a platform; the others are plain JAX, and slower there
FUSED = {"tpu": ("splash",), "gpu": ("hopper", "cudnn"), "cuda": ("hopper", "cudnn")}


def forward(
    block: Block,
    mask: Mask,
    kernel: str,
    under_way: Any = (),
    dtype: Any = jnp.float32,
) -> tuple[Partial, Any]:
    """Output and log-sum by the named kernel, or by the fastest that can (auto).

    `under_way` is what other devices are sending: it is given back with what the kernel found, and
    neither is used before both are there. So compilers begin to receive before the kernel and end
    after it; left alone, they wait with what does not look long until the kernel is done. `dtype`
    is that of the output: float32 where it is one part of a sum, None for that of the queries.
    """
    mask = mask.within(*block.lengths)
    chosen, lengths = _kernel(block, mask, kernel, partial=dtype is not None)
    padded = pad_block(block, mask, lengths)
    found, under_way = _meet(chosen.forward(padded, mask, dtype), under_way)
    return cut_output(chosen.partial(found), block.lengths), under_way


def backward(
    block: Block,
    mask: Mask,
    whole: Partial,
    given: jax.Array,
    kernel: str,
    under_way: Any = (),
    dtype: Any = jnp.float32,
) -> tuple[Gradients, Any]:
    """This block's part of the gradients; `whole` is the output over all keys."""
    mask = mask.within(*block.lengths)
    chosen, lengths = _kernel(block, mask, kernel, partial=dtype is not None)
    padded, queries = pad_block(block, mask, lengths), lengths[0]
    whole, given = pad_output(whole, queries), pad_cotangent(given, queries)
    found = chosen.backward(padded, mask, whole, given, dtype)
    found, under_way = _meet(found, under_way)
    return cut_gradients(chosen.gradients(found), block.lengths), under_way


def _meet(found: Any, under_way: Any) -> Any:
    """Neither is used before both are there."""
    if not jax.tree.leaves(under_way):
        return found, under_way
    return lax.optimization_barrier((found, under_way))


def one_call(block: Block, mask: Mask, kernel: str) -> jax.Array:
    """The output of queries and keys that are all here."""
    return with_gradient(
        lambda block: forward(block, mask, kernel, dtype=None)[0],
        lambda block, whole, given: backward(block, mask, whole, given, kernel, dtype=None)[0],
    )(block)


def _kernel(block: Block, mask: Mask, kernel: str, partial: bool) -> tuple[Kernel, tuple[int, int]]:
    """The kernel, and the numbers of queries and keys it computes with."""
    call = Call(
        current_platform(), str(block.q.dtype), *block.lengths, block.q.shape[-1], mask,
        segmented=block.q_segments is not None, dynamic=block.k_end is not None,
        partial=partial, biased=block.bias is not None,
    )  # fmt: skip
    chosen = KERNELS[choose(call, kernel)]
    return chosen, chosen.lengths(call)


@functools.lru_cache(maxsize=256)
def _say(text: str) -> None:
    """Once, however many calls it is true of."""
    _log.info(text)


def _fastest_first(call: Call) -> list[str]:
    names = list(KERNELS)
    on_gpu = call.platform in ("gpu", "cuda")
    # measured: 0.9 of hopper's time; but it rounds what it gives to bfloat16, also parts of a sum
    if on_gpu and call.head_dim == 128 and not call.segmented and not call.partial:
        names.remove("cudnn")
        names.insert(0, "cudnn")
    return names


def choose(call: Call, kernel: str = "auto") -> str:
    """The first kernel that can serve the call; what was passed over and why is logged once."""
    name, why = explain_kernel(call, kernel)
    fused = FUSED.get(call.platform, ())
    slower = f", slower than {' and '.join(fused)}" if fused and name not in fused else ""
    if kernel == "auto" or slower:
        _say(f"attention kernel: {name}{slower}{f' ({why})' if why else ''}")
    return name


def explain_kernel(call: Call, kernel: str = "auto") -> tuple[str, str]:
    """The kernel that serves the call, and why none before it does."""
    if kernel != "auto" and kernel not in KERNELS:
        raise MeshwrightError(
            f"attention={kernel!r} is not a kernel{did_you_mean(kernel, ['auto', *KERNELS])}"
        )
    passed: list[str] = []
    for name in _fastest_first(call):
        why = KERNELS[name].refuses(call)
        if kernel == name:
            if why is not None and name != "dense":
                raise MeshwrightError(
                    f"attention={name!r} cannot serve this: {why}; auto takes the fastest that can"
                )
            return name, "as asked"
        if kernel == "auto" and why is None:
            return name, "; ".join(passed)
        passed.append(f"not {name}: {why}")
    raise AssertionError("the last kernel serves every call")
