"""The inference engine: continuous batching over a paged KV cache, on any mesh.

    with start_engine(model_source("runs/first"), generation_mesh("tp=2")) as engine:
        [completion] = engine.generate([Request(prompt=(5, 9, 2), max_new=20)])
        async for delta in engine.stream(Request(prompt=(5, 9, 2))):
            …

One thread schedules and reads tokens, another dispatches. Steps are dispatched before the tokens of
the last ones are read: sampled tokens stay on the device, and the host works while the device
computes. The last token of a `Completion` may be an end token, which has no text.
"""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from meshwright.data import TextStream, last_character
from meshwright.errors import MeshwrightError
from meshwright.models import encodes_prompts, serving_of
from meshwright.present import count
from meshwright.serving.adapters import AdapterTable
from meshwright.serving.device_sampling import variant_of
from meshwright.serving.executor import AnyExecutor, Executor, Read
from meshwright.serving.grammars import TokenRules
from meshwright.serving.job import Job, Sink, check_request, completion_of, logprobs_at
from meshwright.serving.pages import PagePool
from meshwright.serving.request import (
    Completion,
    Delta,
    EngineStats,
    EngineStoppedError,
    OverloadedError,
    Request,
)
from meshwright.serving.scheduler import IN_FLIGHT, Scheduler, Step
from meshwright.serving.scheduler import Sequence as Running
from meshwright.serving.settings import EngineConfig, longest
from meshwright.serving.source import Adapter, Model, adapter_source
from meshwright.serving.step_planner import Sampled, StepPlanner
from meshwright.serving.stop_texts import StopTexts

_log = logging.getLogger("meshwright")

_STUCK_SECONDS = 2.0  # then a step is taken to wait for a process that is gone

Event = tuple[Job, "asyncio.Queue[Delta]", Delta]


@dataclasses.dataclass(frozen=True)
class InFlightStep:
    """A step that was dispatched and not read."""

    step: Step
    read: Read
    sampled: Sampled


class Engine:
    """Serves a model. `release` frees the model's own weights, of which the engine has a copy.

    `executor` runs the steps; the default does so on devices of this process alone.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig | None = None,
        *,
        progress: Callable[[str], None] | None = None,
        release: bool = False,
        executor: AnyExecutor | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        self.encodes_prompts = encodes_prompts(model.config)
        if self.encodes_prompts:
            self.config = self.config.for_encoder()
        self.source = model.source
        self.max_length = longest(self.config, model.config)
        self._model_config = model.config
        self._executor = executor or Executor(model, self.config, self.max_length, release)
        sizes = self._executor.sizes
        pool = PagePool(sizes.pages, self.config.page_size, remember=self.config.prefix_cache)
        shapes = [(shape.prompts, shape.length) for shape in sizes.prompt_shapes]
        self._scheduler = Scheduler(self.config, pool, shapes)
        self._adapters = AdapterTable(model.source.adapters, self.config.max_adapters)
        self._jobs: dict[str, Job] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._names = itertools.count(1)
        self._outbox: dict[asyncio.AbstractEventLoop, list[Event]] = {}
        self._closed = False
        self._failure: str | None = None
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._ending = threading.Lock()
        self._executor.compile(progress or (lambda text: _log.info(text)))
        self._planner = StepPlanner(self.config, self._executor.sizes, pool, self.encodes_prompts)
        self._dispatcher = ThreadPoolExecutor(1, "meshwright-dispatch")
        self._thread = threading.Thread(target=self._loop, name="meshwright-engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_ready(self) -> bool:
        return not self._closed and self._failure is None

    @property
    def failure(self) -> str | None:
        """Why the engine has stopped; None while it works, and after `close`."""
        return self._failure

    @property
    def kernel(self) -> str:
        """The kernel of paged attention."""
        return self._executor.sizes.kernel

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Run requests to their end, in any order; the results are in the order of the requests."""
        deltas: SimpleQueue[tuple[int, Delta]] = SimpleQueue()
        jobs = self.submit(requests, lambda index, delta: deltas.put((index, delta)), streams=False)
        results: list[list[Delta]] = [[] for _ in requests]
        running = len(jobs)
        while running:
            index, delta = deltas.get()
            results[index].append(delta)
            running -= delta.finish_reason is not None
        tokenizer = self.source.tokenizer
        pairs = zip(jobs, results, strict=True)
        return [completion_of(job, deltas, tokenizer) for job, deltas in pairs]

    def submit(
        self,
        requests: Sequence[Request],
        sink: Callable[[int, Delta], None],
        *,
        streams: bool = True,
    ) -> list[Job]:
        """Start requests; `sink` gets (index of the request, delta) in the engine's thread.

        With `streams` each token comes as soon as it is known, else all when a request has ended.
        """
        jobs = [
            self._job(request, functools.partial(sink, index), streams=streams)
            for index, request in enumerate(requests)
        ]
        for job in jobs:
            self._send(functools.partial(self._start, job))
        return jobs

    async def stream(self, request: Request) -> AsyncIterator[Delta]:
        """Yield deltas as they come; closing the iterator cancels the request."""
        loop = asyncio.get_running_loop()
        deltas: asyncio.Queue[Delta] = asyncio.Queue()

        def sink(delta: Delta) -> None:
            self._outbox.setdefault(loop, []).append((job, deltas, delta))

        job = self._job(request, sink, streams=True)
        waiting = len(self._scheduler.waiting)
        if self.config.max_waiting is not None and waiting >= self.config.max_waiting:
            raise OverloadedError(f"{count(waiting, 'request')} wait already; try again later")
        self._send(lambda: self._start(job))
        finished = False
        try:
            while not finished:
                delta = await deltas.get()
                finished = delta.finish_reason is not None
                yield delta
        finally:
            if not finished:
                self._send_if_open(lambda: self._cancel(job))

    def cancel(self, request_id: str) -> None:
        """End a request; its last delta has the finish reason "cancelled"."""

        def cancel() -> None:
            job = self._jobs.get(request_id)
            if job is not None:
                self._cancel(job)

        self._send_if_open(cancel)

    def update_weights(self, params: Any, adapter_scale: float | None = None) -> None:
        """Take the parameters of a trainer, as its step holds them, in place of the weights.

        They are resharded and cast on the devices; an adapter is merged with its scale. No file is
        written, nothing is compiled again, and the trainer keeps its arrays. Cached prefixes are
        forgotten. Requests must have ended: their keys are those of the weights before.
        """

        def update() -> None:
            if self._jobs:
                number = len(self._jobs)
                raise MeshwrightError(
                    f"{count(number, 'request')} run{'s' if number == 1 else ''}; update the "
                    "weights when all have ended"
                )
            take = functools.partial(self._executor.update_weights, params, adapter_scale)
            self._dispatcher.submit(take).result()  # behind the steps before
            self._scheduler.pool.forget()

        self._do(update)

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The adapters that are loaded, by name."""
        return {name: loaded.adapter for name, loaded in self._adapters.loaded.items()}

    def load_adapter(self, name: str, folder: str | os.PathLike[str]) -> None:
        """Load an adapter for requests that name it: a folder of PEFT, or a run with LoRA.

        Requests run on meanwhile.
        """
        self._adapters.check_new(name)  # before it is read
        adapter = adapter_source(folder, self.source)
        write = self._executor.read_adapter(adapter)

        def load() -> None:
            slot = self._adapters.add(name, adapter).slot
            try:
                self._dispatcher.submit(write, slot).result()
            except Exception:
                self._adapters.remove(name)
                raise

        self._do(load)

    def unload_adapter(self, name: str) -> None:
        """Take no more requests for an adapter; those that run or wait are finished."""
        self._do(lambda: self._adapters.remove(name))

    def stats(self) -> EngineStats:
        pool = self._scheduler.pool
        return EngineStats(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            pages_total=pool.total,
            pages_used=pool.used,
            prompt_tokens=self._counts["prompt"],
            generated_tokens=self._counts["generated"],
            finished=dict(self._finished),
            preemptions=self._scheduler.preemptions,
            cached_prompt_tokens=self._counts["cached"],
            steps=self._counts["steps"],
            compilations_after_ready=self._executor.compilations,
        )

    def fail(self, reason: str) -> None:
        """End every request with this error, and take no more."""
        with self._wake:
            self._failure = self._failure or reason
            self._wake.notify()
        self._thread.join(_STUCK_SECONDS)
        self._end_jobs()

    def close(self) -> None:
        """Cancel what runs and stop the thread."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        failed = False
        while self._thread.is_alive() and not failed:
            failed = self._failure is not None  # a step may wait for a process that is gone
            self._thread.join(_STUCK_SECONDS if failed else 1.0)
        self._dispatcher.shutdown(wait=self._failure is None)

    # the request's side

    def _job(self, request: Request, sink: Sink, *, streams: bool) -> Job:
        check_request(request, self._model_config, self.config, self.max_length)
        if request.adapter:
            self._adapters.find(request.adapter)  # or an error
        ends = request.stop_tokens
        if not request.ignore_end:
            ends |= self.source.ends
        if not request.id:
            request = dataclasses.replace(request, id=f"request-{next(self._names)}")
        tokenizer, text = self.source.tokenizer, None
        named = request.special_tokens
        before = () if self.encodes_prompts else last_character(tokenizer, request.prompt, named)
        if streams or request.stop:
            text = TextStream(tokenizer, named, before)
        constraint, grammars = None, self.source.grammars
        if request.grammar is not None:
            ends |= grammars.ends
        rules = TokenRules(request.allowed, request.banned, ends, request.min_new)
        if request.grammar is not None or rules.excludes_any:
            constraint = grammars.start(request.grammar, rules)
        stops, variant = StopTexts(request.stop, request.include_stop), variant_of(request)
        return Job(request, sink, ends, text, stops, variant, streams, before, constraint)

    def _send(self, action: Callable[[], Any]) -> None:
        """Have the engine's thread do something before the next step; an error if it has ended.

        The lock is that of `close`: the thread does what was sent before it, and nothing after.
        """
        with self._wake:
            if self._failure is not None or self._closed:
                raise EngineStoppedError(self._failure or "the engine is closed")
            self._inbox.append(action)
            self._wake.notify()

    def _do(self, action: Callable[[], None]) -> None:
        """Have the engine's thread do something, and wait for it; its errors are raised here."""
        done: Future[None] = Future()

        def do() -> None:
            try:
                action()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self._send(do)
        done.result()

    def _send_if_open(self, action: Callable[[], Any]) -> None:
        with contextlib.suppress(MeshwrightError):
            self._send(action)

    # the engine's thread

    def _loop(self) -> None:
        in_flight: deque[Future[InFlightStep]] = deque()
        try:
            while not self._closed and self._failure is None:
                while self._inbox:
                    self._inbox.popleft()()
                self._flush()
                step = self._scheduler.next_step()
                if step is not None:
                    in_flight.append(self._dispatch(step))
                # a step is read when the one after it is dispatched, and another is prepared
                if in_flight and (step is None or len(in_flight) > IN_FLIGHT):
                    self._read(in_flight.popleft().result())
                    self._flush()  # and schedule again: what ended has left slots and pages
                elif step is None:
                    with self._wake:
                        if not (self._inbox or self._closed or self._failure):
                            self._wake.wait()
        except Exception as error:  # every client must hear of it
            cause = self._executor.cause(error)
            if self._failure is None and cause is None:
                _log.exception("the engine stopped")
            with self._wake:
                self._failure = self._failure or cause or f"the engine stopped: {error}"
        self._end_jobs()

    def _end_jobs(self) -> None:
        """Tell every client that nothing follows; also from another thread, if a step is stuck."""
        reason = Delta(finish_reason="cancelled")
        if self._failure is not None:
            reason = Delta(finish_reason="error", error=self._failure)
        with self._ending:
            while self._inbox:
                self._inbox.popleft()()
            for job in list(self._jobs.values()):
                self._finish(job, reason)
            self._flush()

    def _flush(self) -> None:
        """Hand deltas to the event loops of their clients, with one (slow) call per loop."""
        outbox, self._outbox = self._outbox, {}
        for loop, events in outbox.items():
            try:
                loop.call_soon_threadsafe(_put, events)
            except RuntimeError:  # the loop is closed, and its clients are gone
                for job, _, _ in events:
                    self._cancel(job)

    def _start(self, job: Job) -> None:
        request = job.request
        if request.id in self._jobs:
            error = f"a request with the id {request.id!r} is running"
            job.emit(Delta(finish_reason="error", error=error))
            return
        slot, cache_salt = 0, request.cache_salt and f"0:{request.cache_salt}"
        if request.adapter:
            try:
                adapter = job.adapter = self._adapters.take(request.adapter)
            except MeshwrightError as gone:  # since the request was sent
                job.emit(Delta(finish_reason="error", error=str(gone)))
                return
            slot, cache_salt = adapter.slot, f"{adapter.number}:{request.cache_salt}"
        tokens = serving_of(self._model_config).decoder_prompt(self._model_config, request.prompt)
        job.sequence = Running(
            request.id, list(tokens), len(tokens), request.max_new,
            scored=request.prompt_logprobs is not None, owner=job,
            encoder_tokens=request.prompt if self.encodes_prompts else (),
            cache_salt=cache_salt, adapter_slot=slot,
        )  # fmt: skip
        self._jobs[request.id] = job
        self._counts["prompt"] += len(request.prompt)
        self._scheduler.add(job.sequence)

    def _cancel(self, job: Job) -> None:
        if job.request.id in self._jobs:
            self._finish(job, Delta(finish_reason="cancelled"))

    def _finish(self, job: Job, delta: Delta) -> None:
        sequence = job.sequence
        assert sequence is not None
        assert delta.finish_reason is not None
        known = sequence.tokens[: min(sequence.computed, len(sequence.tokens))]
        self._scheduler.pool.remember(sequence.pages, known, sequence.cache_salt)
        self._scheduler.remove(sequence)
        del self._jobs[job.request.id]
        if job.adapter is not None:
            self._adapters.release(job.adapter)
        self._finished[delta.finish_reason] += 1
        self._counts["cached"] += sequence.cached
        job.emit(delta)

    def _dispatch(self, step: Step) -> Future[InFlightStep]:
        """Plan a step, and have the other thread dispatch it.

        That takes a millisecond or more, most of it outside of Python.
        """
        self._counts["steps"] += 1
        plan, sampled = self._planner.plan(step)
        run = self._executor.prepare(plan)
        return self._dispatcher.submit(lambda: InFlightStep(step, run(), sampled))

    def _read(self, dispatched: InFlightStep) -> None:
        """Wait for a step, and hand out its tokens."""
        results = dispatched.read()
        if dispatched.step.scored:
            self._read_scores(dispatched.step, results.scores)
        if results.tokens is None:
            return
        tokens = results.tokens.tolist()
        for index, sequence in dispatched.sampled:
            sequence.in_flight -= 1
            if sequence.ended:
                continue
            sequence.tokens.append(tokens[index])
            self._counts["generated"] += 1
            job: Job = sequence.owner
            index_of_token = len(sequence.tokens) - sequence.prompt_length - 1
            if job.constraint and (error := job.constraint.error_at(index_of_token)):
                self._finish(job, Delta(finish_reason="error", error=error))
                continue
            if job.request.logprobs is not None:
                job.new_logprobs.append(logprobs_at(results.logprobs, index, job.request.logprobs))
            delta = job.add(tokens[index])
            if delta is None:
                continue
            if delta.finish_reason is not None:
                self._finish(job, delta)
            elif not job.emit(delta):
                self._cancel(job)

    def _read_scores(self, step: Step, scores: Any) -> None:
        for index, chunk in enumerate(step.chunks):
            sequence, job = chunk.sequence, chunk.sequence.owner
            if sequence.ended:
                continue
            if chunk.start == 0:
                job.scores = [None]
            left = sequence.prompt_length - len(job.scores)
            first = index * step.shape[1]
            job.scores += [
                logprobs_at(scores, first + i, job.request.prompt_logprobs)
                for i in range(min(chunk.count, left))
            ]
            if chunk.start + chunk.count < sequence.prompt_length:
                continue
            sequence.scored = False  # should it be computed again
            if job.request.max_new == 0:
                self._finish(job, Delta(prompt_logprobs=tuple(job.scores), finish_reason="length"))


def _put(events: list[Event]) -> None:
    for _, queue, delta in events:
        queue.put_nowait(delta)
