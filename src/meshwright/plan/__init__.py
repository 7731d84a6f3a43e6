"""Choose a mesh before there is a machine: what each would hold, send and take, and why."""

import sys
import types
from typing import Any

from meshwright.plan.plan import make_job, plan
from meshwright.plan.result import Choice, Estimate, Job, Memory, Plan, Refusal, Transfer

__all__ = [
    "Choice",
    "Estimate",
    "Job",
    "Memory",
    "Plan",
    "Refusal",
    "Transfer",
    "make_job",
    "plan",
]


class _Callable(types.ModuleType):
    """`mw.plan(…)` is the function, though this package has its name."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return plan(*arguments, **options)


_Callable.__doc__ = plan.__doc__
sys.modules[__name__].__class__ = _Callable
