"""Logical-axis rules: `embed -> fsdp`, ordered, with T5X's semantics.

    >>> rules = Rules([("batch", "data"), ("mlp", "model"), ("embed", "model"), ("embed", "data")])
    >>> rules.spec(("embed", "mlp"))
    P('data', 'model')

Rules are walked in order. A rule fires if its dim is in the array and not yet assigned and none of
its mesh axes is used in the array yet; a losing rule is skipped and a later one for the same dim is
the fallback. None means that the dim is not split, and is final. Several axes are all or nothing.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from meshwright.arithmetic import first_repeated, whole_number, whole_numbers
from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.layouts.arrays import dim_names, pairs_and_optional
from meshwright.layouts.layout import Layout, name_dims
from meshwright.layouts.resolve import mesh_shape_of

if TYPE_CHECKING:
    from meshwright.layouts.jax_arrays import MeshLike, PartitionSpec

_NONE = "none"


@dataclasses.dataclass(frozen=True)
class LogicalRule:
    dim: str
    axes: tuple[str, ...]  # empty: not split

    @property
    def axes_text(self) -> str:
        return "+".join(self.axes) or _NONE

    def __str__(self) -> str:
        return f"{self.dim} -> {self.axes_text}"


@dataclasses.dataclass(frozen=True)
class RuleOutcome:
    """The layout of one array, the rule that decided each dim, and the rules that lost."""

    layout: Layout
    fired: tuple[LogicalRule, ...]
    lost: tuple[tuple[LogicalRule, str], ...]  # the rule, why


@dataclasses.dataclass(frozen=True)
class Rules:
    """Ordered (dim, mesh axis | axes | None) rules.

    `optional` names dims that need not occur: a rule for any other dim that no array has is
    reported when a whole tree is placed.
    """

    rules: tuple[LogicalRule, ...]
    optional: frozenset[str] = frozenset()

    def __init__(self, rules: Iterable[Any], optional: Iterable[str] = ()) -> None:
        pairs, names = pairs_and_optional(rules, optional, "rules", "dim, axis")
        object.__setattr__(self, "rules", tuple(_rule(item) for item in pairs))
        object.__setattr__(self, "optional", names)
        unknown = sorted(self.optional - {rule.dim for rule in self.rules})
        if unknown:
            raise MeshwrightError(
                f"optional={unknown[0]!r} is not a dim of any rule"
                f"{did_you_mean(unknown[0], [rule.dim for rule in self.rules])}"
            )

    @classmethod
    def parse(cls, text: str) -> "Rules":
        """Read rules, one a line (or `;`): `batch -> dp+fsdp`, `kv -> none`, `length? -> sp`.

        `?` marks a dim as optional.
        """
        if not isinstance(text, str):
            raise MeshwrightError(f"rules {text!r} are not text; one 'dim -> axis' a line")
        rules: list[tuple[str, tuple[str, ...]]] = []
        optional: set[str] = set()
        for line in text.replace(";", "\n").split("\n"):
            if not line.strip():
                continue
            dim, arrow, axes_text = (part.strip() for part in line.partition("->"))
            if not arrow or not dim or not axes_text:
                raise MeshwrightError(
                    f"rule {line.strip()!r} is not 'dim -> axis', 'dim -> axis+axis' or "
                    "'dim -> none'"
                )
            if dim.endswith("?"):
                dim = dim[:-1].strip()
                optional.add(dim)
            axes = () if axes_text == _NONE else tuple(a.strip() for a in axes_text.split("+"))
            rules.append((dim, axes))
        return cls(rules, optional=optional)

    def __str__(self) -> str:
        marks = dict.fromkeys(self.optional, "?")
        return "\n".join(
            f"{rule.dim}{marks.get(rule.dim, '')} -> {rule.axes_text}" for rule in self.rules
        )

    def __repr__(self) -> str:
        return f"Rules.parse({'; '.join(str(self).splitlines())!r})"

    def spec(
        self,
        dims: str | Sequence[str | None],
        shape: Sequence[int] | None = None,
        mesh: "MeshLike | None" = None,
    ) -> "PartitionSpec":
        """The PartitionSpec of an array with these dims, checked with `shape` and `mesh`."""
        return self.layout(dims, shape, mesh).spec

    def layout(
        self,
        dims: str | Sequence[str | None],
        shape: Sequence[int] | None = None,
        mesh: "MeshLike | None" = None,
    ) -> Layout:
        layout = self.outcome(dims).layout
        return layout.check(
            None if mesh is None else mesh_shape_of(mesh),
            None if shape is None else whole_numbers(shape, "shape"),
            f"array ({' '.join(layout.dims)})",
        )

    def outcome(self, dims: str | Sequence[str | None]) -> RuleOutcome:
        """The layout, and which rules decided and lost."""
        return _decide(self, dim_names(dims))

    def rename_axes(self, **new: str | Sequence[str]) -> "Rules":
        """The same rules for a mesh with other names: `rename_axes(data=("dp", "fsdp"))`."""
        used = {axis for rule in self.rules for axis in rule.axes}
        for axis in new:
            if axis not in used:
                raise MeshwrightError(
                    f"rename_axes({axis}=…): no rule uses mesh axis {axis!r}"
                    f"{did_you_mean(axis, sorted(used))}"
                )
        names = {axis: _axes(new.get(axis, axis), "rename_axes") for axis in used}
        return Rules(
            [
                (rule.dim, tuple(name for axis in rule.axes for name in names[axis]))
                for rule in self.rules
            ],
            optional=self.optional,
        )


@functools.lru_cache(maxsize=4096)
def _decide(rules: Rules, dims: tuple[str | None, ...]) -> RuleOutcome:
    named = [dim for dim in dims if dim is not None]
    twice = first_repeated(named)
    if twice is not None:
        raise MeshwrightError(
            f"dims {' '.join(map(str, dims))!r} name {twice!r} twice, so a rule could not tell "
            "them apart; give them two names"
        )
    known = dict.fromkeys(rule.dim for rule in rules.rules)  # the same order in every process
    for dim in named:
        if dim not in known:
            raise MeshwrightError(
                f"no rule says where dim {dim!r} goes{did_you_mean(dim, known)} To keep it whole "
                f"say so: ({dim!r}, None), in a rules file '{dim} -> none'"
            )
    assigned: dict[str, tuple[str, ...]] = {}
    owner: dict[str, str] = {}
    fired, lost = [], []
    for rule in rules.rules:
        if rule.dim not in named:
            continue
        if rule.dim in assigned:
            lost.append((rule, f"{rule.dim} is placed already"))
            continue
        taken = [axis for axis in rule.axes if axis in owner]
        if taken:
            lost.append((rule, f"{taken[0]} already splits {owner[taken[0]]}"))
            continue
        assigned[rule.dim] = rule.axes
        owner |= dict.fromkeys(rule.axes, rule.dim)
        fired.append(rule)
    axes = tuple(assigned.get(dim, ()) if dim is not None else () for dim in dims)
    return RuleOutcome(Layout(axes, name_dims(dims)), tuple(fired), tuple(lost))


def standard_rules(
    activation_partitioning_dims: int = 1,
    parameter_partitioning_dims: int = 1,
    additional_rules: Iterable[Any] | None = None,
) -> Rules:
    """T5X's four standard sets over mesh axes data and model; `additional_rules` come last.

    `activation_partitioning_dims=2` also splits activations over model,
    `parameter_partitioning_dims=2` also splits weights over data. The names are T5X's.
    """
    activation_dims, parameter_dims = activation_partitioning_dims, parameter_partitioning_dims
    for name, value in (("activation", activation_dims), ("parameter", parameter_dims)):
        if whole_number(value, f"{name}_partitioning_dims") not in (1, 2):
            raise MeshwrightError(f"{name}_partitioning_dims={value!r} is not 1 or 2")
    rules: list[tuple[str, str | None]] = [("batch", "data")]
    if (activation_dims, parameter_dims) == (1, 1):
        rules += [("vocab", "model"), ("embed", None), ("mlp", "model"), ("heads", "model")]
        rules += [("kv", None), ("joined_kv", "model")]
    else:
        rules += [("vocab", "model"), ("mlp", "model"), ("heads", "model")]
        rules += [("kv", None), ("joined_kv", "model")]
        if activation_dims == 2:
            rules += [("embed", "model")]
        if parameter_dims == 2:
            rules += [("embed", "data")]
    whole = ("relpos_buckets", "abspos_buckets", "length", "layers", "stack", "mlp_activations")
    rules += [(dim, None) for dim in whole]
    standard = {dim for dim, _ in rules}
    more = () if additional_rules is None else additional_rules
    return Rules([*rules, *Rules(more).rules], optional=standard)


def _rule(item: Any) -> LogicalRule:
    if isinstance(item, LogicalRule):
        return item
    if isinstance(item, str) or not isinstance(item, Sequence) or len(item) != 2:
        raise MeshwrightError(f"rule {item!r} is not a pair (dim, mesh axis | axes | None)")
    dim, axes = item
    if not isinstance(dim, str) or not dim or any(c.isspace() or c in "?;@+>" for c in dim):
        raise MeshwrightError(f"rule {item!r}: {dim!r} is not a dim name")
    return LogicalRule(dim, _axes(axes, f"rule {item!r}"))


def _axes(axes: Any, given: str) -> tuple[str, ...]:
    if axes is None:
        return ()
    if not isinstance(axes, str | tuple | list):
        axes = (axes,)
    names = tuple(axes.split("+")) if isinstance(axes, str) else tuple(axes)
    for name in names:
        if not isinstance(name, str) or not name.isidentifier() or name == _NONE:
            raise MeshwrightError(
                f"{given}: {name!r} is not a mesh axis; give a name, a tuple of names, or None"
            )
    if first_repeated(names) is not None:
        raise MeshwrightError(f"{given} names a mesh axis twice; each can split a dim once")
    return names
