"""What a compiled program really sends: every collective as a row, planned or a surprise."""

import sys
import types
from typing import Any

from meshwright.audit.audit import Audit, Sum, audit
from meshwright.audit.collective import OPERATIONS, Collective
from meshwright.audit.expected import BOOKKEEPING, Expected, expected_of
from meshwright.audit.groups import axes_between, part_of_axes, replica_groups
from meshwright.audit.loops import instructions
from meshwright.audit.memory import Buffer, Replicated
from meshwright.audit.program import Instruction, read_program
from meshwright.audit.read import collectives

__all__ = [
    "BOOKKEEPING",
    "OPERATIONS",
    "Audit",
    "Buffer",
    "Collective",
    "Expected",
    "Instruction",
    "Replicated",
    "Sum",
    "audit",
    "axes_between",
    "collectives",
    "expected_of",
    "instructions",
    "part_of_axes",
    "read_program",
    "replica_groups",
]


class _Callable(types.ModuleType):
    """`mw.audit(…)` is the function, though this package has its name."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return audit(*arguments, **options)


_Callable.__doc__ = audit.__doc__
sys.modules[__name__].__class__ = _Callable
