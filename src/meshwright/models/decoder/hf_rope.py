"""Rotary embedding as Hugging Face writes it, in and out.

Two styles are read: `rope_theta` beside `rope_scaling`, and `rope_parameters` (transformers 5),
which holds both. The first is written, since every version of transformers reads it.
"""

import math
from collections.abc import Mapping
from typing import Any

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.models.huggingface import flag, number, short, whole
from meshwright.ops import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rope,
    Scaling,
    YarnScaling,
)

DEFAULT_THETA = 10000.0
ORIGINAL = "original_max_position_embeddings"
_COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_OF_TYPE = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        ORIGINAL,
    ),
    "yarn": (
        "factor",
        ORIGINAL,
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "longrope": (
        "short_factor",
        "long_factor",
        ORIGINAL,
        "factor",
        "attention_factor",
    ),
}
ROPE_TYPES = tuple(_OF_TYPE)
_OLDER = {"su": "longrope"}  # what the first Phi-3 files called it


def rope_from_hf(
    fields: Mapping[str, Any],
    max_seq: int,
    head_dim: int,
    where: str,
    theta: float = DEFAULT_THETA,
    kinds: tuple[str, ...] = ROPE_TYPES,
    default_original: int | None = None,
) -> Rope:
    """The Rope that the fields of a config.json describe; `kinds`: the rope_types it may have.

    With `default_original`, fields may say original_max_position_embeddings without a scaling.
    """
    settings, name = _settings(fields, where), "partial_rotary_factor"
    kind = _one_value(settings, "rope_type", settings, "type", where) or "default"
    kind = _OLDER.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in kinds:
        raise MeshwrightError(
            f"{where}: rope_type {short(kind)} is not supported; only {', '.join(kinds)} are"
            f"{'' if kinds == ROPE_TYPES else ', of this architecture'}"
        )
    for key, value in settings.items():
        if key not in _COMMON + _OF_TYPE[kind] and value is not None:
            raise MeshwrightError(
                f"{where}: {key}={short(value)} is not a setting of rope_type {kind!r}"
                f"{did_you_mean(key, _OF_TYPE[kind] or ('rope_theta',))}"
            )
    theta = number(
        {"rope_theta": _one_value(settings, "rope_theta", fields, "rope_theta", where)},
        "rope_theta",
        where,
        theta,
    )
    if theta <= 1:
        raise MeshwrightError(f"{where}: rope_theta={theta:g} must be above 1")
    has_original = ORIGINAL in _OF_TYPE[kind]
    if default_original is not None:
        beside = fields.get(ORIGINAL) or default_original  # the scaling
        fields = {**fields, ORIGINAL: beside if has_original else None}
    original = _one_value(settings, ORIGINAL, fields, ORIGINAL, where)
    if original is not None and not has_original:
        raise MeshwrightError(
            f"{where}: {ORIGINAL}={short(original)} means nothing with rope_type {kind!r}; "
            "remove it"
        )
    original = whole({ORIGINAL: original}, ORIGINAL, where, max_seq)
    dims = _rotated_dims(_one_value(settings, name, fields, name, where), head_dim, where)
    return Rope(theta, _scaling(kind, settings, original, max_seq, where), dims)


def _rotated_dims(factor: Any, head_dim: int, where: str) -> int | None:
    """Dims of a head that are rotated, None for all."""
    name = "partial_rotary_factor"
    share = number({name: factor}, name, where, 1.0)
    if share == 1:
        return None
    dims = int(head_dim * share)
    if share > 1 or dims < 2 or dims % 2:
        raise MeshwrightError(
            f"{where}: {name}={short(factor)} of head_dim={head_dim} rotates {dims} dims; they "
            f"must be pairs, and at most {head_dim}"
        )
    return None if dims == head_dim else dims


def rope_to_hf(rope: Rope | None, head_dim: int) -> dict[str, Any]:
    """The fields of a config.json that say this Rope."""
    if rope is None:
        return {}
    scaling: dict[str, Any] | None
    match rope.scaling:
        case None:
            scaling = None
        case LinearScaling(factor):
            scaling = {"rope_type": "linear", "factor": factor}
        case Llama3Scaling(factor, low, high, original):
            scaling = {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                ORIGINAL: original,
            }
        case YarnScaling(factor, original, fast, slow, attention_factor, truncate):
            scaling = {
                "rope_type": "yarn",
                "factor": factor,
                ORIGINAL: original,
                "beta_fast": fast,
                "beta_slow": slow,
            }
            if attention_factor is not None:
                scaling["attention_factor"] = attention_factor
            if not truncate:
                scaling["truncate"] = False
        case LongRopeScaling(short_factors, long_factors, original, factor, attention_factor):
            scaling = {
                "rope_type": "longrope",
                "short_factor": list(short_factors),
                "long_factor": list(long_factors),
                ORIGINAL: original,
                "factor": factor,
            }
            if attention_factor is not None:
                scaling["attention_factor"] = attention_factor
    partial = {} if rope.dims is None else {"partial_rotary_factor": rope.dims / head_dim}
    return {"rope_theta": rope.theta, "rope_scaling": scaling} | partial


def _settings(fields: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """`rope_scaling` or `rope_parameters`, whichever is there."""
    found: dict[str, Mapping[str, Any]] = {}
    for name in ("rope_parameters", "rope_scaling"):
        value = fields.get(name)
        if value is None or value == {}:
            continue
        if not isinstance(value, Mapping):
            raise MeshwrightError(f"{where}: {name}={short(value)} must be an object or null")
        found[name] = value
    if len(found) == 2 and found["rope_parameters"] != found["rope_scaling"]:
        raise MeshwrightError(
            f"{where}: rope_parameters and rope_scaling disagree; remove one of them"
        )
    return next(iter(found.values()), {})


def _one_value(
    first: Mapping[str, Any], name: str, second: Mapping[str, Any], other: str, where: str
) -> Any:
    """A value said in one of two places; said in both, it must be the same."""
    values = [value for value in (first.get(name), second.get(other)) if value is not None]
    if len(values) == 2 and values[0] != values[1]:
        names = name if name == other else f"{name} and {other}"
        raise MeshwrightError(
            f"{where}: {names} of the rotary embedding is said twice, as {short(values[0])} and as "
            f"{short(values[1])}; remove one of them"
        )
    return values[0] if values else None


def _scaling(
    kind: str, settings: Mapping[str, Any], original: int, max_seq: int, where: str
) -> Scaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(number(settings, "factor", where))
    if kind == "llama3":
        low = number(settings, "low_freq_factor", where)
        high = number(settings, "high_freq_factor", where)
        if high <= low:
            raise MeshwrightError(
                f"{where}: high_freq_factor={high:g} must be above low_freq_factor={low:g}"
            )
        return Llama3Scaling(number(settings, "factor", where), low, high, original)
    if kind == "longrope":
        return _long_rope(settings, original, max_seq, where)
    factor = number(settings, "factor", where, max_seq / original)
    fast = number(settings, "beta_fast", where, 32.0)
    slow = number(settings, "beta_slow", where, 1.0)
    if fast <= slow:
        raise MeshwrightError(f"{where}: beta_fast={fast:g} must be above beta_slow={slow:g}")
    truncate = flag(settings, "truncate", where, True)
    attention = _yarn_attention(settings, factor, where)
    return YarnScaling(factor, original, fast, slow, attention, truncate)


def _long_rope(
    settings: Mapping[str, Any], original: int, max_seq: int, where: str
) -> LongRopeScaling:
    def factors(name: str) -> tuple[float, ...]:
        values = settings.get(name)
        if not isinstance(values, list):
            raise MeshwrightError(f"{where}: {name}={short(values)} must be a list of numbers")
        return tuple(number({name: value}, name, where) for value in values)

    attention = settings.get("attention_factor")
    return LongRopeScaling(
        factors("short_factor"),
        factors("long_factor"),
        original,
        number(settings, "factor", where, max_seq / original),
        None if attention is None else number(settings, "attention_factor", where),
    )


def _yarn_attention(settings: Mapping[str, Any], factor: float, where: str) -> float | None:
    """`attention_factor`, or what `mscale` and `mscale_all_dim` make of it, or None: by rule."""
    if settings.get("attention_factor") is not None:
        return number(settings, "attention_factor", where)
    if not (settings.get("mscale") and settings.get("mscale_all_dim")):
        return None  # transformers uses both or neither
    top, bottom = (
        0.1 * number(settings, name, where) * math.log(factor) + 1.0 if factor > 1 else 1.0
        for name in ("mscale", "mscale_all_dim")
    )
    return top / bottom
