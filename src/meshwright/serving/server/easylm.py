"""The routes of EasyLM's server, with its request and response bodies."""

import dataclasses
import functools
import itertools
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from meshwright.data import added_text, last_character
from meshwright.errors import MeshwrightError
from meshwright.present import count
from meshwright.serving.request import Completion, Request, TokenLogprobs, request_id
from meshwright.serving.sampling import Sampling
from meshwright.serving.server.bodies import (
    EasyLMChatBody,
    GenerateBody,
    GreedyUntilBody,
    ScoreBody,
)
from meshwright.serving.server.errors import ApiError, bad_request, json_response, of_mistake
from meshwright.serving.server.logprobs import written_entries
from meshwright.serving.server.service import Service, check_stops
from meshwright.serving.server.transport import assembled, finish, off_loop, read

Endpoint = Callable[[HttpRequest, Service], Awaitable[Response]]


def _as_fastapi(endpoint: Endpoint) -> Endpoint:
    """A bad body is answered as EasyLM's server does: 422 with FastAPI's `detail`."""

    @functools.wraps(endpoint)
    async def answer(http: HttpRequest, service: Service) -> Response:
        try:
            return await endpoint(http, service)
        except MeshwrightError as reason:
            error = of_mistake(reason)
        except ApiError as reason:
            error = reason
        if error.status != 400:
            raise error
        names = re.findall(r"\w+", error.param or "")
        place = ["body", *(int(name) if name.isdecimal() else name for name in names)]
        detail = {"type": "value_error", "loc": place, "msg": error.message}
        return json_response({"detail": [detail]}, 422)

    return answer


@dataclasses.dataclass(frozen=True)
class _Score:
    log_likelihood: float = 0.0
    is_greedy: bool = True


@_as_fastapi
async def loglikelihood(http: HttpRequest, service: Service) -> Response:
    """Log-likelihood of each text after its prefix, and whether greedy decoding gives it."""
    service.check_scored("/loglikelihood")
    body = await read(http, ScoreBody, service)
    _check_list(service, "text", body.text)
    prefixes = [""] * len(body.text) if body.prefix_text is None else body.prefix_text
    if len(prefixes) != len(body.text):
        raise bad_request(
            f"prefix_text has {len(prefixes)} entries, text {len(body.text)}; they must be as many",
            "prefix_text",
        )
    windows = await off_loop(http, lambda: _windows(service, prefixes, body.text))
    scores = await finish(http, service, _scores(service, windows))
    return json_response(
        {
            "prefix_text": prefixes,
            "text": body.text,
            "log_likelihood": [score.log_likelihood for score in scores],
            "is_greedy": [score.is_greedy for score in scores],
        }
    )


@_as_fastapi
async def loglikelihood_rolling(http: HttpRequest, service: Service) -> Response:
    """Log-likelihood of each text, in windows of the longest sequence where it is longer."""
    service.check_scored("/loglikelihood-rolling")
    body = await read(http, ScoreBody, service)
    _check_list(service, "text", body.text)
    windows = await off_loop(http, lambda: _rolling_windows(service, body.text))
    scores = await finish(http, service, _scores(service, windows))
    return json_response(
        {
            "text": body.text,
            "log_likelihood": [score.log_likelihood for score in scores],
            "is_greedy": [score.is_greedy for score in scores],
        }
    )


@_as_fastapi
async def generate(http: HttpRequest, service: Service) -> Response:
    body = await read(http, GenerateBody, service)
    own = service.config.easylm
    temperature = own.default_temperature if body.temperature is None else body.temperature
    _check_list(service, "prefix_text", body.prefix_text)
    prompts = await off_loop(http, lambda: _prefixes(service, body.prefix_text))
    texts = await finish(http, service, _generated(service, prompts, temperature))
    return json_response(
        {"prefix_text": body.prefix_text, "output_text": texts, "temperature": temperature}
    )


@_as_fastapi
async def chat(http: HttpRequest, service: Service) -> Response:
    body = await read(http, EasyLMChatBody, service)
    own = service.config.easylm
    temperature = own.default_temperature if body.temperature is None else body.temperature
    context = (
        body.context
        + own.chat_user_prefix
        + body.prompt
        + own.chat_user_suffix
        + own.chat_lm_prefix
    )
    prompts = await off_loop(http, lambda: _prompts(service, [own.chat_prepend_text + context]))
    (text,) = await finish(http, service, _generated(service, prompts, temperature))
    context += text + own.chat_lm_suffix
    return json_response({"response": text, "context": context, "temperature": temperature})


@_as_fastapi
async def greedy_until(http: HttpRequest, service: Service) -> Response:
    """Greedy continuation of each prefix, up to the first of its stop texts."""
    body = await read(http, GreedyUntilBody, service)
    if len(body.until) != len(body.prefix_text):
        raise bad_request(
            f"until has {len(body.until)} entries, prefix_text {len(body.prefix_text)}; send a "
            "text or a list of texts for each prefix",
            "until",
        )
    _check_list(service, "prefix_text", body.prefix_text)
    stops = [(each,) if isinstance(each, str) else tuple(each) for each in body.until]
    for each in stops:
        check_stops(each, "until")
    prompts = await off_loop(http, lambda: _prefixes(service, body.prefix_text))
    texts = await finish(http, service, _greedy_until(service, prompts, stops))
    return json_response(
        {
            "prefix_text": body.prefix_text,
            "until": body.until,
            "max_length": service.config.easylm.greedy_until_max_length,
            "output_text": texts,
        }
    )


# ---- work ----------------------------------------------------------------------------------------

_Window = tuple[tuple[int, ...], int]
"""A prompt, and how many of its last tokens are scored."""


def _windows(
    service: Service, prefixes: Sequence[str], texts: Sequence[str]
) -> list[list[_Window]]:
    """Each text after the end of its prefix that fits."""
    windows = []
    most = service.engine.max_length
    begins, ends = _prefixes(service, prefixes), _text_tokens(service, texts)
    for before, after in zip(begins, ends, strict=True):
        if len(after) >= most:
            raise bad_request(
                f"a text has {count(len(after), 'token')}, which with a prefix is more than the "
                f"server's limit of {count(most, 'token')} (--engine.max-length); send it to "
                "/loglikelihood-rolling",
                "text",
            )
        before = before[len(after) - most :]  # the end of a long prefix
        windows.append([(before + after, len(after))])
    return windows


def _rolling_windows(service: Service, texts: Sequence[str]) -> list[list[_Window]]:
    size = min(service.config.easylm.seq_length, service.engine.max_length - 1)
    windows = []
    for text in _text_tokens(service, texts):
        tokens = (service.start, *text)
        own = []
        for first in range(1, len(tokens), size):
            end = min(first + size, len(tokens))
            # the last window reaches back, and only its new tokens are scored
            begin = max(end - size, 1)
            own.append((tokens[begin - 1 : end], end - first))
        windows.append(own)
    return windows


async def _scores(service: Service, texts: Sequence[Sequence[_Window]]) -> list[_Score]:
    """The score of each text, the sum of its windows'."""
    windows = [window for text in texts for window in text if window[1]]
    requests = (
        Request(tokens, Sampling(temperature=0), 0, prompt_logprobs=1, id=request_id("seq"))
        for tokens, _ in windows
    )
    results = await _run(service, requests)
    return await assembled(written_entries(results, 0), lambda: _sums(texts, results))


def _sums(texts: Sequence[Sequence[_Window]], results: Iterable[Completion]) -> list[_Score]:
    left = iter(results)
    scores = []
    for text in texts:
        scored: list[TokenLogprobs | None] = []
        for _, size in text:
            scored += next(left).prompt_logprobs[-size:] if size else ()
        known = [each for each in scored if each is not None]
        scores.append(
            _Score(sum((e.logprob for e in known), 0.0), all(each.rank == 0 for each in known))
        )
    return scores


async def _generated(
    service: Service, prompts: Sequence[tuple[int, ...]], temperature: float
) -> list[str]:
    def requests() -> Iterator[Request]:
        for tokens in prompts:
            prompt, max_new = _fitting(service, tokens)
            sampling = _random(temperature, service.config.easylm.top_k)
            yield Request(prompt, sampling, max_new, id=request_id("seq"))

    return [result.text for result in await _run(service, requests())]


async def _greedy_until(
    service: Service, prompts: Sequence[tuple[int, ...]], stops: Sequence[tuple[str, ...]]
) -> list[str]:
    """As long as no stop text comes, generate again from the end of the text so far.

    A model with an encoder cannot: its output ends at the server's longest.
    """
    tokenizer, ends = service.source.tokenizer, service.source.ends
    tokens = [*prompts]
    generated = ["" for _ in prompts]
    left = dict.fromkeys(range(len(prompts)), service.config.easylm.greedy_until_max_length)

    def request(index: int, most: int) -> Request:
        prompt, max_new = _fitting(service, tokens[index])
        return Request(
            prompt, Sampling(temperature=0), min(max_new, most), stops[index], id=request_id("seq")
        )

    while left:
        results = await _run(service, (request(*each) for each in left.items()))
        for index, result in zip([*left], results, strict=True):
            before = () if service.encodes_prompts else last_character(tokenizer, prompts[index])
            tokens[index] += result.tokens
            left[index] -= len(result.tokens)
            # of all tokens: a character may have begun in the part before
            output = tokens[index][len(prompts[index]) :]
            output = output[:-1] if output and output[-1] in ends else output
            generated[index] = added_text(tokenizer, before, output)
            cut = min(
                (at for stop in stops[index] if (at := generated[index].find(stop)) >= 0),
                default=-1,
            )
            if cut >= 0:
                generated[index] = generated[index][:cut]
            ended = cut >= 0 or result.finish_reason != "length" or left[index] <= 0
            if ended or service.encodes_prompts:  # whose prompt is not what comes before
                del left[index]
    return generated


async def _run(service: Service, requests: Iterable[Request]) -> list[Completion]:
    """All results; no more requests are made at once than the server takes."""
    results: list[Completion] = []
    left = iter(requests)
    while part := list(itertools.islice(left, service.config.limits.requests)):
        with service.admitted(len(part)):
            results += await service.completions(part)
    return results


def _random(temperature: float, top_k: int) -> Sampling:
    return Sampling(temperature=temperature, top_k=top_k, seed=secrets.randbits(32))


def _fitting(service: Service, prompt: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """The end of the prompt that leaves room, and how many tokens to generate."""
    own = service.config.easylm
    longest = min(own.seq_length, service.engine.max_length)
    most = min(own.input_length, longest // 2)
    return prompt[-most:], longest - most


def _check_list(service: Service, field: str, texts: Sequence[str]) -> None:
    service.check_entries(field, len(texts), service.config.limits.texts, "--limits.texts")


def _prompts(service: Service, texts: Sequence[str]) -> list[tuple[int, ...]]:
    return [service.encode(text) or (service.start,) for text in texts]


def _prefixes(service: Service, texts: Sequence[str]) -> list[tuple[int, ...]]:
    own = service.config.easylm
    return _prompts(
        service, [own.prepend_to_prefix + text + own.append_to_prefix for text in texts]
    )


def _text_tokens(service: Service, texts: Sequence[str]) -> list[tuple[int, ...]]:
    own = service.config.easylm
    return [
        service.encode(own.prepend_to_text + text + own.append_to_text, special_tokens=False)
        for text in texts
    ]
