"""Choose a mesh before there is a machine: what each would hold, send and take, and why."""

from meshwright.audits import Collective
from meshwright.planner.auto import planned, planned_to_serve
from meshwright.planner.compilers import in_stages, staged
from meshwright.planner.constraints import constraints_of
from meshwright.planner.links import over, place_axes
from meshwright.planner.memory import memory
from meshwright.planner.planner import plan, plan_config
from meshwright.planner.result import Estimate, Memory, Plan, Refusal
from meshwright.planner.step import StepModel
from meshwright.planner.workload import CHOSEN, Choice, Workload, apply

__all__ = [
    "CHOSEN",
    "Choice",
    "Collective",
    "Estimate",
    "Memory",
    "Plan",
    "Refusal",
    "StepModel",
    "Workload",
    "apply",
    "constraints_of",
    "in_stages",
    "memory",
    "over",
    "place_axes",
    "plan",
    "plan_config",
    "planned",
    "planned_to_serve",
    "staged",
]
