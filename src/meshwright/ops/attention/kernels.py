"""The kernels, and the choice among them: the fastest that can serve."""

import functools
import logging
from typing import Any

import jax
from jax import lax

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.ops.attention.block import Block, Call, Kernel, Partial, Slopes, with_gradient
from meshwright.ops.attention.blockwise import blockwise, dense
from meshwright.ops.attention.cudnn import cudnn
from meshwright.ops.attention.hopper import hopper
from meshwright.ops.attention.mask import Mask
from meshwright.ops.attention.splash import splash
from meshwright.ops.exchange import platform_in_force

_log = logging.getLogger("meshwright")

KERNELS: dict[str, Kernel] = {
    "hopper": hopper,
    "cudnn": cudnn,
    "splash": splash,
    "dense": dense,
    "blockwise": blockwise,
}


def forward(block: Block, mask: Mask, kernel: str, under_way: Any = ()) -> tuple[Partial, Any]:
    """Output and log-sum by the named kernel, or by the fastest that can (auto).

    `under_way` is what other devices are sending: it is given back with what the kernel found, and
    neither is used before both are there. So compilers begin to receive before the kernel and end
    after it; left alone, they wait with what does not look long until the kernel is done.
    """
    mask = mask.within(block.q.shape[1], block.k.shape[1])
    chosen = _kernel(block, mask, kernel)
    found, under_way = _meet(chosen.forward(block, mask), under_way)
    return chosen.partial(found), under_way


def backward(
    block: Block, mask: Mask, whole: Partial, given: jax.Array, kernel: str, under_way: Any = ()
) -> tuple[Slopes, Any]:
    """This block's part of the gradients; `whole` is the output over all keys."""
    mask = mask.within(block.q.shape[1], block.k.shape[1])
    chosen = _kernel(block, mask, kernel)
    found = chosen.backward(block, mask, whole, given)
    found, under_way = _meet(found, under_way)
    return chosen.slopes(found), under_way


def _meet(found: Any, under_way: Any) -> Any:
    """Neither is used before both are there."""
    if not jax.tree.leaves(under_way):
        return found, under_way
    return lax.optimization_barrier((found, under_way))


def one_call(block: Block, mask: Mask, kernel: str) -> jax.Array:
    """The output of queries and keys that are all here."""
    return with_gradient(
        lambda block: forward(block, mask, kernel)[0],
        lambda block, whole, given: backward(block, mask, whole, given, kernel)[0],
    )(block)


def _kernel(block: Block, mask: Mask, kernel: str) -> Kernel:
    queries, head_dim = block.q.shape[1], block.q.shape[-1]
    call = Call(
        platform_in_force(), str(block.q.dtype), queries, block.k.shape[1], head_dim, mask,
        block.q_segments is not None,
    )  # fmt: skip
    return KERNELS[choose(call, kernel)]


@functools.lru_cache(maxsize=256)
def _say(text: str) -> None:
    """Once, however many calls it is true of."""
    _log.info(text)


def _fastest_first(call: Call) -> list[str]:
    names = list(KERNELS)
    on_gpu = call.platform in ("gpu", "cuda")
    if on_gpu and call.head_dim == 128 and not call.segmented:  # measured: 0.9 of hopper's time
        names.remove("cudnn")
        names.insert(0, "cudnn")
    return names


def choose(call: Call, kernel: str = "auto") -> str:
    """The first kernel that can serve the call; what was passed over and why is logged once."""
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
            return name
        if kernel == "auto" and why is None:
            because = f" ({'; '.join(passed)})" if passed else ""
            _say(f"attention kernel: {name}{because}")
            return name
        passed.append(f"not {name}: {why}")
    raise AssertionError("the last kernel serves every call")
