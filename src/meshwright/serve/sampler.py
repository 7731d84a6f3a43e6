"""The sampling programs of an engine, and their state on the device."""

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from meshwright.serve import device_sampling
from meshwright.serve.device_sampling import (
    TOP,
    VARIANTS,
    Settings,
    allowed_only,
    top_logprobs,
)
from meshwright.serve.grammars import Constraint
from meshwright.serve.load import Source
from meshwright.serve.programs import Programs
from meshwright.serve.scheduler import Sequence as Running

if TYPE_CHECKING:
    from meshwright.serve.engine import Job


_WITH_COUNTS = ("full", "logprobs")


class Choice(NamedTuple):
    """The host's part of a choice of tokens."""

    where: Any  # [2, size]: slots and positions
    variant: int  # of VARIANTS
    settings: Settings  # on the device
    counts: Any = ()  # (slot, counts of its tokens) of sequences with penalties that are new
    constraints: Sequence[tuple[int, Constraint]] = ()  # by the index of the logits


class Sampler:
    def __init__(self, programs: Programs, source: Source) -> None:
        self._programs = programs
        self._grammars = source.grammars
        self._size = programs.model_config.vocab
        self._vocab = min(source.tokenizer.vocab, self._size)
        slots = programs.config.max_batch + 1  # the last is for logits that nobody wants
        self._settings = Settings.empty(slots, self._size)
        self._on_device = self._upload()
        self._holders: list[Running | None] = [None] * slots  # whose settings a slot has
        in_prompt = programs.put(np.zeros((slots, self._size), np.int32))
        self._counts = in_prompt, programs.put(np.zeros((slots, self._size), np.int32))

    def prepare(self) -> None:
        """Compile every program, by running it for the slot that nobody has."""
        config = self._programs.config
        for size in (*config.batches, config.max_batch + self._programs.chunk_places):
            logits = self._programs.put(np.zeros((size, self._size), np.float32))
            where = np.zeros((2, size), np.int32)
            where[0] = config.max_batch
            self._constrained(logits, ())
            for variant in range(len(VARIANTS)):
                self.choose(logits, Choice(where, variant, self._on_device))
        self._set_counts(config.max_batch, [np.zeros(self._size, np.int32)] * 2)

    def arrange(self, size: int, sampled: list[tuple[int, Running]]) -> "Choice":
        """What `choose` needs to know of `size` logits; another thread may call that later."""
        where = np.zeros((2, size), np.int32)
        where[0] = self._programs.config.max_batch
        indices = [index for index, _ in sampled]
        sequences = [sequence for _, sequence in sampled]
        where[0, indices] = np.asarray([sequence.slot for sequence in sequences], np.int32)
        where[1, indices] = [sequence.computed for sequence in sequences]
        variant = max(sequence.owner.variant for sequence in sequences)
        new = [one for one in sequences if self._holders[one.slot or 0] is not one]
        counts = [count for one in new for count in self._hold(one, one.owner)]
        if self._changed and variant > 0:  # greedy needs no settings
            self._on_device = self._upload()
        constraints = [
            (index, sequence.owner.constraint)
            for index, sequence in sampled
            if sequence.owner.constraint is not None
        ]
        return Choice(where, variant, self._on_device, counts, constraints)

    def choose(self, logits: jax.Array, choice: "Choice") -> tuple[jax.Array, Any]:
        """Dispatch the choice of tokens, and of log-probabilities if the variant has them."""
        for slot, new in choice.counts:
            self._set_counts(slot, new)
        programs, name = self._programs, VARIANTS[choice.variant]
        choose = functools.partial(_choose, name, self._vocab)
        counts = self._counts if name in _WITH_COUNTS else None
        allowed = self._constrained(logits, choice.constraints) if choice.constraints else logits
        programs.last_tokens, tokens, logprobs, counts = programs.run(
            ("sample", name, logits.shape[0]), choose, 4,
            (logits, allowed), programs.last_tokens, choice.settings, programs.put(choice.where),
            counts,
        )  # fmt: skip
        self._counts = counts or self._counts
        for index, constraint in choice.constraints:
            constraint.unread = tokens, index
        return tokens, logprobs

    def _constrained(
        self, logits: jax.Array, constraints: Sequence[tuple[int, Constraint]]
    ) -> jax.Array:
        """Logits of tokens that the constraints allow.

        It waits for the tokens of the step before, while the device computes these logits.
        """
        size = logits.shape[0]
        masks = self._programs.put(self._grammars.masks(size, constraints))
        allowed: jax.Array = self._programs.run(("mask", size), allowed_only, None, logits, masks)
        return allowed

    def _hold(self, sequence: Running, job: "Job") -> Iterator[tuple[int, list[Any]]]:
        """Note the settings of a sequence that has a new slot; yields its counts of tokens."""
        slot = sequence.slot
        assert slot is not None
        self._holders[slot] = sequence
        self._settings.set(slot, job.request, self._size)
        self._changed = True
        if job.request.sampling.has_penalties:
            split = sequence.prompt_length
            parts = sequence.tokens[:split], sequence.tokens[split:]
            new = [np.bincount(part, minlength=self._size).astype(np.int32) for part in parts]
            yield slot, new

    def _set_counts(self, slot: int, new: list[Any]) -> None:
        put = self._programs.put
        arguments = self._counts, put(np.int32(slot)), tuple(map(put, new))
        self._counts = self._programs.run("counts", _set_counts, 0, *arguments)

    def _upload(self) -> Settings:
        self._changed = False
        # copies: on CPUs jax may use the host's memory
        settings: Settings = jax.tree.map(
            lambda array: self._programs.put(array.copy()), self._settings
        )
        return settings


def _choose(
    variant: str,
    vocab: int,
    logits: tuple[jax.Array, jax.Array],
    last_tokens: jax.Array,
    settings: Settings,
    where: jax.Array,
    counts: tuple[jax.Array, jax.Array] | None,
) -> Any:
    """`logits` are those of the model, and of the tokens that grammars allow."""
    slots, positions = where
    logprobs: Any = ()
    by_model, allowed = logits
    if variant == "greedy":
        tokens = device_sampling.greedy(allowed, vocab)
    elif counts is None:
        tokens = device_sampling.plain(allowed, settings, slots, positions, vocab)
    else:
        tokens = device_sampling.full(allowed, settings, slots, positions, counts, vocab)
        counts = counts[0], counts[1].at[slots, tokens].add(1)
        if variant == "logprobs":
            logprobs = top_logprobs(by_model, tokens, TOP)
    return last_tokens.at[slots].set(tokens), tokens, logprobs, counts


def _set_counts(
    counts: tuple[jax.Array, jax.Array], slot: jax.Array, new: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    in_prompt, in_output = (x.at[slot].set(y) for x, y in zip(counts, new, strict=True))
    return in_prompt, in_output
