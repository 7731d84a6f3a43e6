"""Path rules: a regex on an array's path gives its layout; the first match wins.

    >>> rules = PathRules([("embed", ("tp", "fsdp")), ("w[qkv]", "x y -> x@fsdp y@tp"), (".*", ())])
    >>> str(rules.match("layers/0/wq/kernel").layout)
    'x y -> x@fsdp y@tp'

Paths are joined with '/'. Scalars and one-element arrays are replicated.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.layouts.expression import ELLIPSIS, Entry, Expression
from meshwright.layouts.layout import Layout, is_of_jax

_ARROW = " => "
_CATCH_ALL = (".*", "")


@dataclasses.dataclass(frozen=True)
class PathRule:
    pattern: str
    layout: Expression
    given: str = dataclasses.field(default="", compare=False)  # the layout as it was written

    def __str__(self) -> str:
        return f"{self.pattern}{_ARROW}{self.layout}"


@dataclasses.dataclass(frozen=True)
class PathRules:
    """Ordered (regex, layout) rules; a layout is an expression, a PartitionSpec, a tuple, a Layout.

    A PartitionSpec may be shorter than the array, as in jax. `optional` lists patterns that need
    not match; any other that decides nothing is reported when a whole tree is placed.
    """

    rules: tuple[PathRule, ...]
    optional: frozenset[str] = frozenset()

    def __init__(self, rules: Iterable[Any], optional: Iterable[str] = ()) -> None:
        if not isinstance(rules, tuple | list):
            raise MeshwrightError(
                f"path rules {rules!r} are not a list of pairs (regex, layout); for text use "
                "PathRules.parse"
            )
        optional = (optional,) if isinstance(optional, str) else optional
        if not isinstance(optional, tuple | list | set | frozenset):
            raise MeshwrightError(f"optional={optional!r} is not a list of patterns")
        optional = tuple(map(str, optional))
        object.__setattr__(self, "rules", tuple(_rule(item) for item in rules))
        object.__setattr__(self, "optional", frozenset(optional))
        unknown = self.optional - {rule.pattern for rule in self.rules}
        if unknown:
            raise MeshwrightError(f"optional={min(unknown)!r} is not a pattern of these rules")

    @classmethod
    def parse(cls, text: str) -> "PathRules":
        """Read rules, one a line: `w[qkv]/kernel => x y -> x@fsdp y@tp`; `? ` marks optional."""
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

    def match(self, path: str) -> PathRule:
        """The rule that decides for `path`."""
        if not isinstance(path, str):
            raise MeshwrightError(f"path {path!r} is not text, as in 'layers/0/wq'")
        found = self.matcher.found_in(path)
        if not found:
            raise MeshwrightError(
                f"no path rule matches {path!r}; add one for it, or a last rule ('.*', ()) that "
                "keeps the rest whole on every device"
            )
        return self.rules[found[0]]

    @property
    def matcher(self) -> "PathMatcher":
        """Finds rules for many paths; remembers what it found."""
        return _matcher(self)

    def never_decided(
        self, found: Iterable[tuple[int, ...]], paths: Callable[[], Sequence[str]]
    ) -> list[str]:
        """Why each rule that decides for no path does not; a last `.*` may be unused.

        `found`: what the matcher found in the paths, each once.
        """
        decided = {positions[0] for positions in found if positions}
        reasons = []
        for i, rule in enumerate(self.rules):
            if i in decided or rule.pattern in self.optional or rule.pattern in _CATCH_ALL:
                continue
            shadowed = next((path for path in paths() if i in self.matcher.found_in(path)), None)
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


class PathMatcher:
    """The compiled patterns of some rules, and the paths they were held against."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._compiled = [_compiled(pattern) for pattern in patterns]
        self._known: dict[str, tuple[int, ...]] = {}

    def found_in(self, path: str) -> tuple[int, ...]:
        """The positions of all rules found in `path`; the first decides."""
        found = self._known.get(path)
        if found is None:
            found = tuple(i for i, regex in enumerate(self._compiled) if regex.search(path))
            self._known[path] = found
        return found


@functools.lru_cache(maxsize=256)
def _matcher(rules: PathRules) -> PathMatcher:
    return PathMatcher([rule.pattern for rule in rules.rules])


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
    if isinstance(layout, tuple | list) or is_of_jax(layout, "PartitionSpec"):
        exact = Layout.of_spec(layout).expression
        # as in jax, a spec may be shorter than the array: the dims it leaves out are not split
        return Expression((*exact.left, ELLIPSIS), (*exact.right, Entry(ELLIPSIS)))
    raise MeshwrightError(
        f"path rule {item!r}: {layout!r} is not a layout; give an expression, a PartitionSpec, a "
        "tuple of axes, or a Layout"
    )
