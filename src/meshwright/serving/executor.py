"""Runs the steps of an engine on the devices of this process, by plans that hold no device array.

A plan has all that the host says of a step, so that other processes can run the same step
(lockstep.py); but for the masks of grammars, which follow from the tokens of the step before.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from meshwright.serving.grammars import Constraint, Grammars, Masks
from meshwright.serving.program_inputs import Ints, PromptShape, Shape, Widths
from meshwright.serving.programs import Programs
from meshwright.serving.sampler import Sampler, SamplingBatch
from meshwright.serving.settings import EngineConfig
from meshwright.serving.source import Adapter, Model


class StepPlan(NamedTuple):
    """The host's part of a step."""

    prompts: tuple[PromptShape, Ints] | None  # for a program before the step; see PromptInputs
    tokens: tuple[Shape, Ints] | None  # see StepInputs
    choice: SamplingBatch | None  # None: no token is chosen
    constraints: Sequence[tuple[int, Constraint]] = ()  # by the index of the logits


class Results(NamedTuple):
    """Arrays of a step, on the host."""

    tokens: Any
    logprobs: Any
    scores: Any


Read = Callable[[], Results]
"""Waits for a step that was dispatched."""


class Sizes(NamedTuple):
    """What the host must know of the programs."""

    widths: Widths
    prompt_shapes: Sequence[PromptShape]
    pages: int
    chunk_places: int
    kernel: str
    batches: Sequence[int]  # of decode programs that are used


def masks_of(plan: StepPlan, grammars: Grammars) -> Masks | None:
    """What grammars allow after the tokens of the step before, which are waited for."""
    if plan.choice is None or not plan.choice.masked:
        return None
    return grammars.masks(plan.choice.where.shape[1], plan.constraints)


def note_unread(plan: StepPlan, tokens: Any) -> None:
    """Note where grammars find the tokens of a step that was dispatched."""
    for index, constraint in plan.constraints:
        constraint.unread = tokens, index


class AnyExecutor(Protocol):
    """What an engine needs to run its steps."""

    @property
    def sizes(self) -> Sizes: ...

    @property
    def compilations(self) -> int:
        """Programs that were compiled while serving."""

    def compile(self, progress: Callable[[str], None]) -> None:
        """Compile every program, if that is wanted before the first request."""

    def prepare(self, plan: StepPlan) -> Callable[[], Read]:
        """What dispatches the step, perhaps in another thread; in the order of the plans."""

    def update_weights(self, params: Any, adapter_scale: float | None) -> None:
        """Take the parameters of a trainer, in the order of the plans."""

    def read_adapter(self, adapter: Adapter) -> Callable[[int], None]:
        """Read an adapter in any thread; what it returns writes it into a slot, as a step."""

    def cause(self, error: Exception) -> str | None:
        """The reason of a step's error, where another process is the reason."""


class Executor:
    """The programs of an engine, with weights, pages and sampling settings on the devices."""

    def __init__(self, model: Model, config: EngineConfig, max_length: int, release: bool) -> None:
        self.programs = Programs(model, config, max_length, release)
        self._grammars = model.source.grammars
        self._sampler = Sampler(self.programs, model.source.tokenizer.vocab)
        programs = self.programs
        self.sizes = Sizes(
            programs.widths, programs.prompt_shapes, programs.pages, programs.chunk_places,
            programs.kernel, programs.batches,
        )  # fmt: skip

    @property
    def compilations(self) -> int:
        return self.programs.compilations

    def compile(self, progress: Callable[[str], None]) -> None:
        shapes = self.programs.shapes() if self.programs.config.compile_first else []
        for number, shape in enumerate(shapes, 1):
            progress(f"compiling {number} of {len(shapes)}: {shape}")
            self.programs.prepare(shape)
        if shapes:
            progress("compiling sampling")
            self._sampler.prepare()
            self.sizes = self.sizes._replace(batches=self.programs.fastest_batches())
        self.programs.is_ready = True

    def prepare(self, plan: StepPlan) -> Callable[[], Read]:
        placed = None if plan.choice is None else self._sampler.place(plan.choice)

        def dispatch() -> Read:
            if plan.prompts is not None:
                self.programs.fill(*plan.prompts)
            tokens = logprobs = scores = None
            if plan.tokens is not None:
                logits, tokens, scores = self.programs.step(*plan.tokens)
            if placed is not None and not placed.is_greedy:
                tokens, logprobs = self._sampler.choose(logits, placed, self.masks(plan))
            results = Results(tokens, logprobs, scores)
            for array in jax.tree.leaves(results):
                array.copy_to_host_async()

            def read() -> Results:
                host: Results = jax.tree.map(np.asarray, results)
                return host

            note_unread(plan, tokens)
            return read

        return dispatch

    def update_weights(self, params: Any, adapter_scale: float | None) -> None:
        self.programs.update_weights(params, adapter_scale)

    def read_adapter(self, adapter: Adapter) -> Callable[[int], None]:
        factors = self.programs.read_adapter(adapter)
        return lambda slot: self.programs.load_adapter(slot, factors, adapter.lora.scale)

    def masks(self, plan: StepPlan) -> Masks | None:
        """Of the grammars in a step that was dispatched; the host waits while it runs."""
        return masks_of(plan, self._grammars)

    def cause(self, error: Exception) -> str | None:
        return None
