"""jax's Mosaic GPU, by which kernels for NVIDIA GPUs are written here, in the versions there are.

Imported when a kernel is made: it takes a while, and only GPUs need it.
"""

import inspect
import os
from collections.abc import Callable
from typing import Any

import jax

from meshwright.ops.exchange import device_in_force

HOPPER = frozenset({"H100", "H200", "H800", "H20", "GH200"})
SWITCH = "MESHWRIGHT_MOSAIC"  # 0: no kernels of our own, those of the libraries and of XLA instead


def unavailable(chips: frozenset[str]) -> str | None:
    """Why kernels for these chips cannot be used, None if they can."""
    platform, kind = device_in_force()
    if platform not in ("gpu", "cuda") or not chips & set(kind.split()):
        return f"it runs on the GPUs {', '.join(sorted(chips))}"
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH} is 0"
    return None


def pallas() -> Any:
    from jax.experimental import pallas

    return pallas


def mosaic() -> Any:
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu


def when(condition: jax.Array) -> Callable[[Callable[[], None]], None]:
    """A decorator: run the function if the condition holds."""
    decorator: Callable[[Callable[[], None]], None] = pallas().when(condition)
    return decorator


def load(ref: Any, layout: Any) -> jax.Array:
    """What a reference holds, in registers laid out so."""
    function = mosaic().load
    asked = inspect.signature(function).parameters.get("idx")  # up to jax 0.10 it must be said
    said = {"idx": ()} if asked is not None and asked.default is asked.empty else {}
    found: jax.Array = function(ref, layout=layout, **said)
    return found
