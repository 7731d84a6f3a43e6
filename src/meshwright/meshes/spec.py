"""MeshSpec: axis names and sizes, before any device is known.

    >>> str(MeshSpec.parse("1,-1,4,1"))
    'dp=1,fsdp=-1,tp=4,sp=1'
    >>> str(MeshSpec.parse("1,-1,4,1").resolve(64))
    'dp=1,fsdp=16,tp=4,sp=1'
    >>> str(MeshSpec.parse("data=8:dp,model=4:tp").by_role())
    'dp=8,tp=4'

The order written is the order of the axes, and so decides placement: the last axis gets the
nearest neighbours. Only -1 infers, and only once.
"""

import dataclasses
import difflib
import itertools
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, Self

from meshwright.arithmetic import divisors, first_repeated
from meshwright.errors import MeshwrightError, did_you_mean, one_of
from meshwright.present import Column, Row, count, table_html, text_html

STANDARD_AXES = ("dp", "fsdp", "tp", "sp")
# what an axis does: replicate, shard, tensor, context, expert, stage
ROLES = (*STANDARD_AXES, "ep", "pp")
# names the field uses beside the roles; they may stand with them in one mesh
FIELD_ROLES = {
    "mp": "tp", "mp1": "tp", "mp2": "tp", "model": "tp", "data": "dp", "replica": "dp",
    "cp": "sp", "expert": "ep", "stage": "pp",
}  # fmt: skip

MOST_TRIED = 4096  # meshes, before a message says that none fits
RESERVED_AXIS = "unnamed_"  # axes of bare devices, where an expression is placed without a mesh
_AXIS_NAME = re.compile(r"[^\W\d]\w*")
_SIZE = re.compile(r"[+-]?[0-9]{1,9}")


Accepts = Callable[[Mapping[str, int]], bool]  # whether a mesh of these sizes can be used


class MeshShape(Protocol):
    """What layouts need of a mesh: a jax Mesh, a MachineMesh or a MeshSpec with all sizes."""

    @property
    def shape(self) -> Mapping[str, int]: ...
    @property
    def axis_names(self) -> tuple[str, ...]: ...
    @property
    def axis_sizes(self) -> tuple[int, ...]: ...
    @property
    def size(self) -> int: ...
    def __hash__(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class MeshSpec:
    """Named axes with sizes (-1: whatever is left); `plain`: ignore the topology (`!`).

    `roles` are those that were given to axes with names of their own: `(("data", "dp"),)`.
    """

    axes: tuple[tuple[str, int], ...]
    plain: bool = False
    given: str = dataclasses.field(default="", compare=False, repr=False)  # as the user wrote it
    roles: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        try:
            pairs = tuple((name, operator.index(size)) for name, size in self.axes)
        except (TypeError, ValueError):
            raise MeshwrightError(
                f"MeshSpec axes {self.axes!r} are not pairs (name, size); or read a text: "
                "MeshSpec.parse('dp=2,tp=4')"
            ) from None
        object.__setattr__(self, "axes", pairs)
        given = f"mesh '{self}'"
        if not self.axes:
            raise MeshwrightError("a mesh needs at least one axis, as in 'dp=8'")
        _check_names([name for name, _ in self.axes], given)
        _check_sizes(self.axes, given)

    @classmethod
    def parse(cls, text: "str | MeshSpec", axes: Sequence[str] | None = None) -> "MeshSpec":
        """Read a mesh: `dp=1,fsdp=-1,tp=4`, `dp:1,fsdp:-1,tp:4`, or `1,-1,4`; `!` in front.

        A name of your own takes a role: `data=8:dp,model=4:tp`.
        `axes` names the axes yourself: sizes may then be positional, and every name must appear.
        """
        if axes is not None:
            axes = _declared(axes)
        if isinstance(text, MeshSpec):
            if axes is not None:
                _check_all_present([name for name, _ in text.axes], axes, f"mesh '{text}'")
            return text
        if not isinstance(text, str):
            raise MeshwrightError(
                f"mesh {text!r} is not text; write 'dp=1,fsdp=-1,tp=4' or '1,-1,4,1'"
            )
        given = f"mesh {text!r}"
        body = text.strip()
        plain = body.startswith("!")
        items = [item.strip() for item in body.removeprefix("!").split(",")]
        if items == [""]:
            raise MeshwrightError(f"{given} is empty; write 'dp=1,fsdp=-1,tp=4' or '1,-1,4,1'")
        if "" in items:
            raise MeshwrightError(f"{given} has an empty entry; give one size between two commas")
        named = [("=" in item or ":" in item) for item in items]
        if any(named) and not all(named):
            bare = items[named.index(False)]
            raise MeshwrightError(
                f"{given} mixes named and positional sizes: {bare!r} has no axis name; name every "
                "axis or none"
            )
        items, roles = _without_roles(items, given)
        pairs = _named_pairs(items, given) if all(named) else _positional_pairs(items, axes, given)
        _check_names([name for name, _ in pairs], given)
        _check_sizes(pairs, given)
        if axes is not None:
            _check_all_present([name for name, _ in pairs], axes, given)
        else:
            _check_vocabulary([name for name, _ in pairs if name not in roles], given)
        return cls(tuple(pairs), plain, text, tuple(roles.items()))

    @classmethod
    def from_mp_mesh_dim(cls, text: str, fsdp: bool = False) -> "MeshSpec":
        """EasyLM's older `--mp_mesh_dim='8,1'`: the model-parallel axes mp1, mp2; the rest is data.

        With `fsdp` the data axis is called fsdp, since weights are then split over it too.
        -1 gives that axis every device that is left.
        """
        given = f"mp_mesh_dim {text!r}"
        items = [item.strip() for item in text.split(",")] if isinstance(text, str) else []
        if not items or len(items) > 2:
            raise MeshwrightError(f"{given} takes one or two sizes (mp1, mp2), as in '8,1'")
        sizes = [_size(item, given) for item in items] + [1] * (2 - len(items))
        pairs = [("fsdp" if fsdp else "dp", 1 if -1 in sizes else -1)]
        pairs += zip(("mp1", "mp2"), sizes, strict=True)
        _check_sizes(pairs, given)
        return cls(tuple(pairs), given=text)

    def __str__(self) -> str:
        roles = {name: f":{role}" for name, role in self.roles}
        body = ",".join(f"{name}={size}{roles.get(name, '')}" for name, size in self.axes)
        return f"!{body}" if self.plain else body

    def _repr_html_(self) -> str:
        columns = [Column("axis", right=False), Column("size")]
        rows = [Row((name, "what is left" if n == -1 else str(n))) for name, n in self.axes]
        return text_html(f"mesh {self}") + table_html(columns, rows)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    @property
    def shape(self) -> dict[str, int]:
        return dict(self.axes)

    @property
    def size(self) -> int:
        return math.prod(self.sizes)

    axis_names, axis_sizes = names, sizes  # as jax calls them

    @property
    def is_resolved(self) -> bool:
        return -1 not in self.sizes

    @property
    def quoted(self) -> str:
        """For messages: what was written, and what that means where it is not plain."""
        given = self.given.strip()
        return f"'{self}'" if given in ("", str(self)) else f"'{given}' ({self})"

    def role(self, name: str) -> str:
        """What an axis does: the role it was given, or that of a name the field uses."""
        known = dict.fromkeys(ROLES) | FIELD_ROLES | dict(self.roles)
        if name not in known:
            raise MeshwrightError(
                f"mesh {self.quoted}: axis {name!r} has no role; the axes are "
                f"{', '.join(STANDARD_AXES)}, and a name of your own takes one of these as its "
                f"role: {name}=SIZE:tp"
            )
        return known[name] or name

    def by_role(self) -> Self:
        """The same mesh with axes named after their roles; neighbours of one role are one axis.

        >>> str(MeshSpec.parse("dp=2,mp1=4,mp2=2").by_role())
        'dp=2,tp=8'
        """
        found: dict[str, int] = {}
        for name, size in self.axes:
            role = self.role(name)
            if role in found and role != list(found)[-1]:
                raise MeshwrightError(
                    f"mesh {self.quoted}: axis {name!r} has the role {role!r} of another axis that "
                    "does not stand beside it; move them together"
                )
            if role in found and -1 in (found[role], size):
                raise MeshwrightError(
                    f"mesh {self.quoted}: axes of one role, here {role!r}, are one axis, so none "
                    "of them can be -1; give each a size"
                )
            found[role] = found.get(role, 1) * size
        return dataclasses.replace(self, axes=tuple(found.items()), roles=())

    def with_standard_axes(self) -> Self:
        """The axes by role, with every standard axis in it, those not named with size 1.

        An axis of experts is there if it was named.

        >>> str(MeshSpec.parse("fsdp=-1,tp=4").with_standard_axes())
        'fsdp=-1,tp=4,dp=1,sp=1'
        >>> str(MeshSpec.parse("ep=8,pp=1").with_standard_axes())
        'ep=8,dp=1,fsdp=1,tp=1,sp=1'
        """
        spec = self.by_role()
        for role, size in spec.axes:
            if size != 1:
                check_role(role, f"mesh {self.quoted}")
        axes = tuple(pair for pair in spec.axes if pair[0] in (*STANDARD_AXES, "ep"))
        missing = tuple((axis, 1) for axis in STANDARD_AXES if axis not in spec.names)
        return dataclasses.replace(spec, axes=axes + missing)

    def resolve(
        self, num_devices: int, where: str = "here", accepts: "Accepts | None" = None
    ) -> Self:
        """Fill in -1 and check that the mesh takes exactly `num_devices`.

        An error proposes meshes that fit, of those that `accepts` takes (default: all).
        """
        if num_devices < 1:
            raise MeshwrightError(f"mesh {self.quoted} cannot be laid on {num_devices} devices")
        known = math.prod(size for size in self.sizes if size != -1)
        there = f"{num_devices} {'is' if num_devices == 1 else 'are'} {where}"
        if self.is_resolved:
            if known != num_devices:
                raise MeshwrightError(
                    f"mesh {self.quoted} needs {count(known, 'device')}, {there}; "
                    f"{self._proposals(num_devices, accepts)}"
                )
            return self
        rest, remainder = divmod(num_devices, known)
        if remainder or not rest:
            raise MeshwrightError(
                f"mesh {self.quoted}: the sizes given multiply to {known}, which does not divide "
                f"the {num_devices} devices {where}; {self._proposals(num_devices, accepts)}"
            )
        return dataclasses.replace(
            self, axes=tuple((name, rest if size == -1 else size) for name, size in self.axes)
        )

    def _proposals(self, num_devices: int, accepts: "Accepts | None") -> str:
        """The end of a sentence: up to three meshes of the same axes that would fit."""
        fits = []
        for sizes in itertools.islice(nearest_sizes(self.sizes, num_devices), MOST_TRIED):
            spec = dataclasses.replace(self, axes=tuple(zip(self.names, sizes, strict=True)))
            if accepts is None or accepts(spec.resolve(num_devices).shape):
                fits.append(str(spec))
            if len(fits) == 3:
                break
        if fits:
            return f"{one_of(fits)} would fit"
        return f"no mesh of these axes fits the model on {count(num_devices, 'device')}"


def check_role(role: str, given: str) -> None:
    """Raise for a role of an axis that no model here divides anything over."""
    if role == "pp":
        raise MeshwrightError(
            f"{given}: the models here have no pipeline stages, so pp must be 1; the axes are "
            f"{', '.join((*STANDARD_AXES, 'ep'))}"
        )


def nearest_sizes(sizes: Sequence[int], num_devices: int) -> Iterator[tuple[int, ...]]:
    """Other sizes of the same axes that take `num_devices`, nearest first; -1 stays.

    Near: few axes changed, then by how far (in factors) they moved.

    >>> list(nearest_sizes((2, 3), 8))
    [(2, 4), (4, 2), (1, 8), (8, 1)]
    """
    fixed = [i for i, size in enumerate(sizes) if size != -1]
    infers = len(fixed) < len(sizes)

    def distance(new: tuple[int, ...]) -> float:
        return round(sum(abs(math.log(new[i] / sizes[i])) for i in fixed), 9)

    for changes in range(1, len(fixed) + 1):
        found = set()
        for changed in itertools.combinations(fixed, changes):
            kept = math.prod(sizes[i] for i in fixed if i not in changed)
            if num_devices % kept:
                continue
            for parts in _factorings(num_devices // kept, changes, exact=not infers):
                if all(part != sizes[i] for i, part in zip(changed, parts, strict=True)):
                    new = dict(zip(changed, parts, strict=True))
                    found.add(tuple(new.get(i, size) for i, size in enumerate(sizes)))
        yield from sorted(found, key=lambda new: (distance(new), new))


def _factorings(number: int, parts: int, exact: bool) -> Iterator[tuple[int, ...]]:
    """Ways to write `number` (or, if not exact, a divisor of it) as a product of `parts`."""
    if parts == 1:
        yield from ((number,),) if exact else ((d,) for d in divisors(number))
        return
    for d in divisors(number):
        for rest in _factorings(number // d, parts - 1, exact):
            yield (d, *rest)


def _declared(axes: Sequence[str]) -> tuple[str, ...]:
    if not isinstance(axes, str | tuple | list):
        raise MeshwrightError(f"axes={axes!r} are not names; give a tuple, or 'dp,tp'")
    names = tuple(axes.split(",")) if isinstance(axes, str) else tuple(axes)
    names = tuple(name.strip() if isinstance(name, str) else name for name in names)
    if not names:
        raise MeshwrightError("axes=() names no axis; a mesh needs at least one")
    _check_names(names, f"axes={names!r}")
    return names


def _without_roles(items: list[str], given: str) -> tuple[list[str], dict[str, str]]:
    """Entries `name=size:role` as `name=size`, and the roles by name."""
    plain: list[str] = []
    roles: dict[str, str] = {}
    for item in items:
        parts = [part.strip() for part in re.split("[=:]", item)]
        if len(parts) > 2:
            name, size, role = parts[0], parts[1], ":".join(parts[2:])
            if role not in ROLES:
                raise MeshwrightError(
                    f"{given}: {role!r} is not the role of an axis{did_you_mean(role, ROLES)}"
                )
            if name in ROLES and name != role:
                raise MeshwrightError(
                    f"{given}: axis {name!r} has the role of its name; write {role}={size}, or a "
                    f"name of your own: NAME={size}:{role}"
                )
            if "=" in item.partition(":")[2] or item.count("=") > 1:
                raise MeshwrightError(f"{given}: {item!r} is not NAME=SIZE:ROLE, as in data=8:dp")
            item = f"{name}={size}"
            roles |= {} if name == role else {name: role}
        plain.append(item)
    return plain, roles


def _named_pairs(items: list[str], given: str) -> list[tuple[str, int]]:
    pairs = []
    for item in items:
        name, _, size = re.split(r"([=:])", item, maxsplit=1)
        pairs.append((name.strip(), _size(size.strip(), given)))
    return pairs


def _positional_pairs(
    items: list[str], axes: Sequence[str] | None, given: str
) -> list[tuple[str, int]]:
    sizes = [_size(item, given) for item in items]
    if axes is not None:
        if len(sizes) != len(axes):
            raise MeshwrightError(
                f"{given} has {count(len(sizes), 'size')} for {count(len(axes), 'axis')} "
                f"({','.join(axes)}); give one size each"
            )
        return list(zip(axes, sizes, strict=True))
    if len(sizes) not in (3, 4):
        raise MeshwrightError(
            f"{given} has {count(len(sizes), 'size')}; positional sizes are three (dp,fsdp,tp) or "
            "four (dp,fsdp,tp,sp): name the axes, as in 'dp=2,tp=4'"
        )
    return list(zip(STANDARD_AXES, sizes, strict=False))


def _size(text: str, given: str) -> int:
    if not _SIZE.fullmatch(text):
        raise MeshwrightError(
            f"{given}: {text!r} is not a size; sizes are whole numbers, or -1 for what is left, "
            "with commas between"
        )
    return int(text)


def _check_names(names: Sequence[str], given: str) -> None:
    for name in names:
        if not isinstance(name, str) or not _AXIS_NAME.fullmatch(name):
            raise MeshwrightError(
                f"{given}: {name!r} is not an axis name; a name is a letter or _, then letters, "
                "digits and _"
            )
        if name.startswith(RESERVED_AXIS):
            raise MeshwrightError(f"{given}: names that start with {RESERVED_AXIS!r} are taken")
    twice = first_repeated(names)
    if twice is not None:
        raise MeshwrightError(f"{given} names axis {twice!r} twice; name each axis once")


def _check_sizes(pairs: Sequence[tuple[str, int]], given: str) -> None:
    for name, size in pairs:
        if size < 1 and size != -1:
            raise MeshwrightError(
                f"{given}: {name}={size} is not a size; use 1 or more, or -1 for what is left"
            )
    inferred = [name for name, size in pairs if size == -1]
    if len(inferred) > 1:
        raise MeshwrightError(
            f"{given} infers {' and '.join(inferred)}; only one axis can be -1: give the others a "
            "size"
        )


def _check_all_present(names: Sequence[str], axes: Sequence[str], given: str) -> None:
    for name in names:
        if name not in axes:
            raise MeshwrightError(
                f"{given}: axis {name!r} is not one of {','.join(axes)}{did_you_mean(name, axes)}"
            )
    missing = [axis for axis in axes if axis not in names]
    if missing:
        raise MeshwrightError(
            f"{given} gives no size to {' and '.join(missing)}; give each of {','.join(axes)} "
            f"once: add {','.join(f'{axis}=1' for axis in missing)}"
        )


def _check_vocabulary(names: Sequence[str], given: str) -> None:
    """Without `axes=`, a name beside standard ones, or close to one, is taken for a slip."""
    known = (*ROLES, *FIELD_ROLES)
    mixed = any(name in STANDARD_AXES for name in names)
    for name in names:
        if name in known:
            continue
        slip = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.75)
        if mixed or slip:
            raise MeshwrightError(
                f"{given}: axis {name!r} is not known{did_you_mean(name, known)} A name "
                f"of your own takes a role: {name}=SIZE:dp"
            )
