"""The attention kernels, and the choice of the fastest one that supports a call."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.files import log_once
from meshwright.ops.attention.block import (
    Block,
    Call,
    Gradients,
    Kernel,
    Method,
    Partial,
    with_gradient,
)
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

KERNELS: dict[str, Kernel] = {
    "hopper": hopper,
    "cudnn": cudnn,
    "splash": splash,
    "dense": dense,
    "blockwise": blockwise,
}
# fused kernels per platform; the others are plain JAX, and slower
FUSED = {"tpu": ("splash",), "gpu": ("hopper", "cudnn"), "cuda": ("hopper", "cudnn")}
_OF_ONE_PLATFORM = frozenset(name for names in FUSED.values() for name in names)


def forward(
    block: Block,
    mask: Mask,
    method: Method,
    in_flight: Any = (),
    dtype: Any = jnp.float32,
) -> tuple[Partial, Any]:
    """Output and log-sum-exp by the named kernel, or by the fastest that supports the call (auto).

    `in_flight` is what other devices are sending. A barrier ties it to the kernel's result, so that
    the compiler overlaps the transfer with the kernel; otherwise it may start the transfer after
    the kernel. `dtype` is that of the output: float32 for a partial result that will be merged,
    None for the dtype of the queries.
    """
    mask = mask.within(*block.lengths)
    chosen, lengths = _kernel(block, mask, method, partial=dtype is not None)
    padded = pad_block(block, mask, lengths)
    result = chosen.forward(padded, mask, dtype, **_capped(method))
    result, in_flight = _synchronize(result, in_flight)
    return cut_output(chosen.partial(result), block.lengths), in_flight


def backward(
    block: Block,
    mask: Mask,
    output: Partial,
    dout: jax.Array,
    method: Method,
    in_flight: Any = (),
    dtype: Any = jnp.float32,
) -> tuple[Gradients, Any]:
    """This block's part of the gradients; `output` is over all keys."""
    mask = mask.within(*block.lengths)
    chosen, lengths = _kernel(block, mask, method, partial=dtype is not None)
    padded, queries = pad_block(block, mask, lengths), lengths[0]
    output, dout = pad_output(output, queries), pad_cotangent(dout, queries)
    result = chosen.backward(padded, mask, output, dout, dtype, **_capped(method))
    result, in_flight = _synchronize(result, in_flight)
    return cut_gradients(chosen.gradients(result), block.lengths), in_flight


def _capped(method: Method) -> dict[str, float]:
    """The argument of a kernel, which only those have that accept such calls."""
    return {} if method.softcap is None else {"softcap": method.softcap}


def _synchronize(result: Any, in_flight: Any) -> Any:
    """Make each wait for the other."""
    if not jax.tree.leaves(in_flight):
        return result, in_flight
    return lax.optimization_barrier((result, in_flight))


def one_call(block: Block, mask: Mask, method: Method) -> jax.Array:
    """Attention of one block, without context parallelism."""
    return with_gradient(
        lambda block: forward(block, mask, method, dtype=None)[0],
        lambda block, output, dout: backward(block, mask, output, dout, method, dtype=None)[0],
    )(block)


def _kernel(
    block: Block, mask: Mask, method: Method, partial: bool
) -> tuple[Kernel, tuple[int, int]]:
    """The kernel, and the padded numbers of queries and keys."""
    call = Call(
        current_platform(), str(block.q.dtype), *block.lengths, block.q.shape[-1], mask,
        segmented=block.q_segments is not None, dynamic=block.k_end is not None,
        partial=partial, biased=block.bias is not None, softcapped=method.softcap is not None,
    )  # fmt: skip
    chosen = KERNELS[choose(call, method.kernel)]
    return chosen, chosen.lengths(call)


def _fastest_first(call: Call) -> list[str]:
    names = list(KERNELS)
    on_gpu = call.platform in ("gpu", "cuda")
    # measured: 0.95 of the time of a step with hopper; but it rounds partial results to bfloat16
    if on_gpu and not call.segmented and not call.partial:
        names.remove("cudnn")
        names.insert(0, "cudnn")
    return names


def choose(call: Call, kernel: str = "auto") -> str:
    """The fastest kernel that supports the call; logs once why faster ones here do not."""
    name, why = explain_kernel(call, kernel)
    fused = FUSED.get(call.platform, ())
    slower = f", slower than {' and '.join(fused)}" if fused and name not in fused else ""
    if kernel == "auto" or slower:
        log_once(f"attention kernel: {name}{slower}{f' ({why})' if why else ''}")
    return name


def explain_kernel(call: Call, kernel: str = "auto") -> tuple[str, str]:
    """The kernel for the call, and why the faster ones of its platform do not support it."""
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
                    f"attention={name!r} does not support this: {why}; auto chooses one that does"
                )
            return name, "as requested"
        if kernel == "auto" and why is None:
            return name, "; ".join(passed)
        if name not in _OF_ONE_PLATFORM or name in FUSED.get(call.platform, ()):
            passed.append(f"not {name}: {why}")
    raise AssertionError("the last kernel supports every call")
