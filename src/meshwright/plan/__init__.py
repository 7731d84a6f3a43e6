"""Choose a mesh before there is a machine: what each would hold, send and take, and why."""

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
