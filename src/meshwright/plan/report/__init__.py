"""A plan told: in the terminal, with its formulas filled in, as data, as a page."""

from meshwright.plan.report.data import plan_data, plan_from_data, read_plan
from meshwright.plan.report.explain import explain, find_mesh
from meshwright.plan.report.page import page
from meshwright.plan.report.terminal import report

__all__ = ["explain", "find_mesh", "page", "plan_data", "plan_from_data", "read_plan", "report"]
