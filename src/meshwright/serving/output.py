"""A chat model's text, split as it comes: content, reasoning and tool calls."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any, Literal

from meshwright.data import ChatTemplate
from meshwright.serving.request import request_id

ToolFormat = Literal["hermes", "llama", "harmony", "none"]
THINK, THOUGHT = "<think>", "</think>"
CALL, CALLED = "<tool_call>", "</tool_call>"
CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
_PYTHON_TAG = "<|python_tag|>"


@dataclasses.dataclass(frozen=True)
class Content:
    text: str


@dataclasses.dataclass(frozen=True)
class Reasoning:
    text: str


@dataclasses.dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str
    """A JSON object."""
    id: str = dataclasses.field(default_factory=lambda: request_id("call"))

    @staticmethod
    def of(name: str, arguments: Any) -> "ToolCall | None":
        """A call with its arguments, an object or JSON of one; None if they are anything else."""
        if isinstance(arguments, str):
            arguments = _json(arguments)
        if not isinstance(arguments, dict):
            return None
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False))

    def data(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


Piece = Content | Reasoning | ToolCall


def is_harmony(template: ChatTemplate | None) -> bool:
    """Whether messages are of several channels, as gpt-oss writes them."""
    return template is not None and CHANNEL in template.text and MESSAGE in template.text


def tool_format(template: ChatTemplate | None) -> ToolFormat:
    """The format of tool calls that a chat template teaches.

    Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`. Llama 3: the message
    is `{"name": …, "parameters": {…}}`. gpt-oss: see harmony.py.
    """
    if template is None or not template.takes_tools:
        return "none"
    if is_harmony(template):
        return "harmony"
    if CALL in template.text:
        return "hermes"
    return "llama" if '"parameters"' in template.text else "none"


class OutputParser:
    """Splits the text of one choice. `feed` gives what is certain, `end` the rest."""

    def __init__(self, tools: ToolFormat, reasoning: bool, in_reasoning: bool = False) -> None:
        """`in_reasoning`: the prompt has opened the reasoning already."""
        self._tools = tools
        self._marks = ([THINK] if reasoning else []) + ([CALL] if tools == "hermes" else [])
        self._state: Literal["content", "reasoning", "call", "llama"] = "content"
        self._state = "reasoning" if in_reasoning else "content"
        self._text = ""  # not yet given out
        self._begun = False  # some content was given out
        self._reasoned = self._called = False

    def feed(self, text: str) -> Iterator[Piece]:
        self._text += text
        while True:
            state, before = self._state, self._text
            yield from getattr(self, f"_in_{state}")()
            if (self._state, self._text) == (state, before):
                return

    def end(self) -> Iterator[Piece]:
        """What is left when the model has ended."""
        text, self._text = self._text, ""
        if self._state == "reasoning":
            yield from [Reasoning(text)] if text else []
        elif self._state == "call":
            yield self._hermes_call(text, closed=False)
        elif self._state == "llama":
            yield from _llama_calls(text) or [Content(text.removeprefix(_PYTHON_TAG))]
        elif text.strip() or (text and not self._called and not self._reasoned):
            yield Content(text)

    def _in_content(self) -> Iterator[Piece]:
        if self._tools == "llama" and not self._begun:
            start = self._text.lstrip()
            if start.startswith(("{", _PYTHON_TAG)):
                self._state, self._text = "llama", start
                return
            if not start or _PYTHON_TAG.startswith(start):
                return
        found = [(self._text.find(mark), mark) for mark in self._marks if mark in self._text]
        if found:
            at, mark = min(found)
            before, self._text = self._text[:at], self._text[at + len(mark) :]
            self._state = "reasoning" if mark == THINK else "call"
            before = before.rstrip() if mark == CALL else before
        else:
            held = max((overlap(self._text, mark) for mark in self._marks), default=0)
            certain = self._text[: len(self._text) - held]
            if self._tools == "hermes":  # white space before a call is not content
                certain = certain.rstrip()
            before, self._text = certain, self._text[len(certain) :]
        if self._reasoned and not self._begun:
            before = before.lstrip()
        if before.strip() or (before and not found):
            self._begun = True
            yield Content(before)

    def _in_reasoning(self) -> Iterator[Piece]:
        before, mark, after = self._text.partition(THOUGHT)
        if mark:
            self._state, self._text, self._reasoned = "content", after, True
        else:
            held = overlap(before, mark=THOUGHT)
            before, self._text = before[: len(before) - held], before[len(before) - held :]
        if before:
            yield Reasoning(before)

    def _in_call(self) -> Iterator[Piece]:
        call, mark, after = self._text.partition(CALLED)
        if mark:
            self._state, self._text = "content", after
            yield self._hermes_call(call, closed=True)

    def _in_llama(self) -> Iterator[Piece]:
        return iter(())  # known at the end only

    def _hermes_call(self, text: str, closed: bool) -> Piece:
        value = _json(text)
        call = _call({"arguments": {}, **value} if isinstance(value, dict) else value, "arguments")
        if call is None:
            return Content(CALL + text + (CALLED if closed else ""))
        self._called = True
        return call


def overlap(text: str, mark: str) -> int:
    """How many characters at the end of the text may begin the mark.

    >>> overlap("see <tool", "<tool_call>")
    5
    """
    sizes = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(mark[:size])), 0)


def _llama_calls(text: str) -> list[Piece]:
    """The calls of a whole message, or none if it is anything else.

    Without its mark, JSON with a name alone may be an answer.
    """
    calls: list[Piece] = []
    default: dict[str, Any] = {"parameters": {}} if text.startswith(_PYTHON_TAG) else {}
    text = text.removeprefix(_PYTHON_TAG)
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        if isinstance(value, dict):
            value = (default if "arguments" not in value else {}) | value
        call = _call(value, "parameters") or _call(value, "arguments")
        if call is None:
            return []
        calls.append(call)
        rest = text[at:].lstrip(" \n;")
        at = len(text) - len(rest)
    return calls


def _call(value: Any, key: str) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    return ToolCall.of(value["name"], value.get(key))


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
