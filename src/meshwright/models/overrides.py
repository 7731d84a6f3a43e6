"""Changes to the plain fields of a model's config, given as text: `layers=4`."""

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.errors import MeshwrightError, did_you_mean

_KINDS: dict[Any, Any] = {int: int, float: float, bool: {"true": True, "false": False}.__getitem__}


def override_fields(
    config: Any,
    changes: Mapping[str, str],
    others: Sequence[str] = (),
    more: Mapping[str, Any] | None = None,
) -> Any:
    """The config with changed numbers and switches; `others` are names that it is not about.

    `more` are the types of what can be changed beside the fields of the config.
    """
    known = {one.name: one.type for one in dataclasses.fields(config)} | dict(more or {})
    fields = {name: plain_type(kind) for name, kind in known.items() if plain_type(kind)}
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


def plain_type(kind: Any) -> Any:
    """int, float or bool, also of what may be None; None for other types."""
    options = [one for one in typing.get_args(kind) or (kind,) if one is not type(None)]
    return options[0] if len(options) == 1 and options[0] in _KINDS else None


def value_of(name: str, text: str, kind: Any) -> Any:
    """The text as a number or a switch."""
    try:
        return _KINDS[kind](text.lower())
    except (KeyError, ValueError):
        what = {int: "a whole number", float: "a number", bool: "true or false"}[kind]
        raise MeshwrightError(f"override {name}={text} must be {what}") from None
