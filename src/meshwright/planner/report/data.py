"""A plan as plain data, and back: what `--json` prints and `prove --plan FILE` reads.

    data = plan_data(plan)            # dicts, lists, numbers, texts: json.dumps takes it
    assert plan_from_data(data) == plan

Keys are the names of the fields in planner/result.py. Beside them stand a few that follow from
others: `mesh`, `tokens_per_second`, `total`, `exposed` … A file in which one of them says
something else than those others was edited, and is refused.
"""

import dataclasses
import functools
import json
import math
import operator
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from meshwright.errors import MeshwrightError
from meshwright.models import FAMILIES
from meshwright.planner.ranking import UNCERTAINTY
from meshwright.planner.report import figures
from meshwright.planner.result import Estimate, Memory, Plan, Refusal, Serving
from meshwright.train import TrainConfig, config_from_dict, config_to_dict

FORMAT = "meshwright plan"
VERSION = 5
MEMORY_FOLLOWS = ("total", "fits", "reserve", "tight")
SERVING_FOLLOWS = ("full_tokens_per_second",)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """The types of a class's fields; a plan's model is the config of some family."""
    hints = typing.get_type_hints(kind)
    if kind is Plan:
        hints["model"] = typing.Union[tuple(family.config for family in FAMILIES)]  # noqa: UP007
    return hints


def plan_data(plan: Plan) -> dict[str, Any]:
    """Everything the plan holds; `format` and `version` first."""
    data = _plain(plan, Plan)
    data["machine"] = {"text": str(plan.machine)} | data["machine"]
    data["ranked"] = [estimate_data(plan, one) for one in plan.ranked]
    about = {"format": FORMAT, "version": VERSION, "mesh": plan.mesh}
    return about | {"uncertainty": UNCERTAINTY} | data


def estimate_data(plan: Plan, estimate: Estimate) -> dict[str, Any]:
    """One mesh of the plan, with what follows from its numbers."""
    follows = {
        "mesh": estimate.choice.mesh,
        "tokens_per_second": figures.tokens_per_second(plan, estimate),
        "tokens_per_second_per_chip": figures.per_chip(plan, estimate),
        "cost_per_trillion_tokens": figures.cost_per_trillion(plan, estimate),
        "exposed": estimate.exposed,
        "roofline": figures.roofline(plan, estimate),
    }
    data: dict[str, Any] = _plain(follows, None) | _plain(estimate, Estimate)
    return data


def found_data(plan: Plan, found: Estimate | Refusal) -> dict[str, Any]:
    """One mesh that was asked for: its estimate, or its refusal with `why`."""
    if isinstance(found, Estimate):
        return estimate_data(plan, found)
    data: dict[str, Any] = _plain(found, Refusal)
    return {"mesh": found.choice.mesh} | data


def plan_from_data(data: Any, where: str = "the plan") -> Plan:
    """The plan that `plan_data` wrote; anything else is an error that names the key."""
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise MeshwrightError(
            f"{where} is not a plan; `meshwright plan … --json > FILE` writes one"
        )
    if data.get("version") != VERSION:
        raise MeshwrightError(
            f"{where} is of version {data.get('version')!r}, this Meshwright reads {VERSION}; "
            "plan again"
        )
    plan = _read(Plan, data, where)
    assert isinstance(plan, Plan)
    if not plan.ranked:
        raise MeshwrightError(f"{where} ranks no mesh: 'ranked' is empty; plan again")
    _check_agrees(plan_data(plan), data, where)
    return plan


def read_plan(file: Path | str) -> Plan:
    """The plan in a file that `meshwright plan … --json > FILE` wrote."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as reason:
        raise MeshwrightError(f"plan {str(file)!r} cannot be read: {reason}") from None
    try:
        data = json.loads(text)
    except ValueError as reason:
        raise MeshwrightError(f"plan {str(file)!r} is not JSON: {reason}") from None
    return plan_from_data(data, f"plan {str(file)!r}")


def _check_agrees(follows: Any, data: Any, where: str) -> None:
    """That what follows from the numbers of a plan is what its file says, wherever it says it."""
    if isinstance(follows, dict) and isinstance(data, Mapping):
        for key in (key for key in follows if key in data):
            _check_agrees(follows[key], data[key], f"{where}.{key}")
    elif isinstance(follows, list) and isinstance(data, list):
        for i, (one, other) in enumerate(zip(follows, data, strict=False)):
            _check_agrees(one, other, f"{where}[{i}]")
    elif follows != data and not _nearly(follows, data):
        raise MeshwrightError(
            f"{where} is {data!r}, but the rest of the file gives {follows!r}: it was edited in "
            "one place and not in others. Plan what you want instead (meshwright plan … --mesh), "
            "or name it to prove without a plan (--on, --mesh)"
        )


def _nearly(one: Any, other: Any) -> bool:
    """Whether two numbers differ by rounding only."""
    numbers = isinstance(one, int | float) and isinstance(other, int | float)
    return numbers and math.isclose(one, other, rel_tol=1e-6)


def _plain(value: Any, kind: Any) -> Any:
    """`value` of the annotated type `kind` as plain data."""
    if isinstance(value, TrainConfig):
        return config_to_dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        hints = _hints(type(value))
        # where one of several classes may stand, its name says which
        named = {"type": type(value).__name__} if len(_classes(kind)) > 1 else {}
        fields = {name: _plain(getattr(value, name), hints[name]) for name in _names(value)}
        follows = {}
        if isinstance(value, Memory):
            follows = {name: getattr(value, name) for name in MEMORY_FOLLOWS}
        if isinstance(value, Serving):
            follows = {name: getattr(value, name) for name in SERVING_FOLLOWS}
        return named | fields | follows
    if isinstance(value, Mapping):
        return {key: _plain(item, None) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item, None) for item in value]
    if value is None or isinstance(value, bool | str):
        return value
    # NumPy's numbers become Python's
    return operator.index(value) if hasattr(value, "__index__") else float(value)


def _read(kind: Any, data: Any, where: str) -> Any:
    """`data` as a value of the annotated type `kind`; `where` names it in errors."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in parts:
            return None
        return _read_one_of([part for part in parts if part is not type(None)], data, where)
    if origin is Literal:
        if data not in parts:
            raise _wrong(where, " or ".join(map(repr, parts)), data)
        return data
    if kind is TrainConfig:
        return _read_config(data, where)
    if dataclasses.is_dataclass(kind):
        return _read_fields(kind, data, where)
    if origin is tuple:
        if not isinstance(data, list):
            raise _wrong(where, "a list", data)
        kinds = [parts[0]] * len(data) if parts[1:] == (...,) else list(parts)
        if len(kinds) != len(data):
            raise _wrong(where, f"a list of {len(kinds)}", data)
        pairs = zip(kinds, data, strict=True)
        return tuple(_read(each, item, f"{where}[{i}]") for i, (each, item) in enumerate(pairs))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(data, Mapping):
            raise _wrong(where, "an object", data)
        return {key: _read(parts[1], item, f"{where}.{key}") for key, item in data.items()}
    return _read_simple(kind, data, where)


def _read_simple(kind: Any, data: Any, where: str) -> Any:
    if kind is float and isinstance(data, int | float) and not isinstance(data, bool):
        if not math.isfinite(data):
            raise _wrong(where, "a finite number", data)
        return float(data)
    if kind is int and isinstance(data, int) and not isinstance(data, bool):
        return data
    if kind in (str, bool) and isinstance(data, kind):
        return data
    words = {float: "a number", int: "a whole number", str: "a text", bool: "true or false"}
    raise _wrong(where, words[kind], data)


def _read_fields(kind: Any, data: Any, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise _wrong(where, "an object", data)
    hints = _hints(kind)
    fields = {}
    for name in _names(kind):
        if name not in data:
            raise MeshwrightError(f"{where} lacks the key {name!r}; plan again")
        fields[name] = _read(hints[name], data[name], f"{where}.{name}")
    return kind(**fields)


def _read_config(data: Any, where: str) -> TrainConfig:
    """Settings, all of them: a default may be another one by now."""
    if not isinstance(data, Mapping):
        raise _wrong(where, "an object", data)
    config = config_from_dict(data, where)
    _check_complete(config_to_dict(config), data, where)
    return config


def _check_complete(settings: Mapping[str, Any], data: Mapping[str, Any], where: str) -> None:
    for name, value in settings.items():
        if name not in data:
            raise MeshwrightError(f"{where} lacks the key {name!r}; plan again")
        if isinstance(value, Mapping):
            _check_complete(value, data[name], f"{where}.{name}")


def _read_one_of(kinds: list[Any], data: Any, where: str) -> Any:
    if len(kinds) == 1:
        return _read(kinds[0], data, where)
    named = {kind.__name__: kind for kind in kinds}
    name = data.get("type") if isinstance(data, Mapping) else None
    if name not in named:
        raise _wrong(f"{where}.type", " or ".join(map(repr, named)), name)
    return _read(named[name], data, where)


def _classes(kind: Any) -> list[Any]:
    return [part for part in typing.get_args(kind) if dataclasses.is_dataclass(part)]


def _names(value: Any) -> list[str]:
    """The fields that a plan's file holds: not the config.json that a model was read from."""
    return [field.name for field in dataclasses.fields(value) if field.name != "hf_config"]


def _wrong(where: str, wanted: str, data: Any) -> MeshwrightError:
    text = repr(data)
    short = text if len(text) <= 40 else f"{text[:40]}…"
    return MeshwrightError(f"{where} should be {wanted}, it is {short}")
