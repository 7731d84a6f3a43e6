"""What a client asks of the engine, and what the engine answers, token by token."""

import dataclasses
import os
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal, Protocol

from meshwright.errors import MeshwrightError
from meshwright.serving.grammars import Grammar
from meshwright.serving.sampling import Sampling


class OverloadedError(MeshwrightError):
    """Too many requests wait."""


class EngineStoppedError(MeshwrightError):
    """The engine takes no more requests: it has failed, or it is closed."""


def request_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"


FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt and how to continue it."""

    prompt: tuple[int, ...]
    """Token ids."""
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    max_new: int = 16
    """Largest number of tokens to generate; 0 only scores the prompt (see `prompt_logprobs`)."""
    stop: tuple[str, ...] = ()
    """Texts that end the generation; they are not part of the result (see `include_stop`)."""
    stop_tokens: frozenset[int] = frozenset()
    """Token ids that end it, in addition to the model's end tokens."""
    ignore_end: bool = False
    """Continue after the model's end tokens, for benchmarks."""
    min_new: int = 0
    """Tokens before which no end token, stop token or stop text ends the generation."""
    include_stop: bool = False
    """The result has the stop text, or the text of the token that ended it."""
    special_tokens: bool = False
    """Special tokens are shown in the text, by name."""
    logprobs: int | None = None
    """Return the log-probability of each token, and of so many of the most probable tokens."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    allowed: frozenset[int] | None = None
    """Token ids that may be generated; None: all."""
    banned: tuple[tuple[int, ...], ...] = ()
    """Sequences of token ids that are not generated."""
    grammar: Grammar | None = None
    """What the output must be, up to an end token; `max_new` or a stop text can cut it short."""
    adapter: str = ""
    """Name of the adapter; empty: the model without one."""
    cache_salt: str = ""
    """Keys and values are reused only between requests with the same salt."""
    id: str = ""
    """Names the request in logs and in `cancel`; the engine chooses one if empty."""

    @property
    def is_constrained(self) -> bool:
        """Whether the output may come to a point where no token is left to choose."""
        return self.grammar is not None or self.allowed is not None or bool(self.banned)


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position, before temperature and filters."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token, log-probability) of the most probable tokens, the first the most probable."""
    rank: int = 0
    """How many tokens are more probable; 0 means greedy decoding would choose this token."""


@dataclasses.dataclass(frozen=True)
class Delta:
    """What is new since the last one: usually one token and the text it completes.

    `text` can be empty (half a character, or the possible start of a stop text). The last delta of
    a request has a `finish_reason`.
    """

    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    """In the first delta, where the request asks for it; None for the first token."""
    finish_reason: FinishReason | None = None
    error: str = ""
    cached_tokens: int = 0
    """Tokens of the prompt whose keys and values were reused from the prefix cache."""


@dataclasses.dataclass(frozen=True)
class Completion:
    """A finished request."""

    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    cached_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """Counters and gauges for /metrics and tests."""

    running: int
    waiting: int
    pages_total: int
    pages_used: int
    """Pages that running requests hold; cached prefixes without a request do not count."""
    prompt_tokens: int
    generated_tokens: int
    finished: Mapping[str, int]
    """Requests by finish reason."""
    preemptions: int
    cached_prompt_tokens: int
    steps: int
    compilations_after_ready: int


class AnyEngine(Protocol):
    """What the server needs of an engine; tests give one that needs no model."""

    def stream(self, request: Request) -> AsyncIterator[Delta]:
        """Yield deltas as they come; closing the iterator cancels the request."""
        ...

    def generate(self, requests: Sequence[Request]) -> list[Completion]: ...

    def cancel(self, request_id: str) -> None: ...

    def stats(self) -> EngineStats: ...

    @property
    def adapters(self) -> Mapping[str, Any]:
        """The adapters that are loaded, by name; see source.Adapter."""
        ...

    def load_adapter(self, name: str, folder: str | os.PathLike[str]) -> None:
        """Load an adapter for requests that name it; takes long."""
        ...

    def unload_adapter(self, name: str) -> None:
        """Take no more requests for an adapter; those that run or wait are finished."""
        ...

    @property
    def is_ready(self) -> bool: ...

    @property
    def failure(self) -> str | None:
        """Why the engine has stopped; None while it works, and after `close`."""
        ...

    @property
    def max_length(self) -> int:
        """Most tokens of a prompt and its continuation together."""
        ...

    def close(self) -> None: ...
