"""Evaluation of trained models."""

from meshwright.evaluate.needle import RULES, Group, Retrieval, check_needle, retrieve

__all__ = [
    "RULES",
    "Group",
    "Retrieval",
    "check_needle",
    "retrieve",
]
