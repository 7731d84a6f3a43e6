"""jax's Mosaic GPU, by which kernels for NVIDIA GPUs are written here, in the versions there are.

Imported when a kernel is made: it takes a while, and only GPUs need it.
"""

import functools
import inspect
import logging
import math
import os
import re
from collections.abc import Callable
from typing import Any

import jax

from meshwright.errors import MeshwrightError
from meshwright.ops.collectives import current_device

HOPPER = frozenset({"H100", "H200", "H800", "H20", "GH200"})
OLDEST = (0, 11)  # jax; before, no kernel could add to an array inside a jit
SWITCH = "MESHWRIGHT_MOSAIC"  # 0: no kernels of our own, those of the libraries and of XLA instead
LOG2_E = math.log2(math.e)  # exp2 is what GPUs have

_log = logging.getLogger("meshwright")


def unavailable(chips: frozenset[str]) -> str | None:
    """Why kernels for these chips cannot be used, None if they can."""
    platform, kind = current_device()
    if platform not in ("gpu", "cuda") or not chips & set(re.split(r"[\s-]", kind)):
        return f"it runs on the GPUs {', '.join(sorted(chips))}"
    if not switched_on():
        return f"{SWITCH} is 0"
    if jax.__version_info__ < OLDEST:
        return f"it needs jax {'.'.join(map(str, OLDEST))} or newer"
    return None


def switched_on() -> bool:
    """Whether kernels of our own are wanted: what the environment says."""
    said = os.environ.get(SWITCH, "1")
    if said not in ("0", "1"):
        raise MeshwrightError(
            f"{SWITCH}={said!r} in the environment is neither 0 (no GPU kernels of our own) nor 1 "
            "(where they are the faster, as without it)"
        )
    return said == "1"


@functools.lru_cache(maxsize=64)
def say(kernel: str, why_not: str | None) -> None:
    """Once, on a GPU: that a kernel of our own is used, or why it is not."""
    if current_device()[0] in ("gpu", "cuda"):
        _log.info(f"{kernel}: " + ("our own kernel" if why_not is None else f"not ours: {why_not}"))


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
