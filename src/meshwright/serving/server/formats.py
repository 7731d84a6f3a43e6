"""The grammar of an output: what response_format, structured_outputs and tool_choice ask for."""

import asyncio
import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from meshwright.errors import MeshwrightError
from meshwright.serving.grammars import Grammar, Grammars, json_rule
from meshwright.serving.harmony import (
    after_analysis,
    final_message,
    harmony_call,
    in_message,
)
from meshwright.serving.output import (
    CALL,
    CALLED,
    THINK,
    THOUGHT,
    ToolFormat,
    is_harmony,
)
from meshwright.serving.server.bodies import ChatBody, GenerationBody, StructuredOutputs
from meshwright.serving.server.errors import bad_request
from meshwright.serving.server.service import Service

_GUIDED = ("guided_json", "guided_regex", "guided_choice")  # vLLM's older fields
_ANY_OBJECT = {"type": "object"}


async def completion_grammar(service: Service, body: GenerationBody) -> Grammar | None:
    """The grammar of a completion, compiled; None if it is free."""
    if _is_free(body):
        return None
    return await asyncio.to_thread(_completion_grammar, service, body)


async def chat_grammar(
    service: Service, body: ChatBody, prompt: str, tools: ToolFormat
) -> Grammar | None:
    """The grammar of a message, compiled; None if it is free.

    `tools` is the format of its calls. A model that reasons may do so before the answer.
    """
    if _is_free(body) and not body.tools and body.tool_choice is None:
        return None
    return await asyncio.to_thread(_chat_grammar, service, body, prompt, tools)


def _completion_grammar(service: Service, body: GenerationBody) -> Grammar | None:
    with _errors_of(_field(body)):
        return _compiled(service, _answer(body))


def _chat_grammar(
    service: Service, body: ChatBody, prompt: str, tools: ToolFormat
) -> Grammar | None:
    grammars, has_channels = service.source.grammars, is_harmony(service.template)
    with _errors_of(_field(body)):
        answer = _answer(body)
    if answer is not None and has_channels and not in_message(prompt):
        answer = final_message(answer, grammars)
    with _errors_of("tools"):
        calls = _calls(body, tools, grammars)
    if calls and _is_forced(body):
        grammar, field = Grammar(calls, "calls"), "tool_choice"
    elif answer is None:
        return None
    elif calls:
        grammar, field = (
            Grammar(f"{answer.rules}\n{calls}", f"({answer.start} | calls)"),
            _field(body),
        )
    else:
        grammar, field = answer, _field(body)
    template = service.template
    if has_channels:
        grammar = grammar if in_message(prompt) else after_analysis(grammar, grammars)
    elif template is not None and THOUGHT in template.text:
        grammar = after_reasoning(grammar, prompt.rstrip(), grammars)
    with _errors_of(field):
        return _compiled(service, grammar)


def _compiled(service: Service, grammar: Grammar | None) -> Grammar | None:
    """The grammar, which the engine has at hand then."""
    if grammar is not None:
        service.source.grammars.compile(grammar)
    return grammar


@contextlib.contextmanager
def _errors_of(field: str) -> Iterator[None]:
    """Inside, what a grammar cannot do becomes a 400 that names the field."""
    try:
        yield
    except MeshwrightError as reason:
        raise bad_request(f"{field}: {reason}", field) from None


def _is_free(body: GenerationBody) -> bool:
    """Whether no field asks for a format of the text."""
    names = ("response_format", "structured_outputs", *_GUIDED)
    return all(getattr(body, name) is None for name in names)


def _field(body: GenerationBody) -> str:
    """The field that asks for a format of the text."""
    names = ("structured_outputs", *_GUIDED)
    return next((name for name in names if getattr(body, name) is not None), "response_format")


def _wanted(body: GenerationBody) -> StructuredOutputs | None:
    """The structured output that a body asks for, by the field of this name or the older ones."""
    older = [name for name in _GUIDED if getattr(body, name) is not None]
    if not older:
        return body.structured_outputs
    if len(older) > 1 or body.structured_outputs is not None:
        both = f"{older[0]} and {(*older, 'structured_outputs')[1]}"
        raise bad_request(f"{both} ask for two formats of one text; send one of them", older[0])
    return StructuredOutputs(
        json=body.guided_json, regex=body.guided_regex, choice=body.guided_choice
    )


def _answer(body: GenerationBody) -> Grammar | None:
    """The grammar of the text that a body asks for."""
    wanted = _wanted(body)
    kind = (body.response_format or {}).get("type", "text")
    if wanted is not None:
        names = ("json", "json_object", "regex", "choice")
        given = [name for name in names if getattr(wanted, name) not in (None, False)]
        if len(given) != 1 or kind != "text":
            needs = f"one of {', '.join(names)}, and " if body.structured_outputs else ""
            raise bad_request(f"{_field(body)} needs {needs}no response_format", _field(body))
        if wanted.regex is not None:
            return Grammar.regex(wanted.regex)
        if wanted.choice:
            return Grammar.choice(wanted.choice)
        return Grammar.json(_ANY_OBJECT if wanted.json is None else _schema(body, wanted.json))
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar.json(_ANY_OBJECT)
    if kind != "json_schema":
        raise bad_request(
            f"response_format.type is {kind!r}; it must be text, json_object or json_schema",
            "response_format",
        )
    named = (body.response_format or {}).get("json_schema")
    schema = named.get("schema") if isinstance(named, dict) else None
    if not isinstance(schema, dict):
        raise bad_request(
            "response_format.json_schema.schema must be an object, a JSON schema, as in "
            '{"type": "json_schema", "json_schema": {"name": …, "schema": {…}}}',
            "response_format",
        )
    return Grammar.json(schema)


def _schema(body: GenerationBody, schema: dict[str, Any] | str) -> dict[str, Any]:
    """A JSON schema, which vLLM also takes as a text."""
    if isinstance(schema, dict):
        return schema
    try:
        value = msgspec.json.decode(schema)
    except (msgspec.DecodeError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise bad_request(f"{_field(body)}: the text is no JSON schema", _field(body))
    return value


def _is_forced(body: ChatBody) -> bool:
    return body.tool_choice not in (None, "none", "auto")


def _calls(body: ChatBody, tools: ToolFormat, grammars: Grammars) -> str:
    """The rule `calls` for the tools that may be called; empty if none may be."""
    choice, forced = body.tool_choice, _is_forced(body)
    functions = [tool["function"] for tool in body.tools or ()] if choice != "none" else []
    if isinstance(choice, dict):
        named = choice.get("function")
        name = named.get("name") if isinstance(named, dict) else None
        functions = [function for function in functions if function["name"] == name]
        if not functions:
            raise bad_request(f"tool_choice: no tool has the name {name!r}", "tool_choice")
    elif forced and choice != "required":
        raise bad_request(
            f"tool_choice is {choice!r}; it must be 'none', 'auto', 'required' or "
            '{"type": "function", "function": {"name": …}}',
            "tool_choice",
        )
    if forced and not functions:
        raise bad_request("tool_choice: there are no tools to call; send 'tools'", "tool_choice")
    if forced and tools == "none":
        raise bad_request(
            "tool_choice: the format of this model's tool calls is not known; name it with "
            "--tool-calls when the server is started, or use 'auto'",
            "tool_choice",
        )
    if not functions or tools == "none":
        return ""
    several = not isinstance(choice, dict) and body.parallel_tool_calls is not False
    rules = _function_rule(functions, tools, grammars)
    if tools in ("llama", "harmony"):
        return f"{rules}calls: function"
    begin, end = grammars.mark(CALL), grammars.mark(CALLED)
    rules += rf'call: {begin} "\n" function "\n" {end}' + "\n"
    return rules + (r'calls: call ("\n" call)*' if several else "calls: call")


def _function_rule(
    functions: Sequence[Mapping[str, Any]], tools: ToolFormat, grammars: Grammars
) -> str:
    key = "arguments" if tools == "hermes" else "parameters"
    calls = []
    for function in functions:
        schema = function.get("parameters") or _ANY_OBJECT
        if not isinstance(schema, dict):
            raise bad_request("tools: the parameters of a function must be a JSON schema", "tools")
        if tools == "harmony":
            calls.append(harmony_call(function["name"], json_rule(schema), grammars))
            continue
        name = json.dumps(function["name"], ensure_ascii=False)
        start = json.dumps(f'{{"name": {name}, "{key}": ')
        calls.append(f'{start} {json_rule(schema)} "}}"')
    return f"function: {' | '.join(calls)}\n"


def after_reasoning(grammar: Grammar, prompt: str, grammars: Grammars) -> Grammar:
    """The grammar after text in <think>…</think>, where the prompt leaves room for that."""
    if prompt.endswith(THOUGHT):
        return grammar
    opened = prompt.endswith(THINK)
    begin, end = "" if opened else grammars.mark(THINK), grammars.mark(THOUGHT)
    if end.startswith("<["):
        rules = [f"thought: {begin} TEXT? {end}", r"TEXT: /(.|\n)+/"]
    else:
        text = THOUGHT.replace("/", r"\/")
        rules = [f"thought: {begin} rest", rf"rest[lazy]: /(.|\n)*{text}/"]
    start = "thought SPACE?" if opened else "(thought SPACE?)?"
    rules = [grammar.rules, *rules, r"SPACE: /[ \n]{1,4}/"]
    return Grammar("\n".join(rules), f"{start} {grammar.start}")
