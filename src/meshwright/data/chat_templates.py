"""Chat templates: from messages to the text that a chat model was trained on.

template = load_chat_template("Qwen3-8B")
template.render([{"role": "user", "content": "Hi!"}])
"""

import datetime
import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from meshwright.data.tokenizers import Span
from meshwright.errors import MeshwrightError

Message = Mapping[str, Any]
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
_MARKS = ("generation_begins", "generation_ends")  # variables, empty unless answers are looked for
_GENERATION = re.compile(r"\{%[-+]?\s*generation\b")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
BUILT_IN = {"chatml": CHATML}


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks what a model is trained on."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        before, after = (
            nodes.Output([nodes.Name(name, "load")]).set_lineno(line) for name in _MARKS
        )
        # what is set inside is not known outside, as in transformers
        return [before, nodes.Scope(body).set_lineno(line), after]


class ChatTemplate:
    """A jinja2 template as Hugging Face folders have it, in a sandbox.

    >>> ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}").render(
    ...     [{"role": "user", "content": "Hi!"}]
    ... )
    '<user>Hi!'
    """

    def __init__(self, text: str, tokens: Mapping[str, str] | None = None, tool_text: str = ""):
        """`tokens` are special tokens by name; `tool_text` is the template for calls with tools."""
        self.text, self.tool_text = text, tool_text
        self.tokens = dict(tokens or {})
        self._default = _compiled(text)
        self._with_tools = _compiled(tool_text) if tool_text else self._default
        self.takes_tools = "tools" in (tool_text or text)
        self._marks = {name: _new_marker() for name in _MARKS}
        self._any_mark = re.compile("|".join(self._marks.values()))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        *,
        generation_prompt: bool = True,
        values: Mapping[str, Any] | None = None,
        continue_final: bool = False,
    ) -> str:
        """The prompt; `generation_prompt` opens the model's own message, `values` are variables.

        `continue_final`: it ends with the content of the last message, which the model continues.
        """
        prompt = self._render(messages, tools, generation_prompt, values)
        if not continue_final:
            return prompt
        # a marker shows where the template writes the end of the content, whatever the content is
        last, marker = messages[-1], _new_marker()
        marked = {**last, "content": last["content"] + marker}
        marked_prompt = self._render([*messages[:-1], marked], tools, generation_prompt, values)
        return _up_to_marker(prompt, marked_prompt, marker, last["content"])

    def end_of_answer(self) -> str:
        """What it writes after an answer, without white space; empty where that is not known.

        >>> ChatTemplate(CHATML).end_of_answer()
        '<|im_end|>'
        """
        marker = _new_marker()
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": marker}]
        try:
            return self._render(messages, None, False, None).partition(marker)[2].strip()
        except MeshwrightError:  # a template that wants other messages
            return ""

    @property
    def marks_answers(self) -> bool:
        """Whether `{% generation %}` says what a model is trained on."""
        return all(_GENERATION.search(text) for text in (self.text, self.tool_text or self.text))

    def render_answers(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
    ) -> tuple[str, list[Span]]:
        """The text of a conversation, and which characters of it are the model's answers.

        Answers are what `{% generation %}` marks; without it, what each of the assistant's messages
        adds to the prompt before it, without white space after the end of the message.

        >>> ChatTemplate(CHATML).render_answers([{"role": "assistant", "content": "Hi!"}])
        ('<|im_start|>assistant\\nHi!<|im_end|>\\n', [(22, 35)])
        """
        if not self.marks_answers:
            return self._answers_by_difference(messages, tools)
        marked = self._render(messages, tools, False, self._marks)
        begins, _ = self._marks.values()
        text, spans, start = "", [], 0
        for part, mark in _parts(marked, self._any_mark):
            text += part
            if mark == begins:
                start = len(text)
            elif mark:
                spans.append((start, len(text)))
        return text, spans

    def _answers_by_difference(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
    ) -> tuple[str, list[Span]]:
        text = self._render(messages, tools, False, None)
        spans = []
        for number, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = self._render(messages[:number], tools, True, None)
            up_to = self._render(messages[: number + 1], tools, False, None)
            end = len(up_to)
            if not up_to.startswith(before) or not text.startswith(up_to):
                end = self._end_of(number, messages, tools)
            answer = text[len(before) : end]
            # the end of a message is its last token; white space only if there is nothing else
            content = message.get("content")
            bare = answer.rstrip()
            if not isinstance(content, str) or not bare.endswith(content.rstrip()):
                end -= len(answer) - len(bare)
            if not text.startswith(before) or end <= len(before):
                raise _unknown_answer(number)
            spans.append((len(before), end))
        return text, spans

    def _end_of(
        self,
        number: int,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
    ) -> int:
        """Where a message ends that the template writes otherwise if it is the last.

        Its content ends at the same place of both texts, and is followed by the same end.
        """
        content = messages[number].get("content")
        if not isinstance(content, str):
            raise _unknown_answer(number)
        marker = _new_marker()
        marked = [*messages]
        marked[number] = {**messages[number], "content": content + marker}

        def split(count: int) -> tuple[str, str]:
            """The first messages up to the end of the content, and the rest of their text."""
            text = self._render(messages[:count], tools, False, None)
            with_marker = self._render(marked[:count], tools, False, None)
            end, reason = _end_of_content(text, with_marker, marker, content)
            if reason:
                raise _unknown_answer(number)
            return text[:end], text[end:]

        _, closing = split(number + 1)
        before, rest = split(len(messages))
        if not rest.startswith(closing):
            raise _unknown_answer(number)
        return len(before) + len(closing)

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        generation_prompt: bool,
        values: Mapping[str, Any] | None,
    ) -> str:
        template = self._with_tools if tools else self._default
        try:
            return template.render(
                dict(self.tokens)
                | dict(values or {})
                | {
                    "messages": [*map(_with_reasoning, messages)],
                    "tools": tools or None,
                    "add_generation_prompt": generation_prompt,
                }
            )
        except jinja2.TemplateError as reason:
            raise MeshwrightError(f"the chat template refuses these messages: {reason}") from None
        except RecursionError:
            raise MeshwrightError("the messages or tools are nested too deeply") from None
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as reason:
            raise MeshwrightError(
                f"the chat template cannot render these messages: {type(reason).__name__}: {reason}"
            ) from None


_REASONING = ("reasoning_content", "thinking", "reasoning")


def _with_reasoning(message: Message) -> Message:
    """The message with its reasoning under the names that templates read, as in transformers."""
    given = [message[name] for name in _REASONING if message.get(name) is not None]
    if not given:
        return message
    return {"thinking": given[0], **message, "reasoning_content": given[0]}


def _parts(text: str, separator: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """The parts of a text, each with the separator that follows it; none follows the last."""
    at = 0
    for match in separator.finditer(text):
        yield text[at : match.start()], match[0]
        at = match.end()
    yield text[at:], ""


def _unknown_answer(number: int) -> MeshwrightError:
    return MeshwrightError(
        f"the chat template writes message {number + 1} differently when others follow it, so it "
        "is not known which tokens are the answer; mark answers in the template with "
        "{% generation %}, or give --loss-on all"
    )


def _new_marker() -> str:
    """A text that occurs nowhere else; of digits, which templates leave as they are."""
    return f"{secrets.randbelow(10**32):032}"


def _end_of_content(prompt: str, marked_prompt: str, marker: str, content: str) -> tuple[int, str]:
    """Where `content` ends in a prompt, which the marker follows in `marked_prompt`.

    Returns the place, and if it is not known, why. A template may strip the white space around a
    content, but not change it otherwise.

    >>> _end_of_content("[end][end]", "[end#][end]", "#", "end")
    (4, '')
    """
    before, *tails = marked_prompt.split(marker)
    reason, end = "", 0
    if not tails:
        reason = "does not write the content of the last message"
    elif len(tails) > 1:
        reason = "writes the content of the last message more than once"
    else:
        end = len(prompt) - len(tails[0])
        stripped = len(before) - end
        fits = 0 <= stripped <= len(content) - len(content.rstrip())
        if not fits or prompt != before[:end] + tails[0]:
            reason = "writes the last message in another form when it is continued"
    return end, reason


def _up_to_marker(prompt: str, marked_prompt: str, marker: str, content: str) -> str:
    """The part of a prompt that ends with `content`, which the marker follows in `marked_prompt`.

    >>> _up_to_marker("[end][end]", "[end#][end]", "#", "end")
    '[end'
    """
    end, reason = _end_of_content(prompt, marked_prompt, marker, content)
    if reason:
        raise MeshwrightError(
            f"continue_final_message: the chat template {reason}, so it is not known where the "
            "model would continue it; leave the message out and set add_generation_prompt=true"
        )
    return prompt[:end]


def load_chat_template(folder: Path, file: Path | None = None) -> ChatTemplate | None:
    """The template in `file`, else the one of a Hugging Face folder; None if there is none.

    `file` may also be the name of a built-in template: chatml.
    """
    config, tokens = _json(folder / "tokenizer_config.json"), special_tokens(folder)
    if file is not None:
        return ChatTemplate(BUILT_IN.get(str(file)) or _text(file), tokens)
    if (folder / "chat_template.jinja").is_file():
        beside = folder / "additional_chat_templates" / "tool_use.jinja"
        tool_text = _text(beside) if beside.is_file() else ""
        return ChatTemplate(_text(folder / "chat_template.jinja"), tokens, tool_text)
    found = _json(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(found, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
        if isinstance(found, str):
            return ChatTemplate(found, tokens, named.get("tool_use") or "")
    return ChatTemplate(found, tokens) if isinstance(found, str) else None


def special_tokens(folder: Path) -> dict[str, str]:
    """The texts of the special tokens that the files beside a tokenizer.json name: bos_token …"""
    files = [_json(folder / name) for name in ("tokenizer_config.json", "special_tokens_map.json")]
    texts = {name: [_token(file.get(name)) for file in files] for name in _SPECIAL}
    return {name: text for name in _SPECIAL if (text := next(filter(None, texts[name]), None))}


def _compiled(text: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(text)
    except jinja2.TemplateError as reason:
        raise MeshwrightError(f"the chat template is not valid jinja2: {reason}") from None


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # jinja2's own escapes < and >, which models were not trained on; in pieces, so that other
    # threads run while a large value is written
    return "".join(json.JSONEncoder(ensure_ascii=ensure_ascii, **options).iterencode(value))


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _token(value: Any) -> str | None:
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as reason:
        why = getattr(reason, "strerror", None) or reason
        raise MeshwrightError(
            f"chat template '{file}' cannot be read: {why}; give a jinja2 file, or chatml"
        ) from None


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(_text(file))
    except ValueError as reason:
        raise MeshwrightError(f"'{file}' is not readable JSON: {reason}") from None
    return value if isinstance(value, dict) else {}
