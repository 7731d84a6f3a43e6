"""A plan as plain data, and back: what `--json` prints and `prove --plan FILE` reads.

    data = plan_data(plan)            # dicts, lists, numbers, texts: json.dumps takes it
    assert plan_from_data(data) == plan

Keys are the names of the fields in planner/result.py. Beside them stand a few that follow from
others: `mesh`, `tokens_per_second`, `total`, `exposed` … A file in which one of them says
something else than those others was edited, and is refused.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from meshwright.errors import MeshwrightError
from meshwright.models import model_from_dict, model_to_dict
from meshwright.planner.report import rates
from meshwright.planner.result import Estimate, Memory, Plan, Refusal, Serving
from meshwright.planner.search import UNCERTAINTY

FORMAT = "meshwright plan"
VERSION = 8
_FOLLOWS = {Memory: ("total", "fits", "reserve", "tight"), Serving: ("full_tokens_per_second",)}


def plan_data(plan: Plan) -> dict[str, Any]:
    """Everything the plan holds; `format` and `version` first."""
    data = _plain(dataclasses.replace(plan, model=None))
    data["model"] = model_to_dict(plan.model)
    data["machine"] = {"text": str(plan.machine)} | data["machine"]
    data["ranked"] = [estimate_data(plan, one) for one in plan.ranked]
    data["refused"] = [_refusal_data(one) for one in plan.refused]
    about = {"format": FORMAT, "version": VERSION, "mesh": plan.mesh}
    about["checkpoint_bytes"] = rates.checkpoint(plan)
    return about | {"uncertainty": UNCERTAINTY} | data


def estimate_data(plan: Plan, estimate: Estimate) -> dict[str, Any]:
    """One mesh of the plan, with what follows from its numbers."""
    follows = {
        "mesh": estimate.choice.mesh,
        "tokens_per_second": plan.tokens_per_second(estimate),
        "tokens_per_second_per_chip": rates.per_chip(plan, estimate),
        "cost_per_trillion_tokens": rates.cost_per_trillion(plan, estimate),
        "exposed": estimate.exposed,
        "data_bytes_per_second": rates.data_rate(plan, estimate),
        "run": rates.run(plan, estimate),
        "roofline": rates.roofline(plan, estimate),
    }
    parts = {"memory": _with_follows(estimate.memory), "serving": _with_follows(estimate.serving)}
    data: dict[str, Any] = _plain(follows) | _plain(estimate) | parts
    return data


def found_data(plan: Plan, found: Estimate | Refusal) -> dict[str, Any]:
    """One mesh that was asked for: its estimate, or its refusal with `why`."""
    if isinstance(found, Estimate):
        return estimate_data(plan, found)
    return {"mesh": found.choice.mesh} | _refusal_data(found)


def _refusal_data(refusal: Refusal) -> dict[str, Any]:
    data: dict[str, Any] = _plain(refusal) | {"memory": _with_follows(refusal.memory)}
    return data


def _with_follows(value: Memory | Serving | None) -> Any:
    if value is None:
        return None
    return _plain(value) | {name: _plain(getattr(value, name)) for name in _FOLLOWS[type(value)]}


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
    try:
        model = model_from_dict(data["model"])
        hash(model)  # a list where a model has a number is none of its values
    except (TypeError, KeyError, ValueError, AttributeError) as reason:
        raise MeshwrightError(f"{where}.model is not a model's config: {reason}") from None
    try:
        plan = msgspec.convert(
            {**data, "model": None}, Plan, dec_hook=lambda kind, text: kind(text)
        )
    except msgspec.ValidationError as reason:
        said, _, place = str(reason).partition(" - at `$")
        raise MeshwrightError(
            f"{where}{place.rstrip('`')}: {said[0].lower()}{said[1:]}; plan again"
        ) from None
    plan = dataclasses.replace(plan, model=model)
    if not plan.ranked:
        raise MeshwrightError(f"{where} ranks no mesh: 'ranked' is empty; plan again")
    _check_agrees(plan_data(plan), data, where)
    return plan


def read_plan(file: Path | str) -> Plan:
    """The plan in a file that `meshwright plan … --json > FILE` wrote."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as reason:
        raise MeshwrightError(
            f"plan {str(file)!r} cannot be read: {getattr(reason, 'strerror', None) or reason}; "
            "meshwright plan … --json > FILE writes one"
        ) from None
    try:
        data = json.loads(text)
    except ValueError as reason:
        raise MeshwrightError(
            f"plan {str(file)!r} is not JSON: {reason}; meshwright plan … --json > FILE writes one"
        ) from None
    return plan_from_data(data, f"plan {str(file)!r}")


def _check_agrees(follows: Any, data: Any, where: str) -> None:
    """That a file has every key, and that what follows from others is what it says."""
    if isinstance(follows, dict) and isinstance(data, Mapping):
        for key, value in follows.items():
            if key not in data:
                raise MeshwrightError(f"{where} lacks the key {key!r}; plan again")
            _check_agrees(value, data[key], f"{where}.{key}")
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


def _plain(value: Any) -> Any:
    """As dicts, lists, numbers and texts; NumPy's numbers become Python's."""

    def other(value: Any) -> Any:
        return str(value) if isinstance(value, Path) else value.item()

    # msgspec leaves out a default that it has not read from a file
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    return msgspec.json.decode(msgspec.json.encode(value, enc_hook=other))
