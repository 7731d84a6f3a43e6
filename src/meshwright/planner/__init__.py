"""Choose a mesh before there is a machine: what each would hold, send and take, and why."""

from meshwright.planner.candidates import with_strategy
from meshwright.planner.links import over
from meshwright.planner.memory import memory
from meshwright.planner.parts import length, padding, strategy_of
from meshwright.planner.planner import make_job, plan
from meshwright.planner.result import Choice, Estimate, Job, Memory, Plan, Refusal, Transfer
from meshwright.planner.rewrites import compiled_rows, compiled_traffic, in_stages
from meshwright.planner.shares import AXES, place_axes
from meshwright.planner.traffic import traffic

__all__ = [
    "AXES",
    "Choice",
    "Estimate",
    "Job",
    "Memory",
    "Plan",
    "Refusal",
    "Transfer",
    "compiled_rows",
    "compiled_traffic",
    "in_stages",
    "length",
    "make_job",
    "memory",
    "over",
    "padding",
    "place_axes",
    "plan",
    "strategy_of",
    "traffic",
    "with_strategy",
]
