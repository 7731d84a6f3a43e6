"""Choose a mesh before there is a machine: what each would hold, send and take, and why."""

from typing import TYPE_CHECKING

from meshwright.lazy import import_when_used

if TYPE_CHECKING:
    from meshwright.audits import Collective
    from meshwright.planner.auto import planned, planned_to_serve
    from meshwright.planner.compilers import in_stages, staged
    from meshwright.planner.constraints import Constraints, constraints_of
    from meshwright.planner.goodput import LongRun
    from meshwright.planner.links import over, place_axes
    from meshwright.planner.load import Deployment, Deployments, Load, deployments
    from meshwright.planner.long_run import batch_for, sequences
    from meshwright.planner.machines_compared import (
        Comparison,
        Offer,
        Run,
        Size,
        compare,
        machines_named,
        planned_sizes,
        without_price,
    )
    from meshwright.planner.memory import memory
    from meshwright.planner.planner import check_kind, plan, plan_config
    from meshwright.planner.program import ProgramPlan, plan_partitioned
    from meshwright.planner.result import Estimate, Memory, Plan, Refusal
    from meshwright.planner.step import StepModel
    from meshwright.planner.workload import Choice, Workload, apply

__all__ = [
    "Choice", "Collective", "Comparison", "Constraints", "Deployment", "Deployments", "Estimate",
    "Load", "LongRun", "Memory", "Offer", "Plan", "ProgramPlan", "Refusal", "Run", "Size",
    "StepModel", "Workload", "apply", "batch_for", "check_kind", "compare", "constraints_of",
    "deployments", "in_stages", "machines_named", "memory", "over", "place_axes", "plan",
    "plan_config", "plan_partitioned", "planned", "planned_sizes", "planned_to_serve", "sequences",
    "staged", "without_price",
]  # fmt: skip

import_when_used(__name__)
