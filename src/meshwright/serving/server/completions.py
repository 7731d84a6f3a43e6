"""/v1/completions: continue prompts, given as text or as tokens."""

import dataclasses
import functools
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from meshwright.data import last_character
from meshwright.serving.grammars import Grammar
from meshwright.serving.request import Completion, Delta, Request, TokenLogprobs, request_id
from meshwright.serving.server.bodies import CompletionBody
from meshwright.serving.server.encoding import encoded_answer, event
from meshwright.serving.server.errors import bad_request
from meshwright.serving.server.formats import completion_grammar
from meshwright.serving.server.logprobs import TextOffsets, first_of, written_entries
from meshwright.serving.server.service import Service, Usage
from meshwright.serving.server.transport import (
    answer_response,
    assembled,
    event_stream,
    finish,
    off_loop,
    read,
)

_MAX_TOKENS = 16  # OpenAI's default


@dataclasses.dataclass(frozen=True)
class _Prompt:
    tokens: tuple[int, ...]
    text: str = ""
    """What `echo` repeats: the text as it was sent, or that of the tokens, special ones by name."""
    offsets: tuple[int, ...] = ()
    """Where each token begins in `text`."""


async def completions(http: HttpRequest, service: Service) -> Response:
    body = await read(http, CompletionBody, service)
    service.check_model(body.model)
    _check(body)
    if body.echo:
        service.check_scored("echo")
    prompts = await off_loop(http, lambda: _prompts(service, body))
    grammar = await completion_grammar(service, body)
    requests = service.requests(body, [_request(service, body, each, grammar) for each in prompts])
    answer = _Answer(service, body, prompts, requests, http.scope["access"].usage)
    if body.stream:
        return await event_stream(http, service, answer.events())
    return await finish(http, service, answer.whole())


def _check(body: CompletionBody) -> None:
    if body.suffix:
        raise bad_request(
            "suffix: this model continues text and cannot fill in before a suffix; leave it out",
            "suffix",
        )
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad_request(
            "best_of: the server does not rank completions; leave it out, or ask for n of them "
            "with logprobs and rank them yourself",
            "best_of",
        )


def _prompts(service: Service, body: CompletionBody) -> list[_Prompt]:
    """The prompts: a text, tokens, or a list of both."""
    given = body.prompt
    if isinstance(given, str):
        entries: Sequence[str | list[int]] = [given]
    elif given and all(isinstance(entry, int) for entry in given):
        entries = [[entry for entry in given if isinstance(entry, int)]]
    else:
        entries = [entry for entry in given if not isinstance(entry, int)]
        if len(entries) != len(given):
            raise bad_request(
                "prompt mixes tokens with texts or lists; send one text, one list of tokens, or a "
                "list of texts and lists of tokens",
                "prompt",
            )
    if not entries:
        raise bad_request("prompt is an empty list; send at least one prompt", "prompt")
    service.check_number(len(entries) * (body.n or 1))
    for entry in entries:
        if isinstance(entry, str) and body.truncate_prompt_tokens is None:
            service.check_characters(entry)
    prompts = []
    for entry in entries:
        if isinstance(entry, str):
            tokens = service.encode(entry, body.add_special_tokens is not False)
            offsets = _text_offsets(service, body, entry) if body.echo else ()
            prompts.append(_Prompt(tokens, entry, offsets))
        else:
            service.check_tokens(entry)
            prompts.append(_echoed(service, entry) if body.echo else _Prompt(tuple(entry)))
    empty = _Prompt((service.start,), offsets=(0,))
    return [_truncated(service, body, prompt if prompt.tokens else empty) for prompt in prompts]


def _truncated(service: Service, body: CompletionBody, prompt: _Prompt) -> _Prompt:
    max_new = _MAX_TOKENS if body.max_tokens is None else body.max_tokens
    tokens = service.truncated(prompt.tokens, body.truncate_prompt_tokens, max_new)
    if len(tokens) == len(prompt.tokens):
        return prompt
    return _echoed(service, tokens) if body.echo else _Prompt(tokens)


def _text_offsets(service: Service, body: CompletionBody, text: str) -> tuple[int, ...]:
    special_tokens = service.source.special_tokens and body.add_special_tokens is not False
    _, begins = service.source.tokenizer.encode_with_offsets(text, special_tokens)
    return tuple(begins)


def _echoed(service: Service, tokens: Sequence[int]) -> _Prompt:
    """A prompt of tokens with its text."""
    text = service.source.tokenizer.decode(tokens, special_tokens=True)
    offsets = TextOffsets(service.logprobs.named_texts)
    return _Prompt(tuple(tokens), text, tuple(offsets.add(token) for token in tokens))


def _request(
    service: Service, body: CompletionBody, prompt: _Prompt, grammar: Grammar | None
) -> Request:
    max_new = service.room(prompt.tokens, body.max_tokens, _MAX_TOKENS)
    scored = service.prompt_logprobs(body)
    if not max_new and not body.echo and scored is None:
        raise bad_request(
            "max_tokens=0 generates nothing; with echo=true it returns the prompt, and with "
            "logprobs its log-probabilities",
            "max_tokens",
        )
    if body.echo and body.logprobs is not None:
        scored = max(body.logprobs, scored or 0)
    return Request(
        prompt.tokens, max_new=max_new, logprobs=body.logprobs, prompt_logprobs=scored,
        grammar=grammar,
    )  # fmt: skip


class _Answer:
    """The response to one body, at once or in events."""

    def __init__(
        self,
        service: Service,
        body: CompletionBody,
        prompts: list[_Prompt],
        requests: list[Request],
        usage: Usage,
    ) -> None:
        self.service, self.body, self.usage, self.requests = service, body, usage, requests
        self.names = service.logprobs
        self.head = {
            "id": request_id("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model or service.name,
        }
        # each prompt n times
        self.prompts = [prompt for prompt in prompts for _ in range(body.n or 1)]
        named = body.skip_special_tokens is False
        shown = self.names.named_texts if named else self.names.texts
        tokenizer, begins_anew = service.source.tokenizer, service.encodes_prompts
        self.offsets = [
            TextOffsets(
                shown,
                len(prompt.text) if body.echo else 0,
                () if begins_anew else last_character(tokenizer, prompt.tokens, named),
            )
            for prompt in self.prompts
        ]
        usage.prompt = sum(len(prompt.tokens) for prompt in prompts)

    async def whole(self) -> Response:
        with self.service.admitted(len(self.requests)):
            results = await self.service.completions(self.requests)
            for index, result in enumerate(results):
                self._count(index, result)
            parts = await assembled(self._entries(*results), lambda: self._parts(results))
        return answer_response(parts, self.service)

    def _parts(self, results: Sequence[Completion]) -> list[bytes]:
        echo = bool(self.body.echo)
        choices = (self._choice(index, result, echo) for index, result in enumerate(results))
        return encoded_answer(self.head, choices, {"usage": self.usage.data()})

    async def events(self) -> AsyncGenerator[bytes, None]:
        options = self.body.stream_options
        with_usage = options is not None and bool(options.include_usage)
        running = options is not None and with_usage and bool(options.continuous_usage_stats)
        extra: dict[str, Any] = {"usage": None} if with_usage else {}
        started = [False] * len(self.prompts)
        with self.service.admitted(len(self.requests)):
            async for index, delta in self.service.merged(self.requests):
                self._count(index, delta)
                echo = bool(self.body.echo) and not started[index]
                if not (echo or delta.text or delta.logprobs or delta.finish_reason):
                    continue
                started[index] = True
                extra |= {"usage": self.usage.data()} if running else {}
                write = functools.partial(self._event, index, delta, echo, extra)
                yield await assembled(self._entries(delta), write)
        if with_usage:
            yield event(self.head | {"choices": [], "usage": self.usage.data()})

    def _event(self, index: int, delta: Delta, echo: bool, extra: dict[str, Any]) -> bytes:
        return event(self.head | {"choices": [self._choice(index, delta, echo)]} | extra)

    def _entries(self, *results: Completion | Delta) -> int:
        candidates = max(self.body.logprobs or 0, self.body.prompt_logprobs or 0)
        return written_entries(results, candidates)

    def _count(self, index: int, result: Completion | Delta) -> None:
        self.usage.count(result, index // (self.body.n or 1))

    def _choice(self, index: int, result: Completion | Delta, echo: bool) -> dict[str, Any]:
        prompt, written = self.prompts[index], None
        if self.body.logprobs is not None:
            tokens: tuple[int, ...] = result.tokens
            logprobs: tuple[TokenLogprobs | None, ...] = result.logprobs
            offsets = [self.offsets[index].add(token) for token in tokens]
            if echo:
                of_prompt = first_of(result.prompt_logprobs, self.body.logprobs)
                tokens, logprobs = prompt.tokens + tokens, of_prompt + logprobs
                offsets = [*prompt.offsets, *offsets]
            written = self.names.completion(tokens, logprobs, offsets)
        choice = {
            "index": index,
            "text": (prompt.text if echo else "") + result.text,
            "logprobs": written,
            "finish_reason": result.finish_reason,
        }
        if (count := self.body.prompt_logprobs) is not None:
            choice["prompt_logprobs"] = self.names.prompt(
                prompt.tokens, result.prompt_logprobs, count
            )
        return choice
