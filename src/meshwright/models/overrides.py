"""Changes to the plain fields of a model's config, given as text: `layers=4`."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.errors import MeshwrightError, did_you_mean

_KINDS: dict[Any, Any] = {int: int, float: float, bool: {"true": True, "false": False}.__getitem__}


def override_fields(config: Any, changes: Mapping[str, str], others: Sequence[str] = ()) -> Any:
    """The config with changed numbers and switches; `others` are names that it is not about."""
    fields = {one.name: one.type for one in dataclasses.fields(config) if one.type in _KINDS}
    for name in changes:
        if name not in (*fields, *others):
            raise MeshwrightError(
                f"override: {name!r} is not a field of the model"
                f"{did_you_mean(name, (*others, *fields))}"
            )
    plain = {
        name: value_of(name, text, fields[name]) for name, text in changes.items() if name in fields
    }
    return dataclasses.replace(config, **plain)


def value_of(name: str, text: str, kind: Any) -> Any:
    """The text as a number or a switch."""
    try:
        return _KINDS[kind](text.lower())
    except (KeyError, ValueError):
        what = {int: "a whole number", float: "a number", bool: "true or false"}[kind]
        raise MeshwrightError(f"override {name}={text} must be {what}") from None
