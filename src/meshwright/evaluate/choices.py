"""Multiple choice: which continuation of a question a model finds the most likely.

A question is a line of JSON: {"question": "2 + 2 =", "choices": [" 4", " 5"], "answer": 0}
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.models import encodes_prompts
from meshwright.serving import LanguageModel, Request, Sampling


@dataclasses.dataclass(frozen=True)
class Question:
    text: str
    choices: tuple[str, ...]
    answer: int


@dataclasses.dataclass(frozen=True)
class ChoiceScores:
    """For each question, the log-likelihood of its choices, and of each per byte of its text."""

    questions: tuple[Question, ...]
    logprobs: tuple[tuple[float, ...], ...]

    @property
    def accuracy(self) -> float:
        """The part of questions whose answer is the most likely choice."""
        return self._right(lambda logprob, text: logprob)

    @property
    def normalized_accuracy(self) -> float:
        """The same with log-likelihoods per byte, so that short choices have no advantage."""
        return self._right(lambda logprob, text: logprob / max(len(text.encode()), 1))

    def _right(self, score: Any) -> float:
        right = 0
        for question, logprobs in zip(self.questions, self.logprobs, strict=True):
            scores = [score(*pair) for pair in zip(logprobs, question.choices, strict=True)]
            right += scores.index(max(scores)) == question.answer
        return right / len(self.questions)

    def data(self) -> dict[str, Any]:
        return {
            "questions": len(self.questions),
            "accuracy": self.accuracy,
            "normalized_accuracy": self.normalized_accuracy,
        }


def read_questions(file: Path) -> tuple[Question, ...]:
    """The questions of a .jsonl file."""
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except OSError as reason:
        raise MeshwrightError(f"{file} cannot be read: {reason.strerror or reason}") from None
    except UnicodeDecodeError:
        raise MeshwrightError(f"{file} is not text in UTF-8") from None
    found = tuple(
        _question(line, f"{file}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    )
    if not found:
        raise MeshwrightError(f"{file} has no questions")
    return found


def _question(line: str, where: str) -> Question:
    try:
        fields = json.loads(line)
    except ValueError as reason:
        raise MeshwrightError(f"{where} is not JSON: {reason}") from None
    text = fields.get("question") if isinstance(fields, Mapping) else None
    choices = fields.get("choices") if isinstance(fields, Mapping) else None
    if (
        not isinstance(text, str)
        or not isinstance(choices, list)
        or len(choices) < 2
        or not all(isinstance(choice, str) and choice for choice in choices)
    ):
        raise MeshwrightError(
            f'{where} needs the form {{"question": TEXT, "choices": [TEXT, …], "answer": NUMBER}}, '
            "with at least two choices"
        )
    answer = fields.get("answer")
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise MeshwrightError(
            f"{where}: answer={answer!r} must be the number of a choice, from 0 to "
            f"{len(choices) - 1}"
        )
    return Question(text, tuple(choices), answer)


def check_scores_choices(model_config: Any) -> None:
    """Raise if choices cannot be scored as what continues a question."""
    if encodes_prompts(model_config):
        raise MeshwrightError(
            "--choices scores choices as continuations of their question, and an encoder "
            "reads this model's prompts; give a decoder, or --data with examples"
        )


def answer_choices(model: LanguageModel, questions: Sequence[Question]) -> ChoiceScores:
    """Score every choice of every question, all in one batch."""
    check_scores_choices(model.source.config)
    requests, starts = [], []
    for question in questions:
        begun = model.source.encode(question.text)
        for choice in question.choices:
            tokens = model.source.encode(question.text + choice)
            same = [a == b for a, b in zip(begun, tokens, strict=False)]
            # where the two part, should the end of the question be another token with the choice
            starts.append(same.index(False) if False in same else min(len(begun), len(tokens) - 1))
            requests.append(Request(tuple(tokens), Sampling(0), 0, prompt_logprobs=0))
    done = model.engine.generate(requests)
    sums = iter(
        sum(one.logprob for one in completion.prompt_logprobs[max(start, 1) :] if one is not None)
        for completion, start in zip(done, starts, strict=True)
    )
    scores = tuple(tuple(next(sums) for _ in question.choices) for question in questions)
    return ChoiceScores(tuple(questions), scores)
