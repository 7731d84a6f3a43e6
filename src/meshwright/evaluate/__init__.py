"""Evaluate a model: loss and perplexity on data, multiple choice, lm-eval's tasks."""

from meshwright.evaluate.choices import (
    ChoiceScores,
    answer_choices,
    check_scores_choices,
    read_questions,
)
from meshwright.evaluate.loss import StoreLoss, store_loss
from meshwright.evaluate.tasks import TaskResults, Tasks, run_tasks

__all__ = [
    "ChoiceScores", "StoreLoss", "TaskResults", "Tasks", "answer_choices",
    "check_scores_choices", "read_questions", "run_tasks", "store_loss",
]  # fmt: skip
