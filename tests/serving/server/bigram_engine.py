"""An engine without a model: the next token depends on the last one only, by a fixed table."""

import asyncio
import collections
import dataclasses
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np

from meshwright.data import ByteTokenizer, Tokenizer
from meshwright.serving.request import Completion, Delta, EngineStats, Request, TokenLogprobs

TOKENIZER = ByteTokenizer()
END = TOKENIZER.end_of_document


def _log_probabilities() -> np.ndarray:
    """[last token, next token]; printable ASCII is likely, so that texts are readable."""
    logits = np.random.default_rng(0).normal(scale=2.0, size=(257, 257))
    logits[:, 32:127] += 8.0
    logits[:, END] += 4.0
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


TABLE = _log_probabilities()


def loglikelihood(tokens: Sequence[int], start: int) -> tuple[float, bool]:
    """Of tokens[start:], given those before; directly from the table."""
    pairs = list(itertools.pairwise(tokens))[start - 1 :]
    greedy = all(int(TABLE[last].argmax()) == token for last, token in pairs)
    return float(sum(TABLE[last, token] for last, token in pairs)), greedy


def greedy(tokens: Sequence[int], count: int) -> list[int]:
    """The next `count` tokens, or those before the end token."""
    out: list[int] = []
    last = tokens[-1]
    for _ in range(count):
        last = int(TABLE[last].argmax())
        if last == END:
            break
        out.append(last)
    return out


@dataclasses.dataclass
class BigramEngine:
    """Implements AnyEngine on the server's event loop."""

    max_length: int = 512
    delay: float = 0.0
    """Seconds per token."""
    held_after: int | None = None
    """After so many deltas, a request waits until `release()`: it runs for as long as a test needs."""
    answer: Callable[[str], str] | None = None
    """Generates this text instead, given the prompt."""
    is_ready: bool = True
    failure: str | None = None
    fails: str = ""
    """Ends every request with this error after its first token."""

    cached: int = 0
    """Tokens that are said to be reused, in every delta."""
    tokenizer: Tokenizer = TOKENIZER
    """Of 257 ids."""

    def __post_init__(self) -> None:
        self.active: dict[str, Request] = {}
        self.seen: list[Request] = []
        self.counts: collections.Counter[str] = collections.Counter()
        self.finished: collections.Counter[str] = collections.Counter()
        self.closed = False
        self._released = threading.Event()

    def release(self) -> None:
        self._released.set()

    @property
    def adapters(self) -> dict[str, Any]:
        return {}

    def load_adapter(self, name: str, folder: str) -> None:
        raise NotImplementedError

    def unload_adapter(self, name: str) -> None:
        raise NotImplementedError

    async def stream(self, request: Request) -> AsyncIterator[Delta]:
        assert request.id not in self.active
        self.active[request.id] = request
        self.seen = [*self.seen[-99:], request]
        self.counts["prompt"] += len(request.prompt)
        reason = "cancelled"
        try:
            for index, delta in enumerate(self._deltas(request)):
                await asyncio.sleep(self.delay)
                while index == self.held_after and not self._released.is_set():
                    await asyncio.sleep(0.002)
                self.counts["generated"] += len(delta.tokens)
                reason = delta.finish_reason or reason
                yield dataclasses.replace(delta, cached_tokens=self.cached)
        finally:
            del self.active[request.id]
            self.finished[reason] += 1

    def _deltas(self, request: Request) -> list[Delta]:
        """All of them; real engines find out as they go."""
        tokens, ended = self._tokens(request)
        deltas, text, cut, sent = [], "", False, 0
        prompt = list(request.prompt)
        named = request.special_tokens
        before = self.tokenizer.decode(prompt, named)
        if before.endswith("\N{REPLACEMENT CHARACTER}"):
            prompt, before = [], ""
        for index, token in enumerate(tokens):
            text = self.tokenizer.decode(prompt + tokens[: index + 1], named)[len(before) :]
            at = min((p for p in map(text.find, request.stop) if p >= 0), default=-1)
            cut = at >= 0
            last = index == len(tokens) - 1
            held = max((self._overlap(text, stop) for stop in request.stop), default=0)
            whole = text[:at] if cut else text[: len(text) - (0 if last else held)]
            if whole.endswith("\N{REPLACEMENT CHARACTER}") and not last:
                whole = whole[:sent]
            last_token = request.prompt[-1] if index == 0 else tokens[index - 1]
            deltas.append(
                Delta(
                    (token,),
                    whole[sent:],
                    ()
                    if request.logprobs is None
                    else (scored(last_token, token, request.logprobs),),
                )
            )
            sent = max(sent, len(whole))
            if self.fails:
                return [*deltas, Delta(finish_reason="error", error=self.fails)]
            if cut:
                break
        deltas.append(Delta(finish_reason="stop" if cut or ended else "length"))
        if request.prompt_logprobs is not None:
            pairs = itertools.pairwise(request.prompt)
            known = [scored(last, token, request.prompt_logprobs) for last, token in pairs]
            deltas[0] = dataclasses.replace(deltas[0], prompt_logprobs=(None, *known))
        return deltas

    def _tokens(self, request: Request) -> tuple[list[int], bool]:
        if self.answer is not None:
            tokens = list(self.answer(TOKENIZER.decode(request.prompt)).encode())
            return tokens[: request.max_new], len(tokens) <= request.max_new
        random = np.random.default_rng(request.sampling.seed)
        tokens, last = [], request.prompt[-1]
        for _ in range(request.max_new):
            scaled = TABLE[last].copy()
            for token, bias in request.sampling.logit_bias:
                scaled[token] += bias
            if request.sampling.temperature > 0:
                scaled = scaled / request.sampling.temperature + random.gumbel(size=257)
            last = int(scaled.argmax())
            tokens.append(last)  # an end token is the last one, and has no text
            if (last == END and not request.ignore_end) or last in request.stop_tokens:
                return tokens, True
        return tokens, False

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        return next((n for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n])), 0)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        raise NotImplementedError

    def cancel(self, request_id: str) -> None:
        raise NotImplementedError

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.active), waiting=0, pages_total=64, pages_used=len(self.active),
            prompt_tokens=self.counts["prompt"], generated_tokens=self.counts["generated"],
            finished=dict(self.finished), preemptions=0, cached_prompt_tokens=0,
            steps=self.counts["generated"], compilations_after_ready=0,
        )  # fmt: skip

    def close(self) -> None:
        self.closed = True


def scored(last: int, token: int, count: int) -> TokenLogprobs:
    order = np.argsort(-TABLE[last], kind="stable")
    rank = int(np.flatnonzero(order == token)[0])
    top = tuple((int(i), float(TABLE[last, i])) for i in order[:count])
    return TokenLogprobs(float(TABLE[last, token]), top, rank)
