"""Logical-axis rules: `embed -> fsdp`, ordered, with T5X's semantics.

    >>> rules = Rules([("batch", "data"), ("mlp", "model"), ("embed", "model"), ("embed", "data")])
    >>> rules.spec(("embed", "mlp"))
    P('data', 'model')

Rules are walked in order. A rule fires if its dim is in the array and not yet assigned and none of
its mesh axes is used in the array yet; a losing rule is skipped and a later one for the same dim is
the fallback. None keeps the dim whole and is final. Several axes are all or nothing.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.layout.arrays import dim_names
from meshwright.layout.layout import Layout, name_dims

_NONE = "none"


@dataclasses.dataclass(frozen=True)
class LogicalRule:
    dim: str
    axes: tuple[str, ...]  # empty: stays whole

    def __str__(self) -> str:
        return f"{self.dim} -> {'+'.join(self.axes) or _NONE}"


@dataclasses.dataclass(frozen=True)
class RuleOutcome:
    """What the rules made of one array: the layout, who decided each dim, and who lost to what."""

    layout: Layout
    fired: tuple[int, ...]  # positions in the rule list
    lost: tuple[tuple[int, str], ...]  # position, why


class Rules:
    """Ordered (dim, mesh axis | axes | None) rules.

    `optional` names dims that need not occur: a rule for any other dim that no array has is
    reported when a whole tree is placed.
    """

    def __init__(self, rules: Sequence[Any], optional: Sequence[str] = ()) -> None:
        self.rules = tuple(_rule(item) for item in rules)
        self.optional = frozenset(optional)
        unknown = sorted(self.optional - {rule.dim for rule in self.rules})
        if unknown:
            raise MeshwrightError(
                f"optional={unknown[0]!r} is not a dim of any rule"
                f"{did_you_mean(unknown[0], [rule.dim for rule in self.rules])}"
            )
        self._outcome = functools.lru_cache(maxsize=4096)(self._decide)

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
        return cls(rules, optional=tuple(optional))

    def __str__(self) -> str:
        marks = dict.fromkeys(self.optional, "?")
        return "\n".join(
            f"{rule.dim}{marks.get(rule.dim, '')} -> {'+'.join(rule.axes) or _NONE}"
            for rule in self.rules
        )

    def __repr__(self) -> str:
        return f"Rules.parse({'; '.join(str(self).splitlines())!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rules) and (self.rules, self.optional) == (
            other.rules,
            other.optional,
        )

    def __hash__(self) -> int:
        return hash((self.rules, self.optional))

    def spec(
        self,
        dims: str | Sequence[str | None],
        shape: Sequence[int] | None = None,
        mesh: Any = None,
    ) -> PartitionSpec:
        """Where an array with these dims goes; with `shape` and `mesh`, checked against them."""
        return self.layout(dims, shape, mesh).spec

    def layout(
        self,
        dims: str | Sequence[str | None],
        shape: Sequence[int] | None = None,
        mesh: Any = None,
    ) -> Layout:
        outcome = self.outcome(dims)
        mesh_shape = None if mesh is None else mesh_shape_of(mesh)
        return outcome.layout.check(
            mesh_shape, shape, f"array ({' '.join(map(str, dim_names(dims)))})"
        )

    def outcome(self, dims: str | Sequence[str | None]) -> RuleOutcome:
        """The layout, and which rules decided and lost."""
        return self._outcome(dim_names(dims))

    def _decide(self, dims: tuple[str | None, ...]) -> RuleOutcome:
        named = [dim for dim in dims if dim is not None]
        twice = [dim for i, dim in enumerate(named) if dim in named[:i]]
        if twice:
            raise MeshwrightError(
                f"dims {' '.join(map(str, dims))!r} name {twice[0]!r} twice, so a rule could not "
                "tell them apart; give them two names"
            )
        known = {rule.dim for rule in self.rules}
        for dim in named:
            if dim not in known:
                raise MeshwrightError(
                    f"no rule says where dim {dim!r} goes{did_you_mean(dim, known)} To keep it "
                    f"whole say so: ({dim!r}, None)"
                )
        assigned: dict[str, tuple[str, ...]] = {}
        owner: dict[str, str] = {}
        fired, lost = [], []
        for position, rule in enumerate(self.rules):
            if rule.dim not in named:
                continue
            if rule.dim in assigned:
                lost.append((position, f"{rule.dim} is placed already"))
                continue
            taken = [axis for axis in rule.axes if axis in owner]
            if taken:
                lost.append((position, f"{taken[0]} already splits {owner[taken[0]]}"))
                continue
            assigned[rule.dim] = rule.axes
            owner |= dict.fromkeys(rule.axes, rule.dim)
            fired.append(position)
        axes = tuple(assigned.get(dim, ()) if dim is not None else () for dim in dims)
        return RuleOutcome(Layout(axes, name_dims(dims)), tuple(fired), tuple(lost))

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
            optional=tuple(self.optional),
        )


def standard_rules(
    activation_dims: int = 1, parameter_dims: int = 1, additional: Sequence[Any] = ()
) -> Rules:
    """T5X's four standard sets over mesh axes data and model; `additional` rules come last.

    `activation_dims=2` also splits activations over model, `parameter_dims=2` also splits weights
    over data.
    """
    for name, value in (("activation_dims", activation_dims), ("parameter_dims", parameter_dims)):
        if value not in (1, 2):
            raise MeshwrightError(f"{name}={value!r} is not 1 or 2")
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
    return Rules([*rules, *additional], optional=tuple({dim for dim, _ in rules}))


def mesh_shape_of(mesh: Any) -> Mapping[str, int]:
    """Axis sizes of a mesh, or of mesh text whose sizes are all given."""
    from meshwright.mesh import MeshSpec

    if isinstance(mesh, str | MeshSpec):
        spec = MeshSpec.parse(mesh)
        if not spec.is_resolved:
            raise MeshwrightError(
                f"mesh {spec.quoted} leaves a size open (-1); give it, or pass mw.mesh('{spec}')"
            )
        return dict(spec.axes)
    shape = getattr(mesh, "shape", mesh)
    if not isinstance(shape, Mapping):
        raise MeshwrightError(
            f"mesh={mesh!r} is not a mesh; give text ('fsdp=2,tp=4'), mw.mesh(…) or a jax Mesh"
        )
    return shape


def _rule(item: Any) -> LogicalRule:
    if isinstance(item, LogicalRule):
        return item
    if isinstance(item, str) or not isinstance(item, Sequence) or len(item) != 2:
        raise MeshwrightError(f"rule {item!r} is not a pair (dim, mesh axis | axes | None)")
    dim, axes = item
    if (
        not isinstance(dim, str)
        or not dim
        or dim != dim.strip()
        or set(dim) & set("?;\n@+")
        or ("->" in dim)
    ):
        raise MeshwrightError(f"rule {item!r}: {dim!r} is not a dim name")
    return LogicalRule(dim, _axes(axes, f"rule {item!r}"))


def _axes(axes: Any, given: str) -> tuple[str, ...]:
    if axes is None:
        return ()
    if not isinstance(axes, str | tuple | list):
        raise MeshwrightError(
            f"{given}: {axes!r} is not a mesh axis; give a name, a tuple of names, or None"
        )
    names = tuple(axes.split("+")) if isinstance(axes, str) else tuple(axes)
    for name in names:
        if not isinstance(name, str) or not name.isidentifier() or name == _NONE:
            raise MeshwrightError(
                f"{given}: {name!r} is not a mesh axis; give a name, a tuple of names, or None"
            )
    if len(set(names)) < len(names):
        raise MeshwrightError(f"{given} names a mesh axis twice; each can split a dim once")
    return names
