"""Messages of a chat to a prompt: checked, in the form that chat templates expect."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.serving.server.errors import bad_request
from meshwright.serving.server.service import Service

Messages = Sequence[Mapping[str, Any]]
_ROLES = ("system", "developer", "user", "assistant", "tool")


def chat_prompt(
    service: Service,
    messages: Messages,
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    generation_prompt: bool = True,
    continue_final: bool = False,
    values: Mapping[str, Any] | None = None,
    any_length: bool = False,
) -> tuple[str, tuple[int, ...]]:
    """The prompt of a chat, as text and tokens; `any_length`: it need not fit the model.

    Without a chat template the messages are joined, and the model continues them as a text.
    """
    limits = service.config.limits
    service.check_entries("messages", len(messages), limits.messages, "--limits.messages")
    service.check_entries("tools", len(tools or ()), limits.tools, "--limits.tools")
    if not messages:
        raise bad_request("messages is empty; send at least one message", "messages")
    checked = [_message(index, message) for index, message in enumerate(messages)]
    if continue_final and (generation_prompt or checked[-1]["role"] != "assistant"):
        raise bad_request(
            "continue_final_message needs add_generation_prompt=false and a last message of the "
            "assistant",
            "continue_final_message",
        )
    if continue_final and checked[-1].get("tool_calls"):
        raise bad_request(
            "continue_final_message: the last message has tool_calls, which come after the content "
            "that would be continued; leave them out",
            "continue_final_message",
        )

    def encoded(text: str, special_tokens: bool) -> tuple[int, ...]:
        if not any_length:
            service.check_characters(text, "messages")
        return service.encode(text, special_tokens)

    template = service.template
    if template is None:
        if tools:
            raise bad_request("tools: this model has no chat template that takes them", "tools")
        text = "\n".join(message["content"] for message in checked)
        return text, encoded(text, True)
    if tools and not template.takes_tools:
        raise bad_request("tools: the model's chat template does not take them", "tools")
    for index, tool in enumerate(tools or ()):
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request(
                f"tools[{index}] needs the form "
                '{"type": "function", "function": {"name": …, "parameters": …}}',
                "tools",
            )
    text = template.render(
        checked,
        tools,
        generation_prompt=generation_prompt,
        values=values,
        continue_final=continue_final,
    )
    return text, encoded(text, False)  # the template writes special tokens


def _message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    where = f"messages[{index}]"
    role = message.get("role")
    if role not in _ROLES:
        raise bad_request(f"{where}.role is {role!r}; it must be one of {', '.join(_ROLES)}", where)
    checked = {name: value for name, value in message.items() if value is not None}
    checked["role"] = "system" if role == "developer" else role
    checked["content"] = _content(where, message.get("content"), role)
    if "tool_calls" in checked:
        checked["tool_calls"] = _tool_calls(where, checked["tool_calls"])
    return checked


def _content(where: str, content: Any, role: Any) -> str:
    if content is None and role == "assistant":
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where}.content must be a text or a list of parts", where)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise bad_request(
                f"{where}.content has a part of type {kind!r}; this model takes parts of type "
                "'text', with a field 'text'",
                where,
            )
        texts.append(part["text"])
    return "".join(texts)


def _tool_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """Calls with arguments as objects, which templates print; OpenAI sends them as text."""
    checked = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request(f"{where}.tool_calls needs a function with a name in each", where)
        arguments = function.get("arguments") or "{}"
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                raise bad_request(
                    f"{where}.tool_calls has arguments that are no JSON", where
                ) from None
        if not isinstance(arguments, dict):
            raise bad_request(f"{where}.tool_calls has arguments that are no JSON object", where)
        checked.append({**call, "function": {**function, "arguments": arguments}})
    return checked
