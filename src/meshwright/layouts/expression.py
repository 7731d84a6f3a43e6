"""Expressions: one line gives the layout of one array.

    x y -> x y*                               numbers and stars: y over all devices
    a b -> 2 a2* b*                           2 copies; a and b in the ratio 2 : 1
    batch seq embed -> batch@dp+fsdp seq embed@tp    mesh axes by name

Left: the dims in order, at most one `...`. Right: the same dims, in device order (major first):
`a` not split, `a4` split in 4, `a*` `a2*` a share of what is left; `4`, `*`, `2*` copies;
`a@tp` `a@dp+fsdp` split over named mesh axes. Names are letters and `_`.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

from meshwright.arithmetic import divisors, first_repeated, integer_root
from meshwright.errors import MeshwrightError, did_you_mean, one_of
from meshwright.present import count

ELLIPSIS = "..."
_NUMBER = re.compile(r"[0-9]+")
_AXIS = re.compile(r"[^\W\d]\w*")
_MAX_DIGITS = 9


@dataclasses.dataclass(frozen=True)
class Entry:
    """One item right of the arrow: a dim, copies (no dim), or the ellipsis."""

    dim: str | None = None
    number: int = 1
    star: bool = False
    axes: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.dim == ELLIPSIS:
            return ELLIPSIS
        if self.axes:
            return f"{self.dim}@{'+'.join(self.axes)}"
        number = "" if self.number == 1 and (self.dim or self.star) else str(self.number)
        return f"{self.dim or ''}{number}{'*' if self.star else ''}"


@dataclasses.dataclass(frozen=True)
class Factor:
    """A share of the devices, in device order: they split `dim`, or hold copies if it is None."""

    dim: str | None
    size: int


@dataclasses.dataclass(frozen=True)
class Expression:
    """The parsed text; `str()` gives it back in canonical form."""

    left: tuple[str, ...]
    right: tuple[Entry, ...]

    @staticmethod
    def parse(text: str) -> "Expression":
        if not isinstance(text, str):
            raise MeshwrightError(f"layout {text!r} is not an expression; write 'x y -> x y*'")
        return _parse(text)

    def __str__(self) -> str:
        return f"{' '.join(self.left)} -> {' '.join(map(str, self.right))}".strip()

    @property
    def names_axes(self) -> bool:
        return any(entry.axes for entry in self.right)

    @property
    def counts_devices(self) -> bool:
        """Whether a number, star or bare count appears: the layout depends on how many devices."""
        return any(
            entry.dim != ELLIPSIS and (entry.dim is None or entry.star or entry.number != 1)
            for entry in self.right
        )

    @property
    def ndim(self) -> int | None:
        """The rank, None with an ellipsis."""
        return None if ELLIPSIS in self.left else len(self.left)

    def dims(self, ndim: int | None = None) -> tuple[str | None, ...]:
        """The dim names for an array of rank `ndim`; None for dims of the ellipsis."""
        if ELLIPSIS not in self.left:
            if ndim is not None and ndim != len(self.left):
                more = f", or write ... for the rest: '{self._with_ellipsis()}'"
                raise MeshwrightError(
                    f"layout '{self}' names {count(len(self.left), 'dim')}, the array has {ndim}; "
                    f"name each dim once{more if ndim > len(self.left) else ''}"
                )
            return self.left
        if ndim is None:
            raise MeshwrightError(
                f"layout '{self}' has an ellipsis, so the rank must be given: ndim=…"
            )
        hidden = ndim - (len(self.left) - 1)
        if hidden < 0:
            raise MeshwrightError(
                f"layout '{self}' names {count(len(self.left) - 1, 'dim')} beside the ellipsis, "
                f"the array has {ndim}; name at most {ndim}"
            )
        at = self.left.index(ELLIPSIS)
        return (*self.left[:at], *[None] * hidden, *self.left[at + 1 :])

    def factors(self, num_devices: int, where: str = "here") -> tuple[Factor, ...]:
        """How the devices divide, major first; the product is `num_devices`.

        >>> [f.size for f in Expression.parse("a b -> 2 a2* b*").factors(16)]
        [2, 4, 2]
        """
        return _factors(self, num_devices, where)

    def _with_ellipsis(self) -> str:
        return str(Expression((*self.left, ELLIPSIS), (*self.right, Entry(ELLIPSIS))))


@functools.lru_cache(maxsize=4096)
def _parse(text: str) -> Expression:
    source = f"layout {text!r}"
    sides = text.split("->")
    if len(sides) != 2:
        raise MeshwrightError(
            f"{source} needs one '->' between the dims and where they go, as in 'x y -> x y*'"
        )
    left = tuple(sides[0].split())
    for token in left:
        if token != ELLIPSIS and not is_dim_name(token):
            has_name = any(map(_is_letter, token)) or "*" in token
            hint = "; numbers, stars and @ go right of the arrow" if has_name else ""
            raise MeshwrightError(
                f"{source}: {token!r} left of the arrow is not a dim name (letters and _){hint}"
            )
    right = tuple(_entry(token, source) for token in sides[1].split())
    _check_sides(left, right, source)
    expression = Expression(left, right)
    if expression.names_axes and expression.counts_devices:
        mixed = next(
            e for e in right if e.dim != ELLIPSIS and not e.axes and str(e) != (e.dim or "")
        )
        raise MeshwrightError(
            f"{source} mixes named axes (@) and numbers ('{mixed}'); with named axes every "
            "axis not named holds copies already: use one form"
        )
    axes = [axis for entry in right for axis in entry.axes]
    twice = first_repeated(axes)
    if twice is not None:
        raise MeshwrightError(
            f"{source} uses mesh axis {twice!r} twice; an axis can split one dim of an array"
        )
    return expression


def _entry(token: str, source: str) -> Entry:
    if token == ELLIPSIS:
        return Entry(ELLIPSIS)
    dim, at, axes_text = token.partition("@")
    if at:
        axes = tuple(axes_text.split("+"))
        if not is_dim_name(dim) or not all(_AXIS.fullmatch(axis) for axis in axes):
            raise MeshwrightError(
                f"{source}: {token!r} is not 'dim@axis' or 'dim@axis+axis' (dims are letters and _)"
            )
        return Entry(dim, axes=axes)
    name_end = next((i for i, c in enumerate(token) if not _is_letter(c)), len(token))
    name, rest = token[:name_end], token[name_end:]
    star = rest.endswith("*")
    digits = rest[:-1] if star else rest
    if digits and (not _NUMBER.fullmatch(digits) or len(digits) > _MAX_DIGITS):
        hint = "; the number goes before the star, as in 'a2*'" if rest.startswith("*") else ""
        raise MeshwrightError(
            f"{source}: {token!r} right of the arrow is not 'a', 'a4', 'a*', 'a2*', '4', '*', "
            f"'2*', 'a@axis' or '...'{hint}"
        )
    if digits and int(digits) == 0:
        raise MeshwrightError(f"{source}: {token!r} splits in 0; use 1 or more")
    if not name and not digits and not star:
        raise MeshwrightError(f"{source}: {token!r} is not part of the notation")
    return Entry(name or None, int(digits or 1), star)


def _check_sides(left: tuple[str, ...], right: tuple[Entry, ...], source: str) -> None:
    right_names = [entry.dim for entry in right if entry.dim is not None]
    for side, names in (("left", left), ("right", right_names)):
        twice = first_repeated(names)
        if twice is not None:
            what = "two ellipses" if twice == ELLIPSIS else f"dim {twice!r} twice"
            raise MeshwrightError(f"{source} has {what} on the {side}; give each once per side")
    if (ELLIPSIS in left) != (ELLIPSIS in right_names):
        side, other = ("left", "right") if ELLIPSIS in left else ("right", "left")
        raise MeshwrightError(
            f"{source} has an ellipsis on the {side} only; add ... on the {other} as well"
        )
    extra = [name for name in right_names if name not in left]
    if extra:
        raise MeshwrightError(
            f"{source}: {extra[0]!r} right of the arrow is not a dim on the left"
            f"{did_you_mean(extra[0], [name for name in left if name != ELLIPSIS])}"
        )
    missing = [name for name in left if name not in right_names]
    if missing:
        raise MeshwrightError(
            f"{source} does not say where {missing[0]!r} goes; write it right of the arrow too "
            f"(plain '{missing[0]}' keeps it whole)"
        )


@functools.lru_cache(maxsize=4096)
def _factors(expression: Expression, num_devices: int, where: str) -> tuple[Factor, ...]:
    source = f"layout '{expression}'"
    entries = [entry for entry in expression.right if entry.dim != ELLIPSIS]
    numbers = math.prod(entry.number for entry in entries)
    stars = sum(entry.star for entry in entries)
    if stars == 0 and numbers != num_devices:
        fix = (
            f"'{Expression(expression.left, (Entry(star=True), *expression.right))}' makes copies "
            "of the rest"
            if num_devices % numbers == 0
            else f"numbers that multiply to {num_devices} would fit"
        )
        raise MeshwrightError(
            f"{source} uses {count(numbers, 'device')}, {num_devices} "
            f"{'is' if num_devices == 1 else 'are'} {where}; {fix}"
        )
    rest, remainder = divmod(num_devices, numbers)
    if remainder or not rest:
        raise MeshwrightError(
            f"{source}: its numbers multiply to {numbers}, which does not divide {num_devices} "
            f"devices; {_fitting_numbers(expression, num_devices)}"
        )
    ratio = integer_root(rest, stars) if stars else 1
    if ratio is None:
        counts = sorted(numbers * r**stars for r in _around(rest, stars))
        raise MeshwrightError(
            f"{source} has no integer ratio on {num_devices} devices: {count(stars, 'star')} share "
            f"{rest}, which is not a whole number to the power {stars}; it fits "
            f"{' or '.join(map(str, counts))} devices{_uneven(expression, rest, stars)}"
        )
    return tuple(
        Factor(entry.dim, entry.number * (ratio if entry.star else 1)) for entry in entries
    )


def _around(number: int, degree: int) -> Iterator[int]:
    root = 1
    while (root + 1) ** degree <= number:
        root += 1
    yield root
    yield root + 1


def _uneven(expression: Expression, rest: int, stars: int) -> str:
    """A way to write it that does fit: give one starred entry the larger share."""
    for share in divisors(rest)[1:]:
        if integer_root(rest // share, stars) is not None:
            first = next(i for i, entry in enumerate(expression.right) if entry.star)
            entry = expression.right[first]
            larger = dataclasses.replace(entry, number=entry.number * share)
            right = (*expression.right[:first], larger, *expression.right[first + 1 :])
            return f", or write '{Expression(expression.left, right)}'"
    return ""


def _fitting_numbers(expression: Expression, num_devices: int) -> str:
    """For each number above 1, what it could be instead with the others as they are."""
    numbers = [e.number for e in expression.right]
    fixes = []
    for i, entry in enumerate(expression.right):
        others = math.prod(numbers[:i] + numbers[i + 1 :])
        if entry.number == 1 or num_devices % others:
            continue
        near = min(divisors(num_devices // others), key=lambda d: abs(d - entry.number))
        right = (
            *expression.right[:i],
            dataclasses.replace(entry, number=near),
            *expression.right[i + 1 :],
        )
        fixes.append(str(Expression(expression.left, right)))
    if not fixes:
        return f"use numbers that divide {num_devices}"
    return f"{one_of(fixes[:2])} would fit"


def _is_letter(character: str) -> bool:
    return character.isalpha() or character == "_"


def is_dim_name(token: str) -> bool:
    """Letters of any script and `_`; digits would mean a split."""
    return bool(token) and all(map(_is_letter, token))
