"""Numbers that print how they came about.

>>> layers, weights = term(32, "layers"), term(218_103_808)
>>> bytes_ = term(4, "bytes") * (layers * weights / term(64, "devices") + 266_240)
>>> str(bytes_), bytes_.value
('4 bytes · (32 layers · 218,103,808 / 64 devices + 266,240)', 437272576.0)

Formulas of the planner are written once, over numbers. A search evaluates them with plain floats,
`--explain` with terms.
"""

import functools
from collections.abc import Callable
from typing import Any

Number = Any
"""A float or int in a search, a Term where it is printed."""
MakeNumber = Callable[..., Number]
"""(value, unit, name) → a Number: `plain` or `term`."""

_SUM, _PRODUCT, _ATOM = range(3)


def plain(value: float, unit: str = "", name: str = "") -> Number:
    """The value itself."""
    return value


def term(value: float, unit: str = "", name: str = "") -> "Term":
    """A term that prints as `name value unit`: `tp 4`, `32 layers`."""
    return Term(value, " ".join(filter(None, (name, _text(value), unit))), _ATOM)


@functools.total_ordering
class Term:
    """A number with the text of its formula."""

    __slots__ = ("_text", "_top", "value")

    def __init__(self, value: float, text: str, top: int) -> None:
        self.value, self._text, self._top = value, text, top

    def __str__(self) -> str:
        return self._text

    def _within(self, least: int) -> str:
        return self._text if self._top >= least else f"({self._text})"

    def __add__(self, other: Number) -> "Term":
        other = _as_term(other)
        if not other.value or not self.value:
            return self if self.value else other
        return Term(self.value + other.value, f"{self} + {other}", _SUM)

    def __sub__(self, other: Number) -> "Term":
        other = _as_term(other)
        return Term(self.value - other.value, f"{self} - {other._within(_PRODUCT)}", _SUM)

    def __mul__(self, other: Number) -> "Term":
        other = _as_term(other)
        if other.value == 1 or self.value == 1:
            return self if other.value == 1 else other
        text = f"{self._within(_PRODUCT)} · {other._within(_PRODUCT)}"
        return Term(self.value * other.value, text, _PRODUCT)

    def __truediv__(self, other: Number) -> "Term":
        other = _as_term(other)
        if other.value == 1:
            return self
        text = f"{self._within(_PRODUCT)} / {other._within(_ATOM)}"
        return Term(self.value / other.value, text, _PRODUCT)

    def __floordiv__(self, other: Number) -> "Term":
        exact = self / other
        return Term(self.value // _as_term(other).value, str(exact), exact._top)

    def __radd__(self, other: Number) -> "Term":
        return _as_term(other) + self

    def __rmul__(self, other: Number) -> "Term":
        return _as_term(other) * self

    def __rtruediv__(self, other: Number) -> "Term":
        return _as_term(other) / self

    def __lt__(self, other: Number) -> bool:
        return self.value < _as_term(other).value

    def __eq__(self, other: object) -> bool:
        return self.value == _as_term(other).value

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return bool(self.value)


def value_of(number: Number) -> float:
    """The value of a number, printed or not."""
    return number.value if isinstance(number, Term) else number


def _as_term(number: Number) -> Term:
    return number if isinstance(number, Term) else term(number)


def _text(value: float) -> str:
    if 0 < abs(value) < 0.1:
        return f"{value:.3g}"
    return f"{value:,.0f}" if value == round(value) or value >= 1e6 else f"{value:,.2f}"
