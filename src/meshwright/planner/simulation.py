"""Requests that one engine serves, simulated: how long clients wait for a first and a next token.

Devices compute one step after another; meanwhile the host reads the tokens of steps before, and
chooses the next ones: see Engine._loop. `scheduled` asks the engine's own scheduler for each step.
`counted` has the same steps without a sequence in hand: while pages are enough, a sequence decodes
in every step from its first token to its last, so a step is a few sums. Tests hold both together.
"""

import dataclasses
import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshwright.planner import efficiency
from meshwright.planner.schedules.engine_time import Costs
from meshwright.serving import IN_FLIGHT, EngineConfig, PagePool, ScheduledSequence, Scheduler

Request = tuple[float, int, int]
"""When it comes, and the tokens of its prompt and answer."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """How long clients may wait at a percentile, in seconds."""

    first_token: float
    per_token: float
    percentile: float


@dataclasses.dataclass(frozen=True, eq=False)
class Waits:
    """What clients saw: seconds to first tokens, and between tokens, each in ascending order."""

    first: np.ndarray
    between: np.ndarray
    seconds: float  # from the first request to the last token
    busy: float  # part of that in which the devices computed

    def first_token(self, percentile: float) -> float:
        return _percentile(self.first, percentile)

    def per_token(self, percentile: float) -> float:
        return _percentile(self.between, percentile)

    def meet(self, limits: Limits) -> bool:
        at = limits.percentile
        first, each = self.first_token(at), self.per_token(at)
        return first <= limits.first_token and each <= limits.per_token


def _percentile(values: np.ndarray, percentile: float) -> float:
    return float(values[_place(len(values), percentile)]) if len(values) else 0.0


def _place(count: int, percentile: float) -> int:
    """Index of a percentile, of so many values in ascending order."""
    return min(count - 1, math.ceil(percentile / 100 * count) - 1)


@dataclasses.dataclass(frozen=True)
class Simulator:
    """An engine whose steps take as long as its schedule counts."""

    config: EngineConfig
    pages: int
    costs: Costs

    def simulate(self, requests: Sequence[Request], limits: Limits | None = None) -> Waits | None:
        """What clients see, in the order that requests come.

        None as soon as the waits are known not to meet the `limits`.
        """
        try:
            return counted(self, requests, limits)
        except _FewPagesError:
            return scheduled(self, requests, limits)


class _FewPagesError(Exception):
    """The pages may not be enough for the sequences of a batch."""


def scheduled(
    engine: Simulator, requests: Sequence[Request], limits: Limits | None = None
) -> Waits | None:
    """What clients see of an engine whose scheduler chooses every step."""
    return _simulate(_ScheduledSteps(engine), requests, limits)


def counted(
    engine: Simulator, requests: Sequence[Request], limits: Limits | None = None
) -> Waits | None:
    """As `scheduled`, from sums over the sequences.

    Raises _FewPagesError where pages could run out: only a scheduler knows what happens then.
    """
    return _simulate(_CountedSteps(engine), requests, limits)


_Step = tuple[float, int, Any]
"""A step: its seconds, the tokens that it samples, and what `read` takes."""
_Tokens = tuple[list[float], list[tuple[float, int]], int]
"""The tokens of a step: of first tokens, when they were asked for; of further ones, when the token
before came, and how many; and the sequences that end."""


def _simulate(
    chosen: "_ScheduledSteps | _CountedSteps", requests: Sequence[Request], limits: Limits | None
) -> Waits | None:
    longest_first, longest_gap = (
        (math.inf, math.inf) if limits is None else (limits.first_token, limits.per_token)
    )
    late_first, late_between = _allowed(requests, limits)
    each_request, each_step = efficiency.SERVED_REQUEST, efficiency.PLANNED_STEP
    each_token = efficiency.SERVED_TOKEN
    steps: deque[tuple[float, int, Any]] = deque()  # when each ends
    first: list[float] = []
    gaps: list[float] = []
    gap_counts: list[int] = []
    free = now = begun = requests[0][0]  # when the devices are, and the host
    busy, come, left = 0.0, 0, len(requests)
    while left:
        while come < len(requests) and requests[come][0] <= now:
            chosen.add(requests[come])
            come += 1
            now += each_request
        dispatched = chosen.next_step() if len(steps) <= IN_FLIGHT else None
        if dispatched is not None:
            took, sampled, step = dispatched
            busy += took
            now += each_step
            free = (free if free > now else now) + took
            steps.append((free, sampled, step))
            continue
        if not steps:  # nothing to do before the next request
            now = max(now, requests[come][0])
            continue
        end, sampled, step = steps.popleft()
        now = (now if now > end else end) + sampled * each_token
        asked, before, ended = chosen.read(step, now)
        for when in asked:
            first.append(now - when + efficiency.FIRST_TOKEN)
            late_first -= first[-1] > longest_first
        for when, count in before:
            gap = now - when
            gaps.append(gap)
            gap_counts.append(count)
            if gap > longest_gap:
                late_between -= count
        if late_first < 0 or late_between < 0:
            return None
        left -= ended
    seconds = now - begun
    return Waits(np.sort(first), np.sort(np.repeat(gaps, gap_counts)), seconds, busy / seconds)


def _allowed(requests: Sequence[Request], limits: Limits | None) -> tuple[float, float]:
    """First and further tokens that may come too late, for the limits to be met."""
    if limits is None:
        return math.inf, math.inf
    tokens = sum(output - 1 for _, _, output in requests)
    return tuple(  # type: ignore[return-value]
        count - 1 - _place(count, limits.percentile) for count in (len(requests), tokens)
    )


class _ScheduledSteps:
    """The steps that the engine's scheduler chooses."""

    def __init__(self, engine: Simulator) -> None:
        pool = PagePool(engine.pages, engine.config.page_size, remember=False)
        self.scheduler, self.costs = Scheduler(engine.config, pool), engine.costs
        self.asked: dict[ScheduledSequence, float] = {}  # when, or when its last token came

    def add(self, request: Request) -> None:
        when, prompt, output = request
        sequence = ScheduledSequence("", [0] * prompt, prompt, output)
        self.scheduler.add(sequence)
        self.asked[sequence] = when

    def next_step(self) -> _Step | None:
        step = self.scheduler.next_step()
        if step is None:
            return None
        sampled = [*step.decode, *(chunk.sequence for chunk in step.chunks if chunk.samples)]
        return self.costs.seconds(step), len(sampled), sampled

    def read(self, step: list[ScheduledSequence], now: float) -> _Tokens:
        first, further, ended = [], [], 0
        for sequence in step:
            sequence.tokens.append(0)
            sequence.in_flight -= 1
            known = len(sequence.tokens) - sequence.prompt_length
            if known == 1:
                first.append(self.asked[sequence])
            else:
                further.append((self.asked[sequence], 1))
            self.asked[sequence] = now
            if known >= sequence.max_new:
                self.scheduler.remove(sequence)
                del self.asked[sequence]
                ended += 1
        return first, further, ended


@dataclasses.dataclass
class _Group:
    """Sequences that decode, or that end."""

    count: int = 0
    tokens: int = 0  # whose keys are in the pages
    pages: int = 0

    def add(self, other: "_Group", sign: int = 1) -> None:
        self.count += sign * other.count
        self.tokens += sign * other.tokens
        self.pages += sign * other.pages


@dataclasses.dataclass
class _Prompt:
    """A sequence whose prompt is computed."""

    request: Request
    pages: int  # that it needs at most
    start: int = 0  # tokens that are computed

    @property
    def left(self) -> int:
        return self.request[1] - self.start


class _CountedSteps:
    """The same steps, counted."""

    def __init__(self, engine: Simulator) -> None:
        self.costs, self.shapes = engine.costs, engine.config.chunks
        self.page_size = engine.config.page_size
        self.slots, self.pages = engine.config.max_batch, engine.pages - 1  # that are free
        self.waiting: deque[Request] = deque()
        self.prompts: list[_Prompt] = []  # in the order they came
        self.decoding = _Group()
        self.leaving: dict[int, _Group] = {}  # by step: those that decode no more
        self.ends: dict[int, _Group] = {}  # by step: those whose last token it samples
        self.number = 0
        self.last = 0.0  # when the tokens of the step before came

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def next_step(self) -> _Step | None:
        if self.waiting:
            self._admit()
        decoding = self.decoding
        if (leave := self.leaving.pop(self.number + 1, None)) is not None:
            decoding.add(leave, -1)
        if not (decoding.count or self.prompts):
            return None
        self.number += 1
        decoding.tokens += decoding.count
        if not self.prompts:
            took = self.costs.counted(decoding.count, decoding.tokens, decoding.count)
            return took, decoding.count, ([], decoding.count, self.number)
        # one token that is left of a prompt is computed as a decode token
        chunks = [one for one in self.prompts if one.left > 1]
        samples = [one for one in self.prompts if one.left == 1]
        decoded = decoding.count + len(samples)
        tokens = decoding.tokens + sum(one.request[1] for one in samples)
        shape, pairs = (0, 0), 0.0
        if chunks:
            shape = max(
                self.shapes, key=lambda shape: (_tokens_taken(chunks, shape), -math.prod(shape))
            )
        for one in chunks[: shape[0]]:
            count = min(one.left, shape[1])
            pairs += count * (one.start + (count + 1) / 2)
            one.start += count
            if not one.left:
                samples.append(one)
        further = decoding.count
        sampled = further + len(samples)
        took = self.costs.counted(decoded, tokens, sampled, shape, pairs)
        for one in samples:
            self._begin(one)
        return took, sampled, ([one.request[0] for one in samples], further, self.number)

    def read(self, step: tuple[list[float], int, int], now: float) -> _Tokens:
        asked, further, number = step
        # each that decodes had a token in the step before
        before = [(self.last, further)] if further else []
        self.last = now
        ended = self.ends.pop(number, None)
        if ended is None:
            return asked, before, 0
        self.slots, self.pages = self.slots + ended.count, self.pages + ended.pages
        return asked, before, ended.count

    def _admit(self) -> None:
        while self.waiting and self.slots:
            request = self.waiting.popleft()
            # its own, and one that the scheduler promises to each that runs
            needed = 1 - (-(request[1] + request[2]) // self.page_size)
            if needed > self.pages:
                raise _FewPagesError
            self.slots, self.pages = self.slots - 1, self.pages - needed
            self.prompts.append(_Prompt(request, needed))

    def _begin(self, one: _Prompt) -> None:
        """Its first token is sampled by this step, and each further one by the next."""
        _, prompt, output = one.request
        self.prompts.remove(one)
        self.decoding.add(_Group(1, prompt))
        leave = self.leaving.setdefault(self.number + output, _Group())
        leave.add(_Group(1, prompt + output - 1))
        self.ends.setdefault(self.number + output - 1, _Group()).add(_Group(1, 0, one.pages))


def _tokens_taken(prompts: list[_Prompt], shape: tuple[int, int]) -> int:
    """Of prompts, those that a shape takes."""
    return sum(min(one.left, shape[1]) for one in prompts[: shape[0]])
