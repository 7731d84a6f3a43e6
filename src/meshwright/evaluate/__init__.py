"""Evaluation of trained models."""

from meshwright.evaluate.needle import Group, Retrieval, check_needle, needle_rules, retrieve

__all__ = [
    "Group", "Retrieval", "check_needle", "needle_rules", "retrieve",
]  # fmt: skip
