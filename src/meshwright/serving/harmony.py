"""gpt-oss: messages of several channels, as OpenAI's Harmony format has them.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>

`analysis` is reasoning, `final` the content, and `commentary to=functions.NAME` a tool call. The
template ends a prompt with <|start|>assistant.
"""

import json
import re
from collections.abc import Iterator

from meshwright.serving.grammars import Grammar, Grammars
from meshwright.serving.output import (
    CHANNEL,
    MESSAGE,
    Content,
    Piece,
    Reasoning,
    ToolCall,
    overlap,
)

_START = "<|start|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START)


def in_message(prompt: str) -> bool:
    """Whether a prompt ends in the body of a message."""
    return MESSAGE in prompt.rpartition(_START)[2]


class HarmonyParser:
    """Splits the text of one choice, with its special tokens, as `OutputParser` does."""

    def __init__(self, prompt: str = "") -> None:
        """`prompt`: it may have begun a message."""
        self._text = ""  # not yet given out
        self._channel, self._tool, self._arguments = "", "", ""
        self._in_header = not in_message(prompt)
        if not self._in_header:
            self._open(prompt.rpartition(_START)[2].partition(MESSAGE)[0])

    def feed(self, text: str) -> Iterator[Piece]:
        self._text += text
        while True:
            if self._in_header:
                header, mark, rest = self._text.partition(MESSAGE)
                if not mark:
                    return
                self._open(header)
                self._text = rest
            found = [(self._text.find(mark), mark) for mark in _ENDS if mark in self._text]
            if not found:
                held = max(overlap(self._text, mark) for mark in _ENDS)
                certain, self._text = self._cut(len(self._text) - held)
                yield from self._body(certain)
                return
            at, mark = min(found)
            body, self._text = self._cut(at)
            self._text = self._text.removeprefix(mark)
            yield from self._body(body)
            yield from self._close()

    def end(self) -> Iterator[Piece]:
        """What is left when the model has ended."""
        text, self._text = self._text, ""
        if not self._in_header:
            yield from self._body(text)
            yield from self._close()
        elif text and not any(mark in text for mark in (_START, CHANNEL)):
            yield Content(text)  # of a model that does not know the format

    def _cut(self, at: int) -> tuple[str, str]:
        return self._text[:at], self._text[at:]

    def _open(self, header: str) -> None:
        channel = re.search(r"<\|channel\|>\s*(\w+)", header)
        tool = re.search(r"to=functions\.([^\s<]+)", header)
        self._channel, self._tool = channel[1] if channel else "final", tool[1] if tool else ""
        self._in_header, self._arguments = False, ""

    def _body(self, text: str) -> Iterator[Piece]:
        if self._tool:
            self._arguments += text
        elif text:
            yield Reasoning(text) if self._channel == "analysis" else Content(text)

    def _close(self) -> Iterator[Piece]:
        if self._tool:
            call = ToolCall.of(self._tool, self._arguments)
            yield call or Content(self._arguments)
        self._in_header, self._tool = True, ""


def harmony_call(name: str, arguments: str, grammars: Grammars) -> str:
    """The part of a rule that stands for a call; `arguments`: the part for its arguments."""
    recipient = json.dumps(f"commentary to=functions.{name} ", ensure_ascii=False)
    mark = grammars.mark
    begin = f"{mark(CHANNEL)} {recipient} {mark('<|constrain|>')} "
    return f'{begin}"json" {mark(MESSAGE)} {arguments}'


def final_message(answer: Grammar, grammars: Grammars) -> Grammar:
    """The answer in its channel."""
    begin = f'{grammars.mark(CHANNEL)} "final" {grammars.mark(MESSAGE)}'
    return Grammar(f"{answer.rules}\nfinal: {begin} {answer.start}", "final")


def after_analysis(grammar: Grammar, grammars: Grammars) -> Grammar:
    """The grammar of a message, which may come after reasoning."""
    mark = grammars.mark
    begin = f'{mark(CHANNEL)} "analysis" {mark(MESSAGE)}'
    end = f'{mark("<|end|>")} {mark(_START)} "assistant"'
    rules = [grammar.rules, f"thought: {begin} TEXT? {end}", r"TEXT: /(.|\n)+/"]
    return Grammar("\n".join(rules), f"thought? {grammar.start}")
