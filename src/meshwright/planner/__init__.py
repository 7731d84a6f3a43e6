"""Choose a mesh before there is a machine: what each would hold, send and take, and why."""

from meshwright.planner.links import over
from meshwright.planner.memory import memory
from meshwright.planner.parts import length, padding, strategy_of
from meshwright.planner.planner import plan, plan_config
from meshwright.planner.result import Choice, Estimate, Job, Memory, Plan, Refusal, Transfer
from meshwright.planner.rewrites import compiled_sends, compiled_traffic, in_stages
from meshwright.planner.serving import sends as serving_sends
from meshwright.planner.settings import CHOSEN, apply, choice_of, constraints_of, job_of
from meshwright.planner.shares import AXES, place_axes
from meshwright.planner.traffic import traffic

__all__ = [
    "AXES",
    "CHOSEN",
    "Choice",
    "Estimate",
    "Job",
    "Memory",
    "Plan",
    "Refusal",
    "Transfer",
    "apply",
    "choice_of",
    "compiled_sends",
    "compiled_traffic",
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
    "serving_sends",
    "strategy_of",
    "traffic",
]
