"""jax's Mosaic GPU, in which our kernels for NVIDIA GPUs are written, across jax versions.

Imported when a kernel is built, since the import is slow and only GPUs need it.
"""

import inspect
import math
import os
import re
from collections.abc import Callable
from typing import Any

import jax

from meshwright.errors import MeshwrightError
from meshwright.ops.collectives import current_device

HOPPER = frozenset({"H100", "H200", "H800", "H20", "GH200"})
OLDEST = (0, 11)  # jax version; before, a kernel could not add to an array inside jit
SWITCH = "MESHWRIGHT_MOSAIC"  # 0: use kernels of libraries and XLA instead of our own
LOG2_E = math.log2(math.e)  # GPUs have exp2


def unavailable(chips: frozenset[str]) -> str | None:
    """Why kernels for these chips cannot be used, None if they can."""
    platform, kind = current_device()
    if platform not in ("gpu", "cuda") or not _is_one_of(kind, chips):
        return f"it runs on the GPUs {', '.join(sorted(chips))}"
    if not switched_on():
        return f"{SWITCH} is 0"
    if jax.__version_info__ < OLDEST:
        return f"it needs jax {'.'.join(map(str, OLDEST))} or newer"
    return None


def is_hopper(kind: str) -> bool:
    """Whether the device of this kind is a Hopper GPU: `NVIDIA H100 80GB HBM3`."""
    return _is_one_of(kind, HOPPER)


def _is_one_of(kind: str, chips: frozenset[str]) -> bool:
    return not chips.isdisjoint(re.split(r"[\s-]", kind))


def switched_on() -> bool:
    """Whether the environment allows our own kernels."""
    value = os.environ.get(SWITCH, "1")
    if value not in ("0", "1"):
        raise MeshwrightError(
            f"{SWITCH}={value!r} in the environment is neither 0 (do not use Meshwright's GPU "
            "kernels) nor 1 (use them where they are faster, the default)"
        )
    return value == "1"


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
    """The value of a reference, in registers with this layout."""
    function = mosaic().load
    asked = inspect.signature(function).parameters.get("idx")  # required up to jax 0.10
    index = {"idx": ()} if asked is not None and asked.default is asked.empty else {}
    found: jax.Array = function(ref, layout=layout, **index)
    return found
