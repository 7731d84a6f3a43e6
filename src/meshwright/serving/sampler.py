"""The choice of tokens: what the host says of it, the programs, and their state on the device.

`Slots` and `SamplingBatch` are the host's part, in process 0 alone; each process has a `Sampler`.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from meshwright.serving import device_sampling
from meshwright.serving.device_sampling import (
    TOP,
    VARIANTS,
    Settings,
    allowed_only,
    top_logprobs,
)
from meshwright.serving.grammars import Masks
from meshwright.serving.programs import Programs
from meshwright.serving.sampling import KnownTokens, Sampling
from meshwright.serving.scheduler import Sequence as Running

_WITH_COUNTS = ("full", "logprobs")


class SlotState(NamedTuple):
    """A sequence that has a new slot."""

    slot: int
    sampling: Sampling
    prompt: Sequence[int] = ()  # tokens, if there are penalties
    output: Sequence[int] = ()


class SamplingBatch(NamedTuple):
    """The host's part of a choice of tokens."""

    where: Any  # [2, size]: slots and positions
    variant: int  # of VARIANTS
    new_slots: Sequence[SlotState] = ()
    masked: bool = False  # some sequences are constrained


class PlacedSamplingBatch(NamedTuple):
    """A choice, with what it needs on the device."""

    where: Any
    variant: int
    settings: Settings  # on the device
    counts: Any = ()  # (slot, counts of its tokens) of sequences with penalties that are new
    is_greedy: bool = False  # the step itself chooses


class Slots:
    """Which sequence has each slot, so that devices are told of new ones only."""

    def __init__(self, max_batch: int) -> None:
        self._spare = max_batch  # of logits that nobody wants
        self._holders: list[Running | None] = [None] * max_batch

    def choice(
        self, size: int, sampled: Sequence[tuple[int, Running]], masked: bool
    ) -> SamplingBatch:
        """What there is to know of `size` logits, for sequences by their index."""
        where = np.zeros((2, size), np.int32)
        where[0] = self._spare
        indices = [index for index, _ in sampled]
        sequences = [sequence for _, sequence in sampled]
        where[0, indices] = np.asarray([sequence.slot for sequence in sequences], np.int32)
        where[1, indices] = [sequence.computed for sequence in sequences]
        variant = max(sequence.owner.variant for sequence in sequences)
        new = [one for one in sequences if self._holders[one.slot or 0] is not one]
        return SamplingBatch(where, variant, [self._hold(one) for one in new], masked)

    def _hold(self, sequence: Running) -> SlotState:
        slot, sampling = sequence.slot, sequence.owner.request.sampling
        assert slot is not None
        self._holders[slot] = sequence
        if not sampling.has_penalties:
            return SlotState(slot, sampling)
        split = sequence.prompt_length
        return SlotState(slot, sampling, sequence.tokens[:split], sequence.tokens[split:])


class Sampler:
    def __init__(self, programs: Programs, mask_bits: int) -> None:
        """`mask_bits`: of the masks of grammars, one for each id of the tokenizer."""
        self._programs = programs
        self._size = programs.model_config.vocab
        self._mask_words = -(-mask_bits // 32)
        slots = programs.config.max_batch + 1  # the last is for logits that nobody wants
        self._settings = Settings.empty(slots, self._size)
        self._on_device = self._upload()
        in_prompt = programs.put(np.zeros((slots, self._size), np.int32))
        self._counts = in_prompt, programs.put(np.zeros((slots, self._size), np.int32))

    def prepare(self) -> None:
        """Compile every program, by running it for the slot that nobody has."""
        config = self._programs.config
        for size in (*self._programs.batches, config.max_batch + self._programs.chunk_places):
            logits = self._programs.put(np.zeros((size, self._size), np.float32))
            where = np.zeros((2, size), np.int32)
            where[0] = config.max_batch
            self._allowed(logits, np.zeros((size, self._mask_words), np.int32))
            for variant in range(len(VARIANTS)):
                self.choose(logits, PlacedSamplingBatch(where, variant, self._on_device))
        self._set_counts(config.max_batch, [np.zeros(self._size, np.int32)] * 2)

    def place(self, choice: SamplingBatch) -> PlacedSamplingBatch:
        """Note the settings of new sequences; another thread may call `choose` later."""
        for slot in choice.new_slots:
            self._settings.set(slot.slot, slot.sampling, self._size)
            self._changed = True
        counts = [
            (slot.slot, [_counts(part, self._size) for part in (slot.prompt, slot.output)])
            for slot in choice.new_slots
            if slot.sampling.has_penalties
        ]
        if self._changed and choice.variant > 0:  # greedy needs no settings
            self._on_device = self._upload()
        is_greedy = VARIANTS[choice.variant] == "greedy" and not choice.masked
        return PlacedSamplingBatch(choice.where, choice.variant, self._on_device, counts, is_greedy)

    def choose(
        self, logits: jax.Array, choice: PlacedSamplingBatch, masks: Masks | None = None
    ) -> tuple[jax.Array, Any]:
        """Dispatch the choice of tokens, and of log-probabilities if the variant has them.

        `masks`: see Grammars.
        """
        for slot, new in choice.counts:
            self._set_counts(slot, new)
        programs, name = self._programs, VARIANTS[choice.variant]
        choose = functools.partial(_choose, name, programs.known)
        counts = self._counts if name in _WITH_COUNTS else None
        allowed = logits if masks is None else self._allowed(logits, masks)
        programs.last_tokens, tokens, logprobs, counts = programs.run(
            ("sample", name, logits.shape[0]), choose, 4,
            (logits, allowed), programs.last_tokens, choice.settings, programs.put(choice.where),
            counts,
        )  # fmt: skip
        self._counts = counts or self._counts
        return tokens, logprobs

    def _allowed(self, logits: jax.Array, masks: Masks) -> jax.Array:
        key, put = ("mask", logits.shape[0]), self._programs.put
        allowed: jax.Array = self._programs.run(key, allowed_only, None, logits, put(masks))
        return allowed

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
    known: KnownTokens,
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
        tokens = device_sampling.greedy(allowed, known)
    elif counts is None:
        tokens = device_sampling.plain(allowed, settings, slots, positions, known)
    else:
        tokens = device_sampling.full(allowed, settings, slots, positions, counts, known)
        counts = counts[0], counts[1].at[slots, tokens].add(1)
        if variant == "logprobs":
            logprobs = top_logprobs(by_model, tokens, TOP)
    return last_tokens.at[slots].set(tokens), tokens, logprobs, counts


def _counts(tokens: Sequence[int], vocab: int) -> Any:
    return np.bincount(np.asarray(tokens, np.int64), minlength=vocab).astype(np.int32)


def _set_counts(
    counts: tuple[jax.Array, jax.Array], slot: jax.Array, new: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    in_prompt, in_output = (x.at[slot].set(y) for x, y in zip(counts, new, strict=True))
    return in_prompt, in_output
