"""Compare a checkpoint with the requested arrays, by names, shapes and dtypes.

checkpoint step-00000100 holds a different model; 2 arrays differ:
  params/embed: (256, 64) float32 saved, (512, 64) float32 requested
  params/head: (64, 256) float32 saved, not requested
"""

from typing import Any

import jax
import jax.numpy as jnp

from meshwright.checkpoint.record import SavedArray
from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.layouts import is_abstract
from meshwright.present import count

_SHOWN = 6


def check_targets(targets: dict[str, Any]) -> None:
    """Check that every target has a shape, a dtype and a sharding."""
    if not targets:
        raise MeshwrightError("targets are empty; give a tree of jax.ShapeDtypeStruct")
    for name, target in targets.items():
        if not is_abstract(target):
            raise MeshwrightError(
                f"target {name!r} is a {type(target).__name__}; give "
                "jax.ShapeDtypeStruct(shape, dtype, sharding=…)"
            )
        if not isinstance(getattr(target, "sharding", None), jax.sharding.Sharding):
            raise MeshwrightError(
                f"target {name!r} has no sharding; give one: "
                "jax.ShapeDtypeStruct(shape, dtype, sharding=mw.sharding(…))"
            )
        try:
            target.sharding.shard_shape(tuple(target.shape))
        except ValueError as error:
            raise MeshwrightError(
                f"target {name!r} of shape {tuple(target.shape)} does not fit its sharding: {error}"
            ) from None


def check_same_arrays(
    where: str, saved: dict[str, SavedArray], targets: dict[str, Any], cast: bool
) -> None:
    """Raise an error that lists the first differences; parts that are not requested may differ."""
    parts = {_part(name) for name in targets}
    known = {_part(name) for name in saved}
    for part in sorted(parts - known):
        raise MeshwrightError(f"{where} has no part {part!r}{did_you_mean(part, sorted(known))}")
    lines = []
    same_shapes = True
    for name in [*targets, *(n for n in saved if _part(n) in parts and n not in targets)]:
        here, there = saved.get(name), targets.get(name)
        if here is not None and there is not None and here.shape == tuple(there.shape):
            asked = str(there.dtype)
            if here.dtype == asked or (cast and _is_float(here.dtype) and _is_float(asked)):
                continue
        else:
            same_shapes = False
        lines.append(
            f"  {name}: {'not' if here is None else here} saved, "
            + ("not" if there is None else f"{tuple(there.shape)} {there.dtype}")
            + " requested"
        )
    if not lines:
        return
    more = [f"  … and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    differ = f"{count(len(lines), 'array')} differ{'s' if len(lines) == 1 else ''}"
    if same_shapes:
        head = f"{where} has a different dtype; {differ}:"
        tail = "restore(…, cast=True) converts floating-point arrays after reading them"
    else:
        head = f"{where} holds a different model; {differ}:"
        tail = "build the model from the config saved with it, or choose this model's checkpoint"
    raise MeshwrightError("\n".join([head, *lines[:_SHOWN], *more, tail]))


def _part(name: str) -> str:
    return name.split("/")[0]


def _is_float(dtype: str) -> bool:
    return not dtype.startswith("key<") and bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
