"""A plan told: in the terminal, with its formulas filled in, as data, as a page."""

from typing import TYPE_CHECKING

from meshwright.lazy import import_when_used

if TYPE_CHECKING:
    from meshwright.planner.report.comparison import (
        comparison_data,
        comparison_page,
        comparison_report,
        curve_data,
        curve_lines,
    )
    from meshwright.planner.report.data import found_data, plan_data, plan_from_data, read_plan
    from meshwright.planner.report.explain import explain, find_mesh
    from meshwright.planner.report.load import load_data, load_report
    from meshwright.planner.report.page import page
    from meshwright.planner.report.terminal import report

__all__ = [
    "comparison_data", "comparison_page", "comparison_report", "curve_data", "curve_lines",
    "explain", "find_mesh", "found_data", "load_data", "load_report", "page", "plan_data",
    "plan_from_data", "read_plan", "report",
]  # fmt: skip

import_when_used(__name__)
