"""From a step of the scheduler to the arrays that devices need: tokens, positions, page tables."""

from typing import Any

import numpy as np

from meshwright.serving.executor import Sizes, StepPlan
from meshwright.serving.pages import PagePool
from meshwright.serving.program_inputs import PromptInputs, PromptShape, Shape, StepInputs
from meshwright.serving.sampler import Slots
from meshwright.serving.scheduler import Sequence, Step
from meshwright.serving.settings import EngineConfig

Sampled = list[tuple[int, Sequence]]  # index of its logits, sequence


class StepPlanner:
    """Writes the host's part of each step; remembers what the slots hold."""

    def __init__(
        self, config: EngineConfig, sizes: Sizes, pool: PagePool, encodes_prompts: bool
    ) -> None:
        self._config, self._sizes, self._pool = config, sizes, pool
        self._encodes_prompts = encodes_prompts
        self._slots = Slots(config.max_batch)
        # the pages of the sequence in each slot, and those of its encoder's keys
        self._tables, self._encoder_tables = (
            np.zeros((config.max_batch, width), np.int32) for width in sizes.widths[:2]
        )
        self._filled: list[Any] = [None] * config.max_batch  # what each table was made of

    def plan(self, step: Step) -> tuple[StepPlan, Sampled]:
        """What the executor needs for a step, and the sequences that get a new token."""
        shape = self._shape(step)
        sampled: Sampled = []
        inputs, flat = StepInputs.empty(shape, self._sizes.widths)
        prompts = self._prompt_inputs(step) if step.prompts else None
        if step.decode:
            part = slice(len(step.decode))
            inputs.slots[part] = [sequence.slot for sequence in step.decode]
            inputs.positions[part] = [sequence.computed - 1 for sequence in step.decode]
            inputs.tokens[part] = [_next_token(sequence) for sequence in step.decode]
            if self._sizes.widths.adapter:
                inputs.adapters[part] = [sequence.adapter_slot for sequence in step.decode]
            for sequence in step.decode:
                self._fill_table(sequence)
            inputs.tables[part] = self._tables[inputs.slots[part]]
            if self._encodes_prompts:
                inputs.encoder_tables[part] = self._encoder_tables[inputs.slots[part]]
                inputs.encoder_lengths[part] = [len(each.encoder_tokens) for each in step.decode]
            sampled += enumerate(step.decode)
        for index, chunk in enumerate(step.chunks):
            sequence, start, end = chunk.sequence, chunk.start, chunk.start + chunk.count
            inputs.chunk_tokens[index, : chunk.count] = sequence.tokens[start:end]
            self._fill_table(sequence)
            inputs.chunk_tables[index] = self._tables[sequence.slot]
            inputs.starts[index], inputs.counts[index] = start, chunk.count
            if self._sizes.widths.adapter:
                inputs.chunk_adapters[index] = sequence.adapter_slot
            if self._encodes_prompts:
                inputs.chunk_encoder_tables[index] = self._encoder_tables[sequence.slot]
                inputs.chunk_encoder_lengths[index] = len(sequence.encoder_tokens)
            if shape.scored:
                following = sequence.tokens[start + 1 : end + 1]
                inputs.chunk_targets[index, : len(following)] = following
            if chunk.samples:
                sampled.append((shape.decode + index, sequence))
            known = sequence.tokens[: sequence.computed]
            self._pool.remember(sequence.pages, known, sequence.cache_salt)
        size = shape.decode + (self._sizes.chunk_places if shape.chunks else 0)
        constraints = [
            (index, constraint)
            for index, sequence in sampled
            if (constraint := sequence.owner.constraint) is not None
            and constraint.holds_at(sequence.generated - 1)  # which counts the new token
        ]
        choice = self._slots.choice(size, sampled, bool(constraints)) if sampled else None
        # the tokens of nobody go to the slot after the last
        slots = self._config.max_batch if choice is None else choice.where[0, : shape.places]
        inputs.next_slots[:] = slots
        tokens = (shape, flat) if step.decode or step.chunks else None
        return StepPlan(prompts, tokens, choice, constraints), sampled

    def _prompt_inputs(self, step: Step) -> tuple[PromptShape, Any]:
        """The shape and the array of the program that takes whole prompts before a step."""
        shape = PromptShape(*step.prompt_shape)
        inputs, flat = PromptInputs.empty(shape, self._sizes.widths)
        for index, chunk in enumerate(step.prompts):
            sequence = chunk.sequence
            self._fill_table(sequence)
            tokens = sequence.encoder_tokens or sequence.tokens
            tables = self._encoder_tables if self._encodes_prompts else self._tables
            inputs.tokens[index, : chunk.count] = tokens[: chunk.count]
            inputs.tables[index] = tables[sequence.slot]
            inputs.lengths[index] = chunk.count
            if self._sizes.widths.adapter:
                inputs.adapters[index] = sequence.adapter_slot
            known = sequence.tokens[: chunk.count]
            self._pool.remember(sequence.pages, known, sequence.cache_salt)
        return shape, flat

    def _shape(self, step: Step) -> Shape:
        if step.chunks:
            first = all(chunk.start == 0 for chunk in step.chunks)
            return Shape(self._config.max_batch, *step.shape, first, step.scored)
        return Shape(min(size for size in self._sizes.batches if size >= len(step.decode)))

    def _fill_table(self, sequence: Sequence) -> None:
        """Note the pages of a sequence in the table of its slot."""
        pages, slot = sequence.pages, sequence.slot
        assert slot is not None
        if self._filled[slot] == (sequence, len(pages), sequence.preemptions):
            return
        self._tables[slot, : len(pages)] = pages
        self._tables[slot, len(pages) :] = 0
        self._encoder_tables[slot, : len(sequence.encoder_pages)] = sequence.encoder_pages
        self._filled[slot] = (sequence, len(pages), sequence.preemptions)


def _next_token(sequence: Sequence) -> int:
    """The token that a decode step takes; -1 if only the device knows it."""
    position = sequence.computed - 1
    return sequence.tokens[position] if position < len(sequence.tokens) else -1
