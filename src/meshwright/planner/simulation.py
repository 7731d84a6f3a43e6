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
from meshwright.planner.schedules.engine import Costs
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
            return scheduled(self, requests)


class _FewPagesError(Exception):
    """The pages may not be enough for the sequences of a batch."""


def scheduled(engine: Simulator, requests: Sequence[Request]) -> Waits:
    """What clients see of an engine whose scheduler chooses every step."""
    pool = PagePool(engine.pages, engine.config.page_size, remember=False)
    scheduler = Scheduler(engine.config, pool)
    arrivals = deque(requests)
    begun = arrivals[0][0]
    asked: dict[ScheduledSequence, float] = {}  # when, or when its last token came
    first: list[float] = []
    between: list[float] = []
    steps: deque[tuple[float, Any]] = deque()  # when each ends
    free = now = begun  # when the devices are, and the host
    busy = 0.0
    while arrivals or asked:
        while arrivals and arrivals[0][0] <= now:
            when, prompt, output = arrivals.popleft()
            sequence = ScheduledSequence("", [0] * prompt, prompt, output)
            scheduler.add(sequence)
            asked[sequence] = when
            now += efficiency.SERVED_REQUEST
        step = scheduler.next_step() if len(steps) <= IN_FLIGHT else None
        if step is not None:
            took = engine.costs.seconds(step)
            busy += took
            now += efficiency.PLANNED_STEP
            free = max(free, now) + took
            steps.append((free, step))
            continue
        if not steps:  # nothing to do before the next request
            now = max(now, arrivals[0][0])
            continue
        end, done = steps.popleft()
        sampled = [*done.decode, *(one.sequence for one in done.chunks if one.samples)]
        now = max(now, end) + len(sampled) * efficiency.SERVED_TOKEN
        for sequence in sampled:
            if sequence not in asked:
                continue
            sequence.tokens.append(0)
            sequence.in_flight -= 1
            known = len(sequence.tokens) - sequence.prompt_length
            if known == 1:
                first.append(now - asked[sequence] + efficiency.FIRST_TOKEN)
            else:
                between.append(now - asked[sequence])
            asked[sequence] = now
            if known >= sequence.max_new:
                scheduler.remove(sequence)
                del asked[sequence]
    seconds = now - begun
    return Waits(np.sort(first), np.sort(between), seconds, busy / seconds)


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


def counted(
    engine: Simulator, requests: Sequence[Request], limits: Limits | None = None
) -> Waits | None:
    """As `scheduled`; None as soon as the waits are known not to meet the limits.

    Raises _FewPagesError where pages could run out: only a scheduler knows what happens then.
    """
    longest_first, longest_gap = (
        (math.inf, math.inf) if limits is None else (limits.first_token, limits.per_token)
    )
    late_first, late_between = _allowed(requests, limits)
    config, plan, each_token = engine.config, _Plan(engine), efficiency.SERVED_TOKEN
    waiting: deque[Request] = deque()
    steps: deque[tuple[float, int, list[float], int]] = deque()  # end, tokens, firsts, number
    first: list[float] = []
    gaps: list[float] = []
    gap_counts: list[int] = []
    free = now = last = begun = requests[0][0]
    busy, come, left = 0.0, 0, len(requests)
    slots, pages, size = config.max_batch, engine.pages - 1, config.page_size
    while left:
        while come < len(requests) and requests[come][0] <= now:
            waiting.append(requests[come])
            come += 1
            now += efficiency.SERVED_REQUEST
        if len(steps) <= IN_FLIGHT:
            while waiting and slots:
                request = waiting.popleft()
                # its own, and one that the scheduler promises to each that runs
                needed = 1 - (-(request[1] + request[2]) // size)
                if needed > pages:
                    raise _FewPagesError
                slots, pages = slots - 1, pages - needed
                plan.prompts.append(_Prompt(request, needed))
            step = plan.next_step()
            if step is not None:
                took, sampled, firsts = step
                busy += took
                now += efficiency.PLANNED_STEP
                free = max(free, now) + took
                steps.append((free, sampled, firsts, plan.number))
                continue
        if not steps:  # nothing to do before the next request
            now = max(now, requests[come][0])
            continue
        end, sampled, firsts, number = steps.popleft()
        now = (now if now > end else end) + sampled * each_token
        for when in firsts:
            first.append(now - when + efficiency.FIRST_TOKEN)
            late_first -= first[-1] > longest_first
        further = sampled - len(firsts)
        if further:  # each had a token in the step before
            gap = now - last
            gaps.append(gap)
            gap_counts.append(further)
            if gap > longest_gap:
                late_between -= further
        if late_first < 0 or late_between < 0:
            return None
        last = now
        ended = plan.ends.pop(number, None)
        if ended is not None:
            slots, pages, left = slots + ended.count, pages + ended.pages, left - ended.count
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


class _Plan:
    """The steps that a scheduler chooses, counted."""

    def __init__(self, engine: Simulator) -> None:
        self.costs, self.shapes = engine.costs, engine.config.chunks
        self.prompts: list[_Prompt] = []  # in the order they came
        self.decoding = _Group()
        self.leaving: dict[int, _Group] = {}  # by step: those that decode no more
        self.ends: dict[int, _Group] = {}  # by step: those whose last token it samples
        self.number = 0

    def next_step(self) -> tuple[float, int, list[float]] | None:
        """Its seconds, the tokens that it samples, and when those asked whose first they are."""
        decoding = self.decoding
        if (leave := self.leaving.pop(self.number + 1, None)) is not None:
            decoding.add(leave, -1)
        if not (decoding.count or self.prompts):
            return None
        self.number += 1
        decoding.tokens += decoding.count
        if not self.prompts:
            took = self.costs.counted(decoding.count, decoding.tokens, decoding.count)
            return took, decoding.count, []
        # one token that is left of a prompt is computed as a decode token
        chunks = [one for one in self.prompts if one.left > 1]
        samples = [one for one in self.prompts if one.left == 1]
        decoded = decoding.count + len(samples)
        tokens = decoding.tokens + sum(one.request[1] for one in samples)
        shape, pairs = (0, 0), 0.0
        if chunks:
            shape = max(self.shapes, key=lambda shape: (_tokens(chunks, shape), -math.prod(shape)))
        for one in chunks[: shape[0]]:
            count = min(one.left, shape[1])
            pairs += count * (one.start + (count + 1) / 2)
            one.start += count
            if not one.left:
                samples.append(one)
        sampled = decoding.count + len(samples)
        took = self.costs.counted(decoded, tokens, sampled, shape, pairs)
        for one in samples:
            self._begin(one)
        return took, sampled, [one.request[0] for one in samples]

    def _begin(self, one: _Prompt) -> None:
        """Its first token is sampled by this step, and each further one by the next."""
        _, prompt, output = one.request
        self.prompts.remove(one)
        self.decoding.add(_Group(1, prompt))
        leave = self.leaving.setdefault(self.number + output, _Group())
        leave.add(_Group(1, prompt + output - 1))
        self.ends.setdefault(self.number + output - 1, _Group()).add(_Group(1, 0, one.pages))


def _tokens(prompts: list[_Prompt], shape: tuple[int, int]) -> int:
    """Of prompts, those that a shape takes."""
    return sum(min(one.left, shape[1]) for one in prompts[: shape[0]])
