"""Examples to token ids and loss weights: chat templates, completions, EasyLM's fields."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from meshwright.data.conversations import PREFERENCE, Conversation, Example, examples_of
from meshwright.data.fields import Fields
from meshwright.data.pieces import Encoded, Piece, TextPiece, TokenPiece, encode_pieces
from meshwright.data.store import LARGEST_WEIGHT, MASK_DTYPE, WEIGHT_DTYPE
from meshwright.data.tokenizers import Span, Tokenizer
from meshwright.errors import MeshwrightError

if TYPE_CHECKING:
    from meshwright.data.chat_templates import ChatTemplate

Weights = npt.NDArray[Any]
LossOn = Literal["answers", "all"]
Weigh = Literal["tokens", "examples"]


@dataclass(frozen=True)
class Encoding:
    """How documents and examples become tokens and loss weights."""

    special_tokens: bool = True
    """Add what the tokenizer itself puts around a text, such as begin-of-text."""
    template: "ChatTemplate | None" = None
    template_name: str = ""
    loss_on: LossOn = "answers"
    """Tokens that have loss: the assistant's answers and completions, or all."""
    weigh: Weigh = "tokens"
    """What counts equally in the loss: every token, or every example."""
    weight_field: str | None = None
    """Key of a record that holds the weight of its example."""
    fields: Fields | None = None

    @property
    def weight_dtype(self) -> np.dtype[Any]:
        """Of the weights of examples: a mask where that is enough."""
        plain = self.weigh == "tokens" and self.weight_field is None
        return MASK_DTYPE if plain else WEIGHT_DTYPE

    @property
    def flags_of_examples(self) -> list[str]:
        """The flags that texts do not take."""
        given = {
            "--loss-on": self.loss_on != "answers",
            "--weigh": self.weigh != "tokens",
            "--weight-field": self.weight_field is not None,
        }
        return [flag for flag, is_given in given.items() if is_given]

    def describe(self, name: str, templated: bool) -> str:
        """How records of a format are encoded, in words; `templated`: with the chat template."""
        words = name
        if self.template is not None and templated:
            words += f", chat template of {self.template_name}"
            if self.loss_on == "answers":
                marked = self.template.marks_answers
                words += f", answers by {'{% generation %}' if marked else 'prefix differences'}"
        if self.loss_on == "all" and name != "fields":
            words += ", loss on all tokens"
        if self.weigh == "examples":
            words += ", examples count equally"
        return words


@dataclass(frozen=True)
class Draft:
    """An example before its texts are encoded, and the weight of the example."""

    pieces: Sequence[Piece]
    weight: float = 1.0
    templated: bool = False  # by the chat template


def drafts_of(
    record: Mapping[str, Any], name: str, encoding: Encoding, tokenizer: Tokenizer
) -> list[Draft]:
    """The example of a record of that format, or the chosen and the rejected one."""
    key = encoding.weight_field
    weight = 1.0 if key is None else _number(record.get(key), f"{key!r}")
    end = tokenizer.end_of_document
    if encoding.fields is not None:
        pieces = encoding.fields.pieces(record, end)
        _check_ids(pieces, tokenizer.vocab)
        return [Draft(pieces, weight)]
    has_template = encoding.template is not None
    return [
        Draft(pieces_of(one, encoding, end), weight, has_template and isinstance(one, Conversation))
        for one in examples_of(record, name)
    ]


def _check_ids(pieces: Sequence[Piece], vocab: int) -> None:
    for piece in pieces:
        ids = piece.ids if isinstance(piece, TokenPiece) else []
        if unknown := [i for i in ids if not 0 <= i < vocab]:
            raise MeshwrightError(
                f"token id {unknown[0]} is not one of the tokenizer, whose ids are 0 to {vocab - 1}"
            )


def encode_drafts(
    drafts: Sequence[Draft], encoding: Encoding, tokenizer: Tokenizer
) -> list[Encoded]:
    """The token ids of examples, and their loss weights."""
    encoded = encode_pieces([draft.pieces for draft in drafts], tokenizer)
    return [
        (ids, _weighted(weights, encoding, draft.weight))
        for draft, (ids, weights) in zip(drafts, encoded, strict=True)
    ]


def pieces_of(example: Example, encoding: Encoding, end: int) -> list[Piece]:
    """The texts and tokens of an example; `end` is the end-of-document token."""
    if isinstance(example, Conversation) and encoding.template is None:
        if example.plain is None:
            raise MeshwrightError(
                "messages need a chat template, which the tokenizer does not have; pack them with "
                "one, a file or the built-in chatml: meshwright data pack FILES --tokenizer "
                "TOKENIZER --chat-template chatml --out STORE"
            )
        example = example.plain
    if isinstance(example, Conversation):
        return [TextPiece(*_render(example, encoding))]
    on_prompt = 1.0 if encoding.loss_on == "all" else 0.0
    prompt, completion = example.prompt, example.completion
    of_prompt, of_completion = (0, len(prompt)), (len(prompt), len(prompt + completion))
    if example.apart:
        texts: list[Piece] = [
            TextPiece(prompt, [(of_prompt, on_prompt)]),
            TextPiece(completion, [((0, len(completion)), 1.0)]),
        ]
    else:
        # a token that both have characters in has loss
        spans = [(of_prompt, on_prompt), (of_completion, 1.0)]
        texts = [TextPiece(prompt + completion, spans, encoding.special_tokens)]
    return [*texts, TokenPiece([end], 1.0)]


def _render(example: Conversation, encoding: Encoding) -> tuple[str, list[tuple[Span, float]]]:
    """The text of a conversation, and the weight of each answer."""
    template, messages, tools = encoding.template, list(example.messages), list(example.tools)
    assert template is not None
    answers = [message for message in messages if message["role"] == "assistant"]
    weights = [_message_weight(message) for message in answers]
    on_all = encoding.loss_on == "all"
    if on_all and set(weights) <= {1.0}:
        text = template.render(messages, tools, generation_prompt=False)
        return text, [((0, len(text)), 1.0)]
    text, spans = template.render_answers(messages, tools)
    if len(spans) == len(answers):
        weighted = list(zip(spans, weights, strict=True))
    elif set(weights) <= {1.0}:
        weighted = [(span, 1.0) for span in spans]
    else:
        raise MeshwrightError(
            f"{len(answers)} messages of the assistant, some with a 'weight', became "
            f"{len(spans)} parts of the chat template marked with {{% generation %}}"
        )
    if on_all:  # but for answers of weight 0
        ends = [0, *(end for (_, end), _ in weighted)]
        starts = [*(start for (start, _), _ in weighted), len(text)]
        between = [(span, 1.0) for span in zip(ends, starts, strict=True)]
        return text, sorted([*weighted, *between])
    if example.first_answer:
        given = messages[: example.first_answer]
        prompt = template.render(given, tools, generation_prompt=True)
        if not text.startswith(prompt):
            raise MeshwrightError(
                "the chat template writes the prompt differently when the answer follows it, so it "
                "is not known where the answer begins"
            )
        begin = len(prompt)  # with the header of the answer, which a mark may include
        weighted = [((max(a, begin), end), w) for (a, end), w in weighted if end > begin]
    return text, weighted


def _weighted(weights: Weights, encoding: Encoding, factor: float) -> Weights:
    if encoding.weigh == "examples":
        # the first token is no target
        total = float(weights[1:].sum())
        return (weights * (factor / total) if total else weights).astype(WEIGHT_DTYPE)
    return (weights * factor).astype(encoding.weight_dtype)


def _message_weight(message: Mapping[str, Any]) -> float:
    if message.get("weight", 1) not in (0, 1):
        raise MeshwrightError(f"'weight' of a message is {message['weight']!r}, not 0 or 1")
    return float(message.get("weight", 1))


def _number(value: Any, what: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < LARGEST_WEIGHT:
        raise MeshwrightError(f"{what} is {value!r}, not a number from 0 on")
    return float(value)


def is_pair(name: str) -> bool:
    """Whether a record of the format becomes two documents: the chosen and the rejected one."""
    return name == PREFERENCE
