"""Path rules: a regex found in an array's path gives its layout; the first that is found wins.

    >>> rules = PathRules([("embed", ("tp", "fsdp")), ("w[qkv]", "x y -> x@fsdp y@tp"), (".*", ())])
    >>> str(rules.match("layers/0/wq/kernel").layout)
    'x y -> x@fsdp y@tp'

Paths are joined with '/'. Scalars and one-element arrays stay whole on every device.
"""

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from meshwright.errors import MeshwrightError
from meshwright.layout.expression import ELLIPSIS, Entry, Expression
from meshwright.layout.layout import Layout

_ARROW = " => "
_CATCH_ALL = (".*", "")


@dataclasses.dataclass(frozen=True)
class PathRule:
    pattern: str
    layout: Expression
    given: str = dataclasses.field(default="", compare=False)  # the layout as it was written

    def __str__(self) -> str:
        return f"{self.pattern}{_ARROW}{self.layout}"


class PathRules:
    """Ordered (regex, layout) rules; a layout is an expression, a PartitionSpec, a tuple, a Layout.

    A PartitionSpec may be shorter than the array, as in jax. `optional` lists patterns that need
    not match; any other that decides nothing is reported when a whole tree is placed.
    """

    def __init__(self, rules: Sequence[Any], optional: Sequence[str] = ()) -> None:
        self.rules = tuple(_rule(item) for item in rules)
        self.optional = frozenset(optional)
        self._compiled = [_compiled(rule.pattern) for rule in self.rules]
        unknown = self.optional - {rule.pattern for rule in self.rules}
        if unknown:
            raise MeshwrightError(f"optional={min(unknown)!r} is not a pattern of these rules")
        self._position = functools.lru_cache(maxsize=65536)(self._find)

    @classmethod
    def parse(cls, text: str) -> "PathRules":
        """Read rules, one a line: `w[qkv]/kernel => x y -> x@fsdp y@tp`."""
        if not isinstance(text, str):
            raise MeshwrightError(f"path rules {text!r} are not text; one 'regex => layout' a line")
        rules = []
        optional = []
        for line in text.split("\n"):
            if not line.strip():
                continue
            pattern, arrow, layout = line.rpartition("=>")
            if not arrow:
                raise MeshwrightError(f"path rule {line.strip()!r} is not 'regex => layout'")
            pattern = pattern.strip()
            if pattern.startswith("? "):
                pattern = pattern[2:].strip()
                optional.append(pattern)
            rules.append((pattern, layout.strip()))
        return cls(rules, optional)

    def __str__(self) -> str:
        return "\n".join(
            f"{'? ' if rule.pattern in self.optional else ''}{rule}" for rule in self.rules
        )

    def __repr__(self) -> str:
        return f"PathRules.parse({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PathRules) and (self.rules, self.optional) == (
            other.rules,
            other.optional,
        )

    def __hash__(self) -> int:
        return hash((self.rules, self.optional))

    def match(self, path: str) -> PathRule:
        """The rule that decides for `path`."""
        position = self.find(path)
        if position is None:
            raise MeshwrightError(
                f"no path rule matches {path!r}; add one for it, or a last rule ('.*', ()) that "
                "keeps the rest whole on every device"
            )
        return self.rules[position]

    def find(self, path: str) -> int | None:
        """The position of the first rule found in `path`, None if there is none."""
        return self._position(path)

    def _find(self, path: str) -> int | None:
        return next((i for i, regex in enumerate(self._compiled) if regex.search(path)), None)

    def never_decided(self, paths: Sequence[str], decided: set[int | None]) -> list[str]:
        """Why each rule that decided for none of `paths` did not; a last `.*` may stand unused."""
        reasons = []
        for i, rule in enumerate(self.rules):
            if i in decided or rule.pattern in self.optional or rule.pattern in _CATCH_ALL:
                continue
            shadowed = next((p for p in paths if self._compiled[i].search(p)), None)
            if shadowed is None:
                reasons.append(
                    f"path rule {rule.pattern!r} matches no array; drop it, or list it in optional="
                )
            else:
                winner = self.match(shadowed).pattern
                reasons.append(
                    f"path rule {rule.pattern!r} never decides: {winner!r}, which comes first, "
                    f"takes {shadowed!r}; move it up, drop it, or list it in optional="
                )
        return reasons


def _rule(item: Any) -> PathRule:
    if isinstance(item, PathRule):
        return item
    if isinstance(item, str) or not isinstance(item, Sequence) or len(item) != 2:
        raise MeshwrightError(f"path rule {item!r} is not a pair (regex, layout)")
    pattern, layout = item
    if not isinstance(pattern, str):
        raise MeshwrightError(f"path rule {item!r}: {pattern!r} is not a regex")
    if pattern != pattern.strip() or "\n" in pattern or pattern.startswith("? "):
        raise MeshwrightError(
            f"path rule {item!r}: a pattern has no white space at its ends and no line break; "
            r"write \s or \n"
        )
    _compiled(pattern)
    written = layout if isinstance(layout, str) else str(layout)
    return PathRule(pattern, _expression(layout, item), written)


@functools.lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as reason:
        raise MeshwrightError(f"path rule {pattern!r} is not a regex: {reason}") from None


def _expression(layout: Any, item: Any) -> Expression:
    if isinstance(layout, Expression):
        return layout
    if isinstance(layout, str):
        return Expression.parse(layout)
    if isinstance(layout, Layout):
        return layout.expression
    if layout is None:
        layout = ()
    if isinstance(layout, PartitionSpec | tuple | list):
        exact = Layout.of_spec(tuple(layout)).expression
        # as in jax, a spec may be shorter than the array: the dims it leaves out are whole
        return Expression((*exact.left, ELLIPSIS), (*exact.right, Entry(ELLIPSIS)))
    raise MeshwrightError(
        f"path rule {item!r}: {layout!r} is not a layout; give an expression, a PartitionSpec, a "
        "tuple of axes, or a Layout"
    )
