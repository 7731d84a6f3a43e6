"""What a user says about the mesh that is to be chosen.

>>> limits = parse("fsdp=*,tp<=8,sp=1")
>>> limits.allows(Choice.of(fsdp=64, tp=4)), limits.allows(Choice.of(fsdp=16, tp=16))
(True, False)
"""

import dataclasses
import operator
import re
from collections.abc import Collection, Mapping
from typing import Any

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.launch import flat_settings
from meshwright.meshes import FIELD_ROLES, ROLES, STANDARD_AXES, check_role
from meshwright.planner.workload import CHOSEN, Choice
from meshwright.present import count
from meshwright.training import AUTO, TrainConfig, training_spec

_COMPARE = {"=": operator.eq, "<=": operator.le, ">=": operator.ge}


@dataclasses.dataclass(frozen=True)
class Constraints:
    """Limits of axes, in the order said, and what else of a Choice is fixed."""

    limits: tuple[tuple[str, str, int], ...] = ()
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # fields of Choice

    def allows(self, choice: Choice) -> bool:
        return all(
            _COMPARE[how](choice.sizes.get(axis, 1), size) for axis, how, size in self.limits
        )

    def __str__(self) -> str:
        return ",".join(f"{axis}{how}{size}" for axis, how, size in self.limits)


def parse(text: str | None) -> Constraints:
    """`fsdp=*,tp<=8,sp=1`: a size, a limit, or `*` (or -1) for any; or all sizes: `1,-1,2,1`."""
    if text is None:
        return Constraints()
    if not isinstance(text, str):
        raise MeshwrightError(
            f"mesh {text!r} is no text of limits; write 'tp=2', 'fsdp=*,tp<=8' or, for all axes "
            f"in the order {', '.join(STANDARD_AXES)}, '1,-1,2,1'"
        )
    if text.strip() in ("auto", "*"):
        return Constraints()
    if not text.strip():
        raise MeshwrightError(
            f"mesh {text!r} is empty; write limits, such as 'fsdp=*,tp<=8', or leave it out"
        )
    sizes = [said.strip() for said in text.split(",")]
    if all(re.fullmatch(r"-?[0-9]{1,9}|\*", size) for size in sizes):
        if len(sizes) != len(STANDARD_AXES):
            raise MeshwrightError(
                f"mesh {text!r} has {count(len(sizes), 'size')} without a name; give one for each "
                f"of {', '.join(STANDARD_AXES)}, or name them: tp=2"
            )
        text = ",".join(f"{axis}={size}" for axis, size in zip(STANDARD_AXES, sizes, strict=True))
    limits = []
    named: list[tuple[str, str]] = []
    for said in text.split(","):
        found = re.fullmatch(r"\s*(\w+)\s*(<=|>=|=)\s*(\*|-?[0-9]{1,9})\s*(?::\s*(\w+)\s*)?", said)
        if found is None:
            raise MeshwrightError(
                f"mesh {text!r}: {said.strip()!r} is not a limit of an axis; write tp=8, tp<=8, "
                "tp>=2 or tp=* for any, with commas between"
            )
        axis, how, size, role = found.groups()
        axis = role or FIELD_ROLES.get(axis, axis)
        if axis not in ROLES:
            raise MeshwrightError(
                f"mesh {text!r}: {axis!r} is not an axis{did_you_mean(axis, STANDARD_AXES)}"
            )
        if size not in ("*", "-1") and not _COMPARE[how](1, int(size)):
            check_role(axis, f"mesh {text!r}")
        same_axis = [limit_how for limit_axis, limit_how in named if limit_axis == axis]
        if how in same_axis or (same_axis and "=" in (how, *same_axis)):
            raise MeshwrightError(
                f"mesh {text!r} limits axis {axis!r} twice; give one size (tp=8), or a range "
                "(tp>=2,tp<=8)"
            )
        named.append((axis, how))
        if how == "=" and size in ("*", "-1"):
            continue
        if size == "*" or int(size) < 1:
            raise MeshwrightError(
                f"mesh {text!r}: the size in {axis}{how}{size} must be at least 1"
            )
        limits.append((axis, how, int(size)))
    return Constraints(tuple(limits))


def constraints_of(
    config: TrainConfig, named: Collection[str] = (), mesh: str | None = None
) -> Constraints:
    """What a config leaves to be chosen: the mesh, and settings that have their default value.

    Settings in `named`, by their dotted names, are kept in any case. Limits of the `mesh` take the
    place of the config's mesh.
    """
    values, usual = flat_settings(config), flat_settings(TrainConfig(config.model))
    if mesh is None:
        mesh = AUTO if config.mesh == AUTO else str(training_spec(config)).removeprefix("!")
        mesh = None if mesh == usual["mesh"] else mesh
    limits = parse(mesh)
    fixed = {
        field: values[setting]
        for field, setting in CHOSEN.items()
        if setting in named or values[setting] != usual[setting]
    }
    return Constraints(limits.limits, fixed)
