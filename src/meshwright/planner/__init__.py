"""Choose a mesh before there is a machine: what each would hold, send and take, and why."""

from meshwright.planner.auto import planned, planned_to_serve
from meshwright.planner.collective import Collective
from meshwright.planner.compilers import in_stages, staged
from meshwright.planner.links import over
from meshwright.planner.memory import memory
from meshwright.planner.parts import length, padding, strategy_of
from meshwright.planner.planner import plan, plan_config
from meshwright.planner.result import Choice, Estimate, Job, Memory, Plan, Refusal
from meshwright.planner.settings import CHOSEN, apply, choice_of, constraints_of, job_of
from meshwright.planner.shares import AXES, place_axes
from meshwright.planner.step import StepModel

__all__ = [
    "AXES",
    "CHOSEN",
    "Choice",
    "Collective",
    "Estimate",
    "Job",
    "Memory",
    "Plan",
    "Refusal",
    "StepModel",
    "apply",
    "choice_of",
    "constraints_of",
    "in_stages",
    "job_of",
    "length",
    "memory",
    "over",
    "padding",
    "place_axes",
    "plan",
    "plan_config",
    "planned",
    "planned_to_serve",
    "staged",
    "strategy_of",
]
