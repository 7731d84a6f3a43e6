"""The one error a user's mistake raises, and the phrases error messages are made of.

Every message says what was given, which rule it broke and what would fit:

    mesh 'dp=2,tp=3' needs 6 devices, 8 are here; 'dp=2,tp=4' or 'dp=4,tp=2' would fit
"""

import difflib
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class MeshwrightError(ValueError):
    """A mistake a person can mend; the message says how."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Ends a sentence: `"; did you mean 'fsdp'?"` if one is close, else all that are known."""
    known = list(dict.fromkeys(known))
    likeness = {other: _likeness(str(name).lower(), other.lower()) for other in known}
    best = max(likeness.values(), default=0.0)
    if best >= 0.6:
        close = [other for other in known if likeness[other] >= best - 0.01][:2]
        return f"; did you mean {one_of(close)}?"
    if not known:
        return "."
    return f"; known: {', '.join(known[:16])}{', …' if len(known) > 16 else ''}."


def _likeness(one: str, other: str) -> float:
    if len(one) > 2 and other.startswith(one):
        return 0.99  # 'a100' for 'a100-80'
    if sorted(one) == sorted(other):
        return 0.98  # 'pt' for 'tp'
    return difflib.SequenceMatcher(None, one, other).ratio()


def nearest_multiples(size: int, factor: int) -> str:
    """The multiples of `factor` on both sides of `size`: `"24 or 32"`."""
    below = size // factor * factor
    return f"{below} or {below + factor}" if below else f"{factor}"


def one_of(options: Iterable[str]) -> str:
    """`"'a', 'b' or 'c'"`."""
    quoted = [f"'{option}'" for option in options]
    if len(quoted) < 2:
        return "".join(quoted)
    return f"{', '.join(quoted[:-1])} or {quoted[-1]}"


def count(number: int, noun: str) -> str:
    """`"1 device"`, `"8 devices"`, `"2 axes"`."""
    if number == 1:
        return f"1 {noun}"
    plural = {"axis": "axes", "copy": "copies", "micro-batch": "micro-batches"}.get(
        noun, noun + "s"
    )
    return f"{number:,} {plural}"


def mesh_text(mesh_shape: Mapping[str, int]) -> str:
    """`"fsdp=2,tp=4"`."""
    return ",".join(f"{axis}={size}" for axis, size in mesh_shape.items())


def first_repeated(items: Sequence[Any]) -> Any | None:
    """The first item that stands a second time, None if none does."""
    seen: set[Any] = set()
    for item in items:
        if item in seen:
            return item
        seen.add(item)
    return None


def whole_number(value: Any, what: str) -> int:
    """`value` as an int of at least 0, NumPy's included."""
    try:
        number = operator.index(value)
    except TypeError:
        raise MeshwrightError(f"{what}={value!r} is not a whole number") from None
    if number < 0:
        raise MeshwrightError(f"{what}={value!r} is not a whole number from 0")
    return number


def check_seed(seed: Any) -> int:
    """A random seed: jax takes 32 bits without a sign."""
    try:
        number = operator.index(seed)
    except TypeError:
        number = -1
    if not 0 <= number < 2**32:
        raise MeshwrightError(f"seed={seed!r} must be a whole number from 0 to {2**32 - 1}")
    return number


def whole_numbers(values: Any, what: str, at_least: int = 0) -> tuple[int, ...]:
    """`values` as a tuple of ints, NumPy's included; anything else is a mistake about `what`."""
    try:
        numbers = tuple(operator.index(value) for value in values)
    except TypeError:
        raise MeshwrightError(f"{what} {values!r} is not a tuple of whole numbers") from None
    if any(number < at_least for number in numbers):
        raise MeshwrightError(f"{what} {values!r}: every size must be at least {at_least}")
    return numbers
