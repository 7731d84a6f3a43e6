"""Which requests run in the next step: continuous batching with chunked prefill.

A step has decode tokens, one for each sequence that has one token left to compute, and chunks of
the prompts that have more. Sequences start in the order they came, when there is a place in the
batch and pages for their prompt. If the pages run out, the sequence that came last is preempted: it
gives its pages back and is computed again later. Before a step, a program may take whole prompts
(prompts.py): those of an encoder, whose keys are in pages of their own, or long ones. No device is
needed here; nothing here knows what a token costs.
"""

import dataclasses
from collections import deque
from collections.abc import Collection
from typing import Any

from meshwright.serving.pages import PagePool
from meshwright.serving.settings import EngineConfig

IN_FLIGHT = 2  # steps that are dispatched, or wait for that, while an older one is read


@dataclasses.dataclass(eq=False)
class Sequence:
    """A request in progress."""

    id: str
    tokens: list[int]  # the prompt, and what was generated and is known
    prompt_length: int
    max_new: int
    scored: bool = False  # the log-probabilities of its prompt are wanted
    owner: Any = None
    encoder_tokens: tuple[int, ...] = ()  # what an encoder reads
    cache_salt: str = ""
    adapter_slot: int = 0  # 0: no adapter
    encoder_pages: list[int] = dataclasses.field(default_factory=list)
    encoded: bool = False  # its keys are in the encoder's pages, or will be after what is in flight
    waits: bool = False  # for a program that takes its whole prompt
    computed: int = 0  # tokens whose keys are in the pages, or will be after the steps in flight
    in_flight: int = 0  # sampled tokens that are not known yet
    pages: list[int] = dataclasses.field(default_factory=list)
    slot: int | None = None
    cached: int = 0  # tokens of the prompt that were in the pages at first
    preemptions: int = 0
    ended: bool = False

    @property
    def length(self) -> int:
        return len(self.tokens) + self.in_flight

    @property
    def left(self) -> int:
        """Tokens to compute before the next one is sampled."""
        return self.length - self.computed

    @property
    def generated(self) -> int:
        return self.length - self.prompt_length

    @property
    def in_scoring(self) -> bool:
        return self.scored and self.computed < self.prompt_length

    @property
    def wants_more(self) -> bool:
        return not self.ended and (self.generated < self.max_new or self.in_scoring)

    @property
    def decodes(self) -> bool:
        """Whether it is part of the decode tokens of a step."""
        length = len(self.tokens) + self.in_flight  # the properties, written out: called often
        if length - self.computed != 1 or length - self.prompt_length >= self.max_new:
            return False
        return not self.ended and not self.waits and not self.in_scoring


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Tokens `start` to `start + count` of a sequence."""

    sequence: Sequence
    start: int
    count: int
    samples: bool  # the next token is sampled after it


@dataclasses.dataclass(frozen=True)
class Step:
    decode: tuple[Sequence, ...]
    chunks: tuple[Chunk, ...]
    shape: tuple[int, int] = (0, 0)  # of the chunks, with padding
    scored: bool = False  # log-probabilities of the chunks' tokens are wanted
    prompts: tuple[Chunk, ...] = ()  # for a program that takes whole prompts, before the step
    prompt_shape: tuple[int, int] = (0, 0)


class Scheduler:
    def __init__(
        self,
        config: EngineConfig,
        pool: PagePool,
        prompt_shapes: Collection[tuple[int, int]] = (),  # of programs for whole prompts
    ) -> None:
        self.config = config
        self.pool = pool
        self.prompt_shapes = sorted(prompt_shapes, key=lambda shape: shape[1])
        self._longest_chunk = config.longest_chunk
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order they came
        self.preemptions = 0
        self._slots = list(range(config.max_batch - 1, -1, -1))

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that ended or was cancelled; steps in flight may still write."""
        sequence.ended = True
        if sequence in self.running:
            self._stop(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def next_step(self) -> Step | None:
        """The next step, with pages for all of its tokens; None if there is nothing to do.

        Its tokens are then counted as computed, and what it samples as in flight.
        """
        self._admit()
        prompts, prompt_shape = self._whole_prompts() if self.prompt_shapes else ([], (0, 0))
        decode = []
        for sequence in list(self.running):  # oldest first; later ones may be preempted here
            if sequence.slot is None or not sequence.decodes:
                continue
            if self._room(sequence, sequence.computed + 1):
                decode.append(sequence)
        step = self._with_chunks(decode)
        for sequence in step.decode:
            sequence.computed += 1
            sequence.in_flight += 1
        for chunk in step.chunks:
            chunk.sequence.computed += chunk.count
            chunk.sequence.in_flight += chunk.samples
        if prompts:
            # what was preempted to make room is not computed
            kept = tuple(chunk for chunk in prompts if chunk.sequence.slot is not None)
            step = dataclasses.replace(step, prompts=kept, prompt_shape=prompt_shape)
        return step if step.decode or step.chunks or step.prompts else None

    def _whole_prompts(self) -> tuple[list[Chunk], tuple[int, int]]:
        """The oldest sequence that needs a program for its whole prompt, and others that fit.

        Their tokens are then counted as computed; those that are left wait.
        """
        sizes = {sequence: self._whole_size(sequence) for sequence in self.running}
        for sequence, size in sizes.items():
            sequence.waits = size > 0
        waiting = [sequence for sequence in self.running if sequence.waits]
        if not waiting:
            return [], (0, 0)

        def members(shape: tuple[int, int]) -> list[Sequence]:
            return [each for each in waiting if sizes[each] <= shape[1]][: shape[0]]

        able = [shape for shape in self.prompt_shapes if sizes[waiting[0]] <= shape[1]]
        shape = max(able, key=lambda shape: (len(members(shape)), -shape[0] * shape[1]))
        taken = []
        for sequence in members(shape):
            size = sizes[sequence]
            if sequence.encoder_tokens:
                sequence.encoded = True
            elif sequence.slot is not None and self._room(sequence, size):
                sequence.computed = size
            else:
                continue
            sequence.waits = False
            taken.append(Chunk(sequence, 0, size, False))
        return taken, shape

    def _whole_size(self, sequence: Sequence) -> int:
        """Tokens of a sequence for a program that takes whole prompts; 0 if it needs none."""
        if sequence.encoder_tokens:
            return 0 if sequence.encoded else len(sequence.encoder_tokens)
        if sequence.computed or sequence.in_scoring or sequence.left - 1 <= self._longest_chunk:
            return 0
        return min(sequence.left - 1, self.prompt_shapes[-1][1])

    def _with_chunks(self, decode: list[Sequence]) -> Step:
        prompts = [
            s for s in self.running
            if s.wants_more and s.left > 0 and not s.decodes and not s.waits
        ]  # fmt: skip
        if prompts and prompts[0].in_scoring:
            shapes, prompts = [scoring_shape(self.config)], prompts[:1]
        else:
            prompts = [s for s in prompts if not s.in_scoring]
            shapes = list(self.config.chunks)

        def tokens(shape: tuple[int, int]) -> int:
            return sum(min(sequence.left, shape[1]) for sequence in prompts[: shape[0]])

        shape = max(shapes, key=lambda shape: (tokens(shape), -shape[0] * shape[1]))
        chunks = []
        for sequence in prompts[: shape[0]]:
            count = min(sequence.left, shape[1])
            if sequence.slot is not None and self._room(sequence, sequence.computed + count):
                samples = count == sequence.left and sequence.generated < sequence.max_new
                chunks.append(Chunk(sequence, sequence.computed, count, samples))
        # what was preempted to make room is not computed
        kept = tuple(chunk for chunk in chunks if chunk.sequence.slot is not None)
        still = tuple(sequence for sequence in decode if sequence.slot is not None)
        scored = any(chunk.sequence.in_scoring for chunk in kept)
        return Step(still, kept, shape if kept else (0, 0), scored)

    def _admit(self) -> None:
        while self.waiting and self._slots and not self.waiting[0].in_flight:
            sequence = self.waiting[0]
            size = self.pool.page_size
            # running sequences get what their prompts need, and a page each before long
            promised = sum(1 + self._missing(each) for each in self.running)
            pages = [] if sequence.scored else self.pool.match(sequence.tokens, sequence.cache_salt)
            encoder_pages = -(-len(sequence.encoder_tokens) // size)
            missing = self._missing(sequence) - len(pages) + encoder_pages
            if missing + promised > self.pool.available:
                self.pool.release(pages)
                return
            self.waiting.popleft()
            sequence.pages, sequence.computed = pages, len(pages) * size
            taken = (self.pool.take() for _ in range(encoder_pages))
            sequence.encoder_pages = [page for page in taken if page is not None]
            if not sequence.preemptions:
                sequence.cached = sequence.computed
            sequence.slot = self._slots.pop()
            self.running.append(sequence)

    def _missing(self, sequence: Sequence) -> int:
        """Pages that a sequence needs for its tokens so far and the next one."""
        length = sequence.length + (sequence.generated < sequence.max_new)
        return max(-(-length // self.pool.page_size) - len(sequence.pages), 0)

    def _room(self, sequence: Sequence, length: int) -> bool:
        """Give a sequence pages for `length` tokens, if need be by preempting later ones."""
        while len(sequence.pages) * self.pool.page_size < length:  # most often not
            page = self.pool.take()
            if page is not None:
                sequence.pages.append(page)
                continue
            last = self.running[-1]
            self._preempt(last)
            if last is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._stop(sequence)
        sequence.computed = 0
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)

    def _stop(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence.pages)
        self.pool.release(sequence.encoder_pages)
        sequence.pages, sequence.encoder_pages, sequence.encoded = [], [], False
        if sequence.slot is not None:
            self._slots.append(sequence.slot)
        sequence.slot = None


def scoring_shape(config: EngineConfig) -> tuple[int, int]:
    """Of a step that computes the log-probabilities of a prompt."""
    return (1, min(config.chunk, 256))
