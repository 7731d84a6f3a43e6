"""Chat templates: from messages to the text that a chat model was trained on.

template = load_chat_template("Qwen3-8B")
template.render([{"role": "user", "content": "Hi!"}])
"""

import datetime
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from meshwright.errors import MeshwrightError

Message = Mapping[str, Any]
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks what a model is trained on."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A jinja2 template as Hugging Face folders have it, in a sandbox.

    >>> ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}").render(
    ...     [{"role": "user", "content": "Hi!"}]
    ... )
    '<user>Hi!'
    """

    def __init__(self, text: str, tokens: Mapping[str, str] | None = None, tool_text: str = ""):
        """`tokens` are special tokens by name; `tool_text` is the template for calls with tools."""
        self.text = text
        self.tokens = dict(tokens or {})
        self._default = _compiled(text)
        self._with_tools = _compiled(tool_text) if tool_text else self._default
        self.takes_tools = "tools" in (tool_text or text)

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
        last, marker = messages[-1], secrets.token_hex(16)
        marked = {**last, "content": last["content"] + marker}
        marked_prompt = self._render([*messages[:-1], marked], tools, generation_prompt, values)
        return _up_to_marker(prompt, marked_prompt, marker, last["content"])

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
                    "messages": messages,
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


def _up_to_marker(prompt: str, marked_prompt: str, marker: str, content: str) -> str:
    """The part of a prompt that ends with `content`, which the marker follows in `marked_prompt`.

    A template may strip the white space around a content, but not change it otherwise.

    >>> _up_to_marker("[end][end]", "[end#][end]", "#", "end")
    '[end'
    """
    before, *tails = marked_prompt.split(marker)
    reason = ""
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
    if reason:
        raise MeshwrightError(
            f"continue_final_message: the chat template {reason}, so it is not known where the "
            "model would continue it; leave the message out and set add_generation_prompt=true"
        )
    return prompt[:end]


def load_chat_template(folder: Path, file: Path | None = None) -> ChatTemplate | None:
    """The template in `file`, else the one of a Hugging Face folder; None if there is none."""
    config = _json(folder / "tokenizer_config.json")
    tokens = {
        name: text
        for name in _SPECIAL
        if (text := _token(config.get(name) or _json(folder / "special_tokens_map.json").get(name)))
    }
    if file is not None:
        return ChatTemplate(_text(file), tokens)
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
        raise MeshwrightError(f"chat template '{file}' cannot be read: {reason}") from None


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(_text(file))
    except ValueError as reason:
        raise MeshwrightError(f"'{file}' is not readable JSON: {reason}") from None
    return value if isinstance(value, dict) else {}
