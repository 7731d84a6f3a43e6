"""/v1/chat/completions: messages in, a message or tool calls out."""

import functools
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from meshwright.serving.grammars import Grammar
from meshwright.serving.harmony import HarmonyParser
from meshwright.serving.output import (
    CALL,
    CALLED,
    THINK,
    THOUGHT,
    Content,
    OutputParser,
    Piece,
    Reasoning,
    ToolFormat,
    is_harmony,
    tool_format,
)
from meshwright.serving.request import Completion, Delta, Request, request_id
from meshwright.serving.server.bodies import ChatBody
from meshwright.serving.server.encoding import encoded_answer, event
from meshwright.serving.server.errors import bad_request
from meshwright.serving.server.formats import chat_grammar
from meshwright.serving.server.logprobs import written_entries
from meshwright.serving.server.messages import chat_prompt
from meshwright.serving.server.service import Service, Usage
from meshwright.serving.server.transport import (
    answer_response,
    assembled,
    event_stream,
    finish,
    off_loop,
    read,
)


async def chat_completions(http: HttpRequest, service: Service) -> Response:
    body = await read(http, ChatBody, service)
    service.check_model(body.model)
    _check(body)
    service.check_number(body.n or 1)
    uses_tools = bool(body.tools) and body.tool_choice != "none"
    values = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        values.setdefault("reasoning_effort", body.reasoning_effort)
    text, tokens = await off_loop(
        http,
        lambda: chat_prompt(
            service,
            body.messages,
            body.tools if uses_tools else None,
            generation_prompt=body.add_generation_prompt is not False,
            continue_final=bool(body.continue_final_message),
            values=values,
            any_length=body.truncate_prompt_tokens is not None,
        ),
    )
    grammar = await chat_grammar(service, body, text, _tool_format(service, body))
    limit = body.truncate_prompt_tokens
    tokens = service.truncated(tokens or (service.start,), limit, _max_tokens(body))
    request = _request(service, body, tokens, grammar)
    answer = _Answer(service, body, text, request, http.scope["access"].usage)
    if body.stream:
        return await event_stream(http, service, answer.events())
    return await finish(http, service, answer.whole())


def _check(body: ChatBody) -> None:
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs=true", "top_logprobs")
    if body.modalities not in (None, ["text"]):
        raise bad_request("modalities: this model generates text only", "modalities")


def _tool_format(service: Service, body: ChatBody) -> ToolFormat:
    """The format of the calls that the answer may have."""
    if not body.tools or body.tool_choice == "none":
        return "none"
    wanted = service.config.tool_calls
    return tool_format(service.template) if wanted == "auto" else wanted


def _request(
    service: Service, body: ChatBody, tokens: tuple[int, ...], grammar: Grammar | None
) -> Request:
    max_new = service.room(tokens, _max_tokens(body), service.defaults.max_new, "messages")
    if not max_new:
        raise bad_request("max_tokens=0 generates nothing; give 1 or more", "max_tokens")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    stop_tokens, stop = (frozenset(), ()) if body.ignore_eos else service.answer_stops
    # a text that is continued may be complete: its end would be an answer of nothing
    min_new = int(service.template is None)
    return Request(
        tokens, max_new=max_new, min_new=min_new, logprobs=logprobs, grammar=grammar, stop=stop,
        stop_tokens=stop_tokens, prompt_logprobs=service.prompt_logprobs(body),
        special_tokens=_needs_special_tokens(service, body),
    )  # fmt: skip


def _reasons(service: Service) -> bool:
    return service.template is not None and THOUGHT in service.template.text


def _parser(service: Service, body: ChatBody, prompt: str) -> OutputParser | HarmonyParser:
    if is_harmony(service.template):
        return HarmonyParser(prompt)
    reasons = _reasons(service)
    opened = reasons and prompt.rstrip().endswith(THINK)
    return OutputParser(_tool_format(service, body), reasons, in_reasoning=opened)


def _needs_special_tokens(service: Service, body: ChatBody) -> bool:
    """Whether the marks that the parser looks for are special tokens, which texts leave out."""
    if is_harmony(service.template):
        return True
    marks = [THINK, THOUGHT] if _reasons(service) else []
    marks += [CALL, CALLED] if _tool_format(service, body) == "hermes" else []
    tokenizer = service.source.tokenizer
    return any(tokenizer.decode(tokenizer.encode(mark)) != mark for mark in marks)


def _max_tokens(body: ChatBody) -> int | None:
    given = body.max_completion_tokens
    return body.max_tokens if given is None else given


class _Answer:
    """The response to one body, at once or in events."""

    def __init__(
        self, service: Service, body: ChatBody, prompt: str, request: Request, usage: Usage
    ) -> None:
        self.service, self.body, self.usage = service, body, usage
        self.names = service.logprobs
        self.requests = service.requests(body, [request])
        self.parsers = [_parser(service, body, prompt) for _ in self.requests]
        usage.prompt = len(request.prompt)
        self.id, self.created = request_id("chatcmpl"), int(time.time())

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.body.model or self.service.name,
        }

    async def whole(self) -> Response:
        with self.service.admitted(len(self.requests)):
            results = await self.service.completions(self.requests)
            for result in results:
                self.usage.count(result)
            parts = await assembled(self._entries(*results), lambda: self._parts(results))
        return answer_response(parts, self.service)

    def _parts(self, results: Sequence[Completion]) -> list[bytes]:
        choices = (self._choice(index, result) for index, result in enumerate(results))
        rest: dict[str, Any] = {"usage": self.usage.data()}
        if (count := self.body.prompt_logprobs) is not None:
            scores = results[0].prompt_logprobs
            rest["prompt_logprobs"] = self.names.prompt(self.requests[0].prompt, scores, count)
        return encoded_answer(self._head("chat.completion"), choices, rest)

    def _choice(self, index: int, result: Completion) -> dict[str, Any]:
        parser = self.parsers[index]
        pieces = [*parser.feed(result.text), *parser.end()]
        calls = [piece.data() for piece in pieces if not isinstance(piece, Content | Reasoning)]
        message: dict[str, Any] = {"role": "assistant", "refusal": None}
        content = _joined(pieces, Content)
        message["content"] = None if calls and not content else content
        reasoning = _joined(pieces, Reasoning)
        message |= {"reasoning_content": reasoning} if reasoning else {}
        message |= {"tool_calls": self._allowed(calls)} if calls else {}
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(result),
            "finish_reason": _reason(result, bool(calls)),
        }

    def _entries(self, *results: Completion | Delta) -> int:
        candidates = max(self.body.top_logprobs or 0, self.body.prompt_logprobs or 0)
        return written_entries(results, candidates)

    async def events(self) -> AsyncGenerator[bytes, None]:
        options = self.body.stream_options
        with_usage = options is not None and bool(options.include_usage)
        head = self._head("chat.completion.chunk")
        head |= {"usage": None} if with_usage else {}
        running = options is not None and with_usage and bool(options.continuous_usage_stats)
        calls = [0] * len(self.requests)
        begun = [False] * len(self.requests)

        def chunk(
            index: int, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None
        ) -> dict[str, Any]:
            choice = {
                "index": index,
                "delta": delta,
                "logprobs": logprobs,
                "finish_reason": reason,
            }
            return head | {"choices": [choice]} | ({"usage": self.usage.data()} if running else {})

        with self.service.admitted(len(self.requests)):
            async for index, delta in self.service.merged(self.requests):
                self.usage.count(delta)
                if not begun[index]:
                    begun[index] = True
                    yield event(chunk(index, {"role": "assistant", "content": ""}))
                parser = self.parsers[index]
                pieces = [*parser.feed(delta.text)]
                pieces += parser.end() if delta.finish_reason else ()
                fields = [self._delta(piece, calls, index) for piece in pieces]
                shown = [field for field in fields if field]
                logprobs = self._logprobs(delta) if delta.tokens else None
                if not shown and logprobs is not None:
                    shown = [{}]  # the text of this token is not certain yet
                for field in shown:
                    write = functools.partial(event, chunk(index, field, logprobs))
                    yield await assembled(self._entries(delta), write)
                    logprobs = None
                if delta.finish_reason:
                    yield event(chunk(index, {}, reason=_reason(delta, calls[index] > 0)))
        if with_usage:
            yield event(head | {"choices": [], "usage": self.usage.data()})

    def _delta(self, piece: Piece, calls: list[int], index: int) -> dict[str, Any] | None:
        if isinstance(piece, Content):
            return {"content": piece.text}
        if isinstance(piece, Reasoning):
            return {"reasoning_content": piece.text}
        calls[index] += 1
        if calls[index] > 1 and self.body.parallel_tool_calls is False:
            return None
        return {"tool_calls": [{"index": calls[index] - 1, **piece.data()}]}

    def _allowed(self, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return calls[:1] if self.body.parallel_tool_calls is False else calls

    def _logprobs(self, result: Completion | Delta) -> dict[str, Any] | None:
        return self.names.chat(result.tokens, result.logprobs) if self.body.logprobs else None


def _joined(pieces: Iterable[Piece], kind: type[Content] | type[Reasoning]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, kind))


def _reason(result: Completion | Delta, has_calls: bool) -> str | None:
    return "tool_calls" if has_calls and result.finish_reason == "stop" else result.finish_reason
