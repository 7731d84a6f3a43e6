"""A request on its way through an engine: its checks, and what is handed out of it."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

from meshwright.arithmetic import whole_number
from meshwright.data import TextStream, Tokenizer, added_text
from meshwright.errors import MeshwrightError
from meshwright.models import encodes_prompts
from meshwright.present import count
from meshwright.serving.adapters import LoadedAdapter
from meshwright.serving.device_sampling import MAX_BIAS, TOP
from meshwright.serving.grammars import Constraint
from meshwright.serving.request import Completion, Delta, FinishReason, Request, TokenLogprobs
from meshwright.serving.scheduler import Sequence as Running
from meshwright.serving.settings import EngineConfig
from meshwright.serving.stop_texts import StopTexts

_log = logging.getLogger("meshwright")

Sink = Callable[[Delta], None]


@dataclasses.dataclass(eq=False)
class Job:
    """A request, and what is known of its text."""

    request: Request
    sink: Sink
    ends: frozenset[int]
    text: TextStream | None  # None: its text is not wanted as it comes
    stops: StopTexts
    variant: int  # of device_sampling.VARIANTS
    streams: bool  # every token is handed out at once, not all at the end
    before: tuple[int, ...] = ()  # tokens of the prompt that its text is decoded after
    constraint: Constraint | None = None  # of its grammar
    adapter: LoadedAdapter | None = None
    sequence: Running | None = None
    scores: list[TokenLogprobs | None] = dataclasses.field(default_factory=list)
    new_tokens: list[int] = dataclasses.field(default_factory=list)
    new_logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    new_text: str = ""

    def add(self, token: int) -> Delta | None:
        """Note a new token; what to hand out, if the request is streamed or has ended."""
        sequence = self.sequence
        assert sequence is not None
        reason: FinishReason | None = "stop" if token in self.ends else None
        self.new_tokens.append(token)
        number = len(sequence.tokens) - sequence.prompt_length
        is_early = number <= self.request.min_new
        if self.text is not None and (reason is None or self.request.include_stop):
            self.new_text += self.stops.add(self.text.add(token), is_early)
        if number >= self.request.max_new:
            reason = reason or "length"
        if self.text is not None and reason is not None and not self.stops.found:
            self.new_text += self.stops.add(self.text.end(), is_early)
            self.new_text += self.stops.end()
        if self.stops.found:
            reason = "stop"
        if reason is None and not self.streams:
            return None
        delta = Delta(
            tuple(self.new_tokens), self.new_text, tuple(self.new_logprobs), tuple(self.scores),
            reason, cached_tokens=sequence.cached,
        )  # fmt: skip
        self.new_tokens, self.new_text, self.new_logprobs, self.scores = [], "", [], []
        return delta

    def emit(self, delta: Delta) -> bool:
        """Hand a delta to the client; False if the client is gone."""
        try:
            self.sink(delta)
        except Exception:
            _log.info("the client of %s is gone", self.request.id, exc_info=True)
            return False
        return True


def logprobs_at(arrays: Any, index: int, count: int) -> TokenLogprobs:
    """Those of a token, with so many of the most probable ones."""
    logprob, rank, ids, values = (array[index] for array in arrays)
    top = tuple(zip(ids[:count].tolist(), values[:count].tolist(), strict=True))
    return TokenLogprobs(float(logprob), top, int(rank))


def check_prompts(prompts: Sequence[Sequence[int]], max_new: int, config: Any) -> None:
    """Raise a MeshwrightError for missing prompts, unknown tokens, or too long sequences."""
    if whole_number(max_new, "max_new") < 1:
        raise MeshwrightError("max_new=0 generates nothing; give 1 or more")
    if not prompts:
        raise MeshwrightError("no prompt; give at least one")
    for number, prompt in enumerate(prompts, start=1):
        if not len(prompt):
            raise MeshwrightError(f"prompt {number} is empty; a model continues at least one token")
        wrong = [token for token in prompt if not 0 <= token < config.vocab]
        if wrong:
            raise MeshwrightError(
                f"prompt {number} has token {wrong[0]}; the model has 0 to {config.vocab - 1}"
            )
        # an encoder reads the prompt; a decoder alone has it in its own sequence
        left = config.max_seq - (0 if encodes_prompts(config) else len(prompt))
        if max_new > left or len(prompt) > config.max_seq:
            is_shorter = 0 < left < max_new
            fits = f"max_new={left} would fit" if is_shorter else "give a shorter prompt"
            raise MeshwrightError(
                f"prompt {number} has {count(len(prompt), 'token')}; with max_new={max_new} that "
                f"is more than the model's {config.max_seq}; {fits}"
            )


def check_request(
    request: Request, model_config: Any, config: EngineConfig, max_length: int
) -> None:
    """Raise a MeshwrightError for a request that cannot be served."""
    if whole_number(request.max_new, "max_new") < 0:
        raise MeshwrightError(f"max_new={request.max_new} must be at least 0")
    if request.max_new == 0 and request.prompt_logprobs is None:
        raise MeshwrightError("max_new=0 generates nothing; give 1 or more")
    limited = dataclasses.replace(model_config, max_seq=max_length)
    # a request that only scores its prompt may fill all of max_length
    scores_only = request.max_new == 0 and len(request.prompt) > 0
    prompt = request.prompt[:-1] or request.prompt if scores_only else request.prompt
    check_prompts([prompt], max(request.max_new, 1), limited)
    if request.prompt_logprobs is not None and encodes_prompts(model_config):
        raise MeshwrightError(
            "prompt_logprobs: an encoder reads the prompt, whose tokens have no probabilities; "
            "leave it out"
        )
    if request.prompt_logprobs is not None and not config.prompt_logprobs:
        raise MeshwrightError(
            "this engine does not score prompts, as echo with logprobs and /loglikelihood need "
            "it: start it without --engine.no-prompt-logprobs, or with "
            "EngineConfig(prompt_logprobs=True)"
        )
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(request, name)
        if wanted is not None and not 0 <= wanted <= TOP:
            raise MeshwrightError(f"{name}={wanted} must be from 0 to {TOP}")
    stop: Any = request.stop  # Python lets callers give anything
    if isinstance(stop, str) or not all(isinstance(text, str) for text in stop):
        example = stop if isinstance(stop, str) else "END"
        raise MeshwrightError(f"stop={stop!r} must be a tuple of texts, as in stop=({example!r},)")
    if not 0 <= request.min_new <= max(request.max_new, 0):
        raise MeshwrightError(
            f"min_new={request.min_new} must be from 0 to max_new, {request.max_new}"
        )
    if request.allowed is not None and not request.allowed:
        raise MeshwrightError("allowed is empty, which would allow no token; leave it out for all")
    if not all(request.banned):
        raise MeshwrightError("banned has an empty sequence; give at least one token in each")
    biases, vocab = request.sampling.logit_bias, model_config.vocab
    if len(biases) > MAX_BIAS:
        raise MeshwrightError(f"logit_bias has {len(biases)} entries; {MAX_BIAS} are allowed")
    named = {
        "logit_bias": [token for token, _ in biases],
        "allowed": request.allowed or (),
        "banned": [token for sequence in request.banned for token in sequence],
    }
    for name, tokens in named.items():
        for token in tokens:
            if not 0 <= token < vocab:
                raise MeshwrightError(f"{name} has token {token}; the model has 0 to {vocab - 1}")


def completion_of(job: Job, deltas: list[Delta], tokenizer: Tokenizer) -> Completion:
    """All that was handed out of a request, or its error."""
    last = deltas[-1]
    if last.finish_reason == "error":
        raise MeshwrightError(last.error)
    tokens = tuple(token for delta in deltas for token in delta.tokens)
    text = "".join(delta.text for delta in deltas)
    if job.text is None:
        ended = tokens and tokens[-1] in job.ends and not job.request.include_stop
        shown, named = tokens[:-1] if ended else tokens, job.request.special_tokens
        text = added_text(tokenizer, job.before, shown, named)
    return Completion(
        tokens=tokens,
        text=text,
        finish_reason=last.finish_reason or "error",
        logprobs=tuple(each for delta in deltas for each in delta.logprobs),
        prompt_logprobs=deltas[0].prompt_logprobs,
        cached_tokens=last.cached_tokens,
    )
