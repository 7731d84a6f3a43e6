"""What every route needs: the engine, the tokenizer, admission, and requests that run."""

import asyncio
import contextlib
import contextvars
import dataclasses
import functools
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from meshwright.data import ChatTemplate
from meshwright.models import encodes_prompts
from meshwright.present import count
from meshwright.serving.defaults import Defaults, answer_stops
from meshwright.serving.device_sampling import MAX_BIAS
from meshwright.serving.request import AnyEngine, Completion, Delta, Request, request_id
from meshwright.serving.sampling import Sampling
from meshwright.serving.server.bodies import MOST_LOGPROBS, GenerationBody
from meshwright.serving.server.errors import ApiError, bad_request, unavailable
from meshwright.serving.server.logprobs import LogprobWriter
from meshwright.serving.server.metrics import Metrics
from meshwright.serving.settings import ServeConfig
from meshwright.serving.source import Source

_PART = 1 << 16  # characters that are counted at once
MOST_STOPS = 16
MOST_STOP_TOKENS = 1024
LONGEST_STOP = 256  # characters
MOST_BAD_WORDS = 256
_BUFFERED = 64  # deltas of a response with several choices


@dataclasses.dataclass
class Progress:
    """How far the sequences of an HTTP request are, for the message if it takes too long."""

    behind_others: bool = False
    """Whether sequences of other requests were in flight when they were admitted."""
    begun: bool = False
    """Whether the engine has given a result of any of them."""


PROGRESS: contextvars.ContextVar[Progress] = contextvars.ContextVar("progress")
"""That of the HTTP request which a task works for."""


@dataclasses.dataclass
class Service:
    """One model behind one server."""

    loaded_engine: AnyEngine | None
    """None while the server starts."""
    source: Source
    config: ServeConfig
    template: ChatTemplate | None
    defaults: Defaults = dataclasses.field(default_factory=Defaults)
    """Settings of completions and chats that name none."""
    starting: str = "reading the weights"
    """What the server does while there is no engine."""
    in_flight: int = 0
    """Sequences that run or wait."""
    draining: bool = False
    """Whether the server is shutting down: it finishes what runs and takes nothing new."""
    stopped: asyncio.Future[None] | None = None
    """Done when the time for finishing is over; made by the event loop."""
    seconds: float = 1.0
    """Recent duration of a request, for Retry-After."""

    def __post_init__(self) -> None:
        self.metrics = Metrics(lambda: self.loaded_engine.stats() if self.loaded_engine else None)
        self.logprobs = LogprobWriter(self.source.tokenizer)
        self.keys = self.config.api_keys()
        self.created = int(time.time())
        self.encodes_prompts = encodes_prompts(self.source.config)
        self.answer_stops: tuple[frozenset[int], tuple[str, ...]] = frozenset(), ()
        if self.template is not None:
            self.answer_stops = answer_stops(self.template, self.source.tokenizer)
            self.source.grammars.ends |= self.answer_stops[0]  # an answer that is complete ends so

    @property
    def name(self) -> str:
        return self.config.served_name

    @property
    def engine(self) -> AnyEngine:
        """The engine, or a 503 while there is none."""
        if self.loaded_engine is None:
            raise unavailable(f"the server is starting: {self.starting}; send the request later")
        return self.loaded_engine

    def check_model(self, name: str | None) -> str:
        """The adapter that a model's name stands for, empty for none; or a 404."""
        if name is None or name == self.name:
            return ""
        adapter = name.removeprefix(f"{self.name}:")
        if adapter in self.engine.adapters:
            return adapter
        known = [self.name, *(f"{self.name}:{each}" for each in self.engine.adapters)]
        names = ", ".join(f"'{each}'" for each in known)
        raise ApiError(
            404,
            f"model '{name}' is not served here; this server has {names}",
            param="model",
            code="model_not_found",
        )

    def check_ready(self) -> None:
        """Refuse a request that the engine cannot take now, or never again."""
        if self.engine.failure is not None:
            raise unavailable(self.engine.failure)
        if not self.engine.is_ready:
            raise unavailable("the model is not ready yet; /health says when it is")

    def check_number(self, sequences: int) -> None:
        """Refuse a request that is too large for the server, before any work is done for it."""
        limit = self.config.limits.requests
        if sequences > limit:
            raise bad_request(
                f"the request has {sequences:,} sequences, the server takes {limit:,} at once; "
                "send fewer prompts or a smaller n"
            )

    def check_entries(self, field: str, number: int, most: int, setting: str = "") -> None:
        """Refuse a list that is too long, before any work is done for its entries."""
        if number > most:
            flag = f" ({setting})" if setting else ""
            raise bad_request(
                f"{field} has {number:,} entries; the server takes {most:,}{flag}", field
            )

    @contextlib.contextmanager
    def admitted(self, sequences: int) -> Iterator[None]:
        """Inside, the sequences count as in flight; refuses them if there is no room."""
        limit = self.config.limits.requests
        if self.draining:
            raise unavailable("the server is shutting down; send the request again later")
        self.check_ready()
        if self.in_flight + sequences > limit:
            raise ApiError(
                429,
                f"the server is full: {self.in_flight} of {limit} sequences are in flight; try "
                "again later",
                headers={"Retry-After": str(self.retry_after)},
            )
        PROGRESS.get(Progress()).behind_others = self.in_flight > 0
        self.in_flight += sequences
        started = time.monotonic()
        try:
            yield
        finally:
            self.in_flight -= sequences
            self.seconds += 0.1 * (time.monotonic() - started - self.seconds)

    @property
    def retry_after(self) -> int:
        """Seconds until a request may find room."""
        return min(60, max(1, round(self.seconds)))

    # ---- prompts ---------------------------------------------------------------------------------

    def encode(self, text: str, special_tokens: bool = True) -> tuple[int, ...]:
        """The tokens of a text; `special_tokens`: as the model's prompts begin.

        Takes a second for a million characters: not for the thread of an event loop.
        """
        longest_prompt = self.engine.max_length * (self.source.tokenizer.longest_token or 0)
        most = max(self.config.limits.characters, longest_prompt)
        if len(text) > most:
            raise ApiError(
                413,
                f"a text has {len(text):,} characters; the server tokenizes {most:,} at once "
                "(--limits.characters); send it in parts",
            )
        if special_tokens:
            return tuple(self.source.encode(text))
        return tuple(self.source.tokenizer.encode(text).tolist())

    def check_characters(self, text: str, param: str = "prompt") -> None:
        """Refuse a text that has too many characters to fit, before it is tokenized."""
        most, per_token = self.engine.max_length, self.source.tokenizer.longest_token
        if per_token is None or len(text) <= most * per_token:
            return
        parts = (text[at : at + _PART] for at in range(0, len(text), _PART))
        characters = sum(len("".join(part.split())) for part in parts)
        if characters > most * per_token:
            raise bad_request(
                f"the prompt has {len(text):,} characters, which are at least "
                f"{-(-characters // per_token):,} tokens; that is more than the server's limit of "
                f"{count(most, 'token')} (--engine.max-length); send a shorter prompt",
                param,
                "context_length_exceeded",
            )

    @functools.cached_property
    def start(self) -> int:
        """What an empty prompt stands for: the token that prompts begin with, else the end of a
        document.
        """
        beginning = self.source.encode("")
        return beginning[0] if beginning else self.source.tokenizer.end_of_document

    def check_tokens(self, tokens: Sequence[int], param: str = "prompt") -> None:
        vocab = self.source.tokenizer.vocab  # the model's may be padded
        largest = max(tokens, default=0)
        if largest >= vocab:
            raise bad_request(
                f"token {largest} does not exist; the tokenizer has 0 to {vocab - 1}", param
            )

    def check_scored(self, what: str) -> None:
        """Refuse to score or repeat prompts where the output does not continue them."""
        if self.encodes_prompts:
            raise bad_request(
                f"{what}: this model reads prompts with an encoder, so they have no "
                "log-probabilities and the output does not continue them; ask for completions",
                what if what.isidentifier() else None,
            )

    def room(
        self,
        prompt: Sequence[int],
        max_new: int | None,
        default: int | None = None,
        param: str = "prompt",
    ) -> int:
        """How many tokens to generate; refuses a prompt that leaves no room for them.

        `param` is the field that the prompt comes from.
        """
        longest = self.engine.max_length
        left = longest - len(prompt)
        if self.encodes_prompts and left >= 0:  # the output has a length of its own
            left = longest
        if max_new is None:
            max_new = max(left, 1) if default is None else min(default, max(left, 1))
        if max_new > left:
            fits = f"max_tokens={left} would fit" if left > 0 else "send a shorter prompt"
            raise bad_request(
                f"the prompt has {count(len(prompt), 'token')}; with max_tokens={max_new} that is "
                f"more than the server's limit of {count(longest, 'token')} "
                f"(--engine.max-length); {fits}",
                "max_tokens" if left > 0 else param,
                "context_length_exceeded",
            )
        return max_new

    def requests(self, body: GenerationBody, bases: Sequence[Request]) -> list[Request]:
        """Each of `bases` with the body's sampling and stops, for each of `n` choices."""
        stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
        check_stops(stop, "stop")
        for field, most in (("stop_token_ids", MOST_STOP_TOKENS), ("logit_bias", MAX_BIAS)):
            self.check_entries(field, len(getattr(body, field) or ()), most)
        self.check_tokens(body.stop_token_ids or (), "stop_token_ids")
        self.check_tokens(tuple(body.logit_bias or ()), "logit_bias")
        self.check_tokens(body.allowed_token_ids or (), "allowed_token_ids")
        stop_tokens = frozenset(body.stop_token_ids or ())
        sampling = _sampling(body, self.defaults.sampling)
        allowed = None if body.allowed_token_ids is None else frozenset(body.allowed_token_ids)
        banned, adapter = self._banned(body.bad_words or ()), self.check_model(body.model)
        requests = []
        for base in bases:
            if (body.min_tokens or 0) > base.max_new:
                raise bad_request(
                    f"min_tokens={body.min_tokens} is more than max_tokens, {base.max_new}; send "
                    "a smaller one, or a larger max_tokens",
                    "min_tokens",
                )
            seed = secrets.randbits(32) if body.seed is None else body.seed
            min_new = base.min_new if body.min_tokens is None else body.min_tokens
            for choice in range(body.n or 1):
                own = dataclasses.replace(sampling, seed=(seed + choice) % 2**32)
                request = dataclasses.replace(
                    base, sampling=own, stop=(*base.stop, *stop),
                    stop_tokens=base.stop_tokens | stop_tokens,
                    ignore_end=bool(body.ignore_eos), min_new=min_new,
                    include_stop=bool(body.include_stop_str_in_output), allowed=allowed,
                    special_tokens=base.special_tokens or body.skip_special_tokens is False,
                    banned=banned,
                    cache_salt=body.cache_salt or "", id=request_id("seq"), adapter=adapter,
                )  # fmt: skip
                requests.append(request)
        return requests

    def truncated(
        self, prompt: tuple[int, ...], limit: int | None, max_new: int | None
    ) -> tuple[int, ...]:
        """The last tokens of a prompt: `limit` of them, or with -1 those that fit."""
        if limit == 0:
            raise bad_request(
                "truncate_prompt_tokens=0 leaves no prompt; send 1 or more, or -1 for what fits",
                "truncate_prompt_tokens",
            )
        if limit == -1:
            room = 0 if self.encodes_prompts else max(max_new or 0, 1)
            limit = max(self.engine.max_length - room, 1)
        return prompt if limit is None else prompt[-limit:]

    def prompt_logprobs(self, body: GenerationBody) -> int | None:
        """How many log-probabilities per token of the prompt a body asks for, as vLLM's field."""
        wanted = body.prompt_logprobs
        if wanted is None:
            return None
        self.check_scored("prompt_logprobs")
        reason = ""
        if wanted < 0:
            reason = f"the whole vocabulary is not supported; send 0 to {MOST_LOGPROBS}"
        elif body.stream:
            reason = "not supported in a stream; send stream=false"
        if reason:
            raise bad_request(f"prompt_logprobs={wanted}: {reason}", "prompt_logprobs")
        return wanted

    def _banned(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token ids of words, at the beginning of a text and after a space, as in vLLM."""
        if len(words) > MOST_BAD_WORDS:
            raise bad_request(
                f"bad_words has {len(words):,} words; send at most {MOST_BAD_WORDS}", "bad_words"
            )
        banned = []
        for word in words:
            if not word.strip() or len(word) > LONGEST_STOP:
                raise bad_request(
                    f"bad_words: a word has {len(word)} characters or is blank; send words of 1 to "
                    f"{LONGEST_STOP}",
                    "bad_words",
                )
            first, inner = (
                tuple(self.source.tokenizer.encode(space + word.lstrip()).tolist())
                for space in ("", " ")
            )
            if not first:  # its characters have no tokens, so it is never generated
                continue
            banned.append(first)
            if inner[0] != first[0] and len(inner) == len(first):
                banned.append(inner)
        return tuple(banned)

    # ---- running ---------------------------------------------------------------------------------

    async def deltas(self, request: Request) -> AsyncGenerator[Delta, None]:
        """What the engine yields; closing this cancels the request."""
        if request.max_new == 0 and request.prompt_logprobs is None:  # there is nothing to do
            yield Delta(finish_reason="length")
            return
        started = last = time.perf_counter()
        stream = self.engine.stream(request)
        finished = first = False
        progress = PROGRESS.get(Progress())
        try:
            async for delta in stream:
                progress.begun = True
                now = time.perf_counter()
                if delta.tokens and not first:
                    first = True
                    self.metrics.first_token.observe(now - started)
                elif delta.tokens:
                    self.metrics.between_tokens.observe((now - last) / len(delta.tokens))
                last = now if delta.tokens else last
                if delta.finish_reason == "error":
                    self.check_ready()
                    # what a request excludes is its own doing; trying again would not help. An
                    # adapter may have been unloaded while it was on its way
                    status = 400 if request.is_constrained or request.adapter else 500
                    raise ApiError(status, delta.error or "the engine failed on this request")
                if delta.finish_reason == "cancelled":
                    raise unavailable("the engine cancelled the request; send it again later")
                finished = delta.finish_reason is not None
                yield delta
            if not finished:
                raise ApiError(500, "the engine ended the request without a result")
            self.metrics.duration.observe(time.perf_counter() - started)
        finally:
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()
            elif not finished:
                self.engine.cancel(request.id)

    async def completions(self, requests: Sequence[Request]) -> list[Completion]:
        """The results of all requests; one that fails cancels the others."""
        async with contextlib.AsyncExitStack() as stack:
            tasks = [asyncio.create_task(self._completion(request)) for request in requests]
            stack.push_async_callback(_cancel, tasks)
            return list(await asyncio.gather(*tasks))

    async def _completion(self, request: Request) -> Completion:
        parts = [delta async for delta in self.deltas(request)]
        assert parts[-1].finish_reason is not None
        return Completion(
            tokens=tuple(token for part in parts for token in part.tokens),
            text="".join(part.text for part in parts),
            finish_reason=parts[-1].finish_reason,
            logprobs=tuple(each for part in parts for each in part.logprobs),
            prompt_logprobs=next((p.prompt_logprobs for p in parts if p.prompt_logprobs), ()),
            cached_tokens=max(part.cached_tokens for part in parts),
        )

    async def merged(self, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, Delta], None]:
        """(index of the request, delta) as they come."""
        if len(requests) == 1:
            async with contextlib.aclosing(self.deltas(requests[0])) as only:
                async for only_delta in only:
                    yield 0, only_delta
            return
        queue: asyncio.Queue[tuple[int, Delta | Exception]] = asyncio.Queue(_BUFFERED)

        async def forward(index: int, request: Request) -> None:
            try:
                async with contextlib.aclosing(self.deltas(request)) as deltas:
                    async for delta in deltas:
                        await queue.put((index, delta))
            except Exception as reason:
                await queue.put((index, reason))

        tasks = [asyncio.create_task(forward(*each)) for each in enumerate(requests)]
        try:
            left = len(requests)
            while left:
                index, result = await queue.get()
                if isinstance(result, Exception):
                    raise result
                left -= result.finish_reason is not None
                yield index, result
        finally:
            await _cancel(tasks)


def check_stops(texts: Sequence[str], param: str) -> None:
    """Refuse stop texts that are empty, or that would take long to look for in every token."""
    if not all(texts):
        raise bad_request(f"{param}: a stop text is empty, which would stop at once", param)
    if len(texts) > MOST_STOPS:
        raise bad_request(f"{param} has {len(texts):,} texts; send at most {MOST_STOPS}", param)
    longest = max(map(len, texts), default=0)
    if longest > LONGEST_STOP:
        raise bad_request(
            f"{param} has a text of {longest:,} characters; send at most {LONGEST_STOP}", param
        )


def _sampling(body: GenerationBody, default: Sampling) -> Sampling:
    given = {
        field.name: getattr(body, field.name)
        for field in dataclasses.fields(Sampling)
        if field.name != "seed" and getattr(body, field.name) is not None
    }
    if body.top_k is not None:
        given["top_k"] = body.top_k if body.top_k > 0 else None
    if body.logit_bias is not None:
        given["logit_bias"] = tuple(body.logit_bias.items())
    return dataclasses.replace(default, **given)


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@dataclasses.dataclass
class Usage:
    """Tokens of one HTTP request, for its response and the access log."""

    prompt: int = 0
    generated: int = 0
    cached: dict[int, int] = dataclasses.field(default_factory=dict)
    """Tokens of each prompt that were reused; its first choice counts."""

    def count(self, result: Completion | Delta, prompt: int = 0) -> None:
        """Add a result or a part of one; `prompt` is the index of its prompt."""
        self.generated += len(result.tokens)
        self.cached.setdefault(prompt, result.cached_tokens)

    def data(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt + self.generated,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
        }
