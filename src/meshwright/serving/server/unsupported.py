"""Fields of other servers that this one does not support, and what to do instead."""

import dataclasses
import functools
import json
import typing
from typing import Any

import msgspec

from meshwright.serving.server.errors import ApiError, bad_request


@dataclasses.dataclass(frozen=True, eq=False)  # Annotated would take 0 for an equal False
class Unsupported:
    """Marks a field of a body, which is refused unless it has the value that changes nothing.

    class Body(msgspec.Struct):
        priority: Annotated[Any, Unsupported(neutral=0)] = None
    """

    neutral: Any = None
    """The value that changes nothing, beside null."""
    instead: str = ""
    """What to do instead, or why there is nothing to do."""


@functools.cache
def unsupported_fields(kind: type[msgspec.Struct]) -> dict[str, Unsupported]:
    """The fields of a body that are not supported, by name."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {
        name: mark
        for name, hint in hints.items()
        for mark in getattr(hint, "__metadata__", ())
        if isinstance(mark, Unsupported)
    }


def refuse_unsupported(body: msgspec.Struct, inside: str = "") -> None:
    """Raise a 400 for a field that is not supported, also of a struct in a field."""
    for name, field in unsupported_fields(type(body)).items():
        value = getattr(body, name)
        if value is not None and value != field.neutral:
            raise not_supported(inside + name, field)
    for name in body.__struct_fields__:
        value = getattr(body, name)
        if isinstance(value, msgspec.Struct):
            refuse_unsupported(value, f"{inside}{name}.")


def not_supported(name: str, field: Unsupported) -> ApiError:
    """The 400 for a field that is not supported."""
    neutral = "" if field.neutral is None else f", or send {json.dumps(field.neutral)}"
    instead = f": {field.instead}" if field.instead else ""
    return bad_request(
        f"{name} is not supported by this server; leave it out{neutral}{instead}", name
    )
