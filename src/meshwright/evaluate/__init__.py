"""Evaluate a model: loss and perplexity on data, multiple choice by log-likelihood."""

from meshwright.evaluate.choices import ChoiceScores, answer_choices, read_questions
from meshwright.evaluate.loss import StoreLoss, store_loss

__all__ = ["ChoiceScores", "StoreLoss", "answer_choices", "read_questions", "store_loss"]
