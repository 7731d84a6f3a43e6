"""Training objectives of encoder-decoder models: span corruption, prefix LM, examples.

>>> spans = SpanCorruption(seq=512, vocab=32100, end=1)
>>> spans.raw_length, spans.lengths["encoder_tokens"], spans.lengths["targets"]
(568, 512, 114)
"""

import abc
import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from meshwright.data.sequences import NO_TARGET, Batch
from meshwright.data.tokenizers import Tokenizer
from meshwright.errors import MeshwrightError

Ids = npt.NDArray[np.int32]


class Pair(NamedTuple):
    """What the encoder reads, what the decoder reads one token late, and what it predicts."""

    inputs: Ids
    tokens: Ids
    targets: Ids


@dataclasses.dataclass(frozen=True)
class EncoderDecoderObjective(abc.ABC):
    """What objectives share: fields of an encoder and of a decoder."""

    seq: int
    """Tokens of the encoder's sequence."""
    vocab: int
    """One above the largest token id."""
    end: int
    """The token that ends inputs and targets."""
    start: int = 0
    """The token that the decoder begins with."""
    seed: int = 0
    name: ClassVar[str]
    of_examples: ClassVar[bool] = False  # it reads whole examples with a loss mask, not texts

    @property
    @abc.abstractmethod
    def raw_length(self) -> int:
        """Tokens of text that an example is made of."""

    @property
    @abc.abstractmethod
    def target_length(self) -> int:
        """Tokens of the decoder's sequence."""

    @property
    def lengths(self) -> Mapping[str, int]:
        of_decoder = dict.fromkeys(("tokens", "targets"), self.target_length)
        return dict.fromkeys(("encoder_tokens", "encoder_segments"), self.seq) | of_decoder

    @abc.abstractmethod
    def pair(self, sequence: Batch, random: np.random.Generator) -> Pair:
        """The fields of one example, from a sequence of `raw_length` tokens."""

    def check_sentinels(self, tokenizer: Tokenizer) -> None:  # noqa: B027 (most take none)
        """Raise if there are not enough ids for sentinels that no text has."""

    def fields(self, sequences: Batch, samples: npt.NDArray[Any]) -> Batch:
        """Encoder inputs, and decoder inputs with the targets that follow them.

        An example depends on its sequence, its number and the seed alone.
        """
        tokens = sequences["tokens"]
        batch = {
            name: np.full((len(tokens), length), NO_TARGET if name == "targets" else 0, np.int32)
            for name, length in self.lengths.items()
        }
        for i, sample in enumerate(samples):
            random = np.random.default_rng([self.seed, int(sample)])
            sequence = {name: array[i] for name, array in sequences.items()}
            inputs, read, targets = self.pair(sequence, random)
            batch["encoder_tokens"][i, : len(inputs)] = inputs
            batch["encoder_segments"][i, : len(inputs)] = 1
            batch["tokens"][i, : len(read)] = [self.start, *read[:-1]]
            batch["targets"][i, : len(targets)] = targets
        return batch

    def describe(self) -> dict[str, Any]:
        return {"name": self.name} | dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class SpanCorruption(EncoderDecoderObjective):
    """T5's objective: spans of the text are replaced by sentinels; the targets are the spans.

    Sentinels count down from the top of the vocabulary. Lengths are those of T5X: as much text as
    fills `seq` inputs, the end token included.
    """

    noise_density: float = 0.15
    mean_span: float = 3.0
    name: ClassVar[str] = "span-corruption"

    def __post_init__(self) -> None:
        if not 0 < self.noise_density < 1 or self.mean_span < 1:
            raise MeshwrightError(
                f"span corruption needs 0 < noise_density < 1 and mean_span of at least 1, got "
                f"{self.noise_density} and {self.mean_span}"
            )
        if self.seq < 4:
            raise MeshwrightError(f"seq={self.seq} is too short for spans; give at least 4")

    def _sizes(self, raw: int) -> tuple[int, int]:
        """Of a text of `raw` tokens: tokens in spans, and spans."""
        noise = min(max(round(raw * self.noise_density), 1), raw - 1)
        return noise, min(max(round(noise / self.mean_span), 1), noise, raw - noise)

    def _inputs(self, raw: int) -> int:
        noise, spans = self._sizes(raw)
        return raw - noise + spans + 1

    @functools.cached_property
    def _raw(self) -> int:
        raw = 2
        while self._inputs(raw + 1) <= self.seq:
            raw += 1
        return raw

    @property
    def raw_length(self) -> int:
        return self._raw

    @property
    def spans(self) -> int:
        """Spans of an example, and sentinels that it takes."""
        return self._sizes(self._raw)[1]

    @property
    def target_length(self) -> int:
        return sum(self._sizes(self._raw)) + 1

    def check_sentinels(self, tokenizer: Tokenizer) -> None:
        own = _sentinels(tokenizer)
        if own != list(range(self.vocab - 1, self.vocab - 1 - len(own), -1)):
            raise MeshwrightError(
                f"the sentinels of the data's tokenizer, <extra_id_0> to <extra_id_{len(own) - 1}>,"
                f" must have ids that count down by one; they are {own[0]}, {own[1]} …"
            )
        free = len(own) or self.vocab - tokenizer.vocab
        if free < self.spans:
            raise MeshwrightError(
                f"span corruption of seq={self.seq} takes {self.spans} sentinels, ids that no text "
                f"has; there are {max(free, 0)}, with {self.vocab} tokens of the model and "
                f"{tokenizer.vocab} of the data's tokenizer: use a shorter seq, or a tokenizer "
                "with sentinels (<extra_id_0> …)"
            )

    def pair(self, sequence: Batch, random: np.random.Generator) -> Pair:
        tokens = sequence["tokens"].astype(np.int32)
        noise, spans = self._sizes(len(tokens))
        kept = _parts(len(tokens) - noise, spans, random)
        cut = _parts(noise, spans, random)
        ends = np.cumsum(np.stack([kept, cut], axis=1).ravel())  # kept, cut, kept, cut …
        pieces = np.split(tokens, ends[:-1])
        sentinels = [np.array([self.vocab - 1 - i], np.int32) for i in range(spans)]
        end = [np.array([self.end], np.int32)]
        inputs = [part for pair in zip(pieces[0::2], sentinels, strict=True) for part in pair]
        targets = [part for pair in zip(sentinels, pieces[1::2], strict=True) for part in pair]
        predicted = np.concatenate(targets + end)
        return Pair(np.concatenate(inputs + end), predicted, predicted)


@dataclasses.dataclass(frozen=True)
class PrefixLM(EncoderDecoderObjective):
    """The encoder reads the text up to a random place; the decoder predicts the rest."""

    name: ClassVar[str] = "prefix-lm"

    def __post_init__(self) -> None:
        if self.seq < 2:
            raise MeshwrightError(f"seq={self.seq} is too short to be cut; give at least 2")

    @property
    def raw_length(self) -> int:
        return self.seq

    @property
    def target_length(self) -> int:
        return self.seq

    def pair(self, sequence: Batch, random: np.random.Generator) -> Pair:
        tokens = sequence["tokens"].astype(np.int32)
        place = int(random.integers(1, len(tokens)))
        end = np.int32(self.end)
        predicted = np.append(tokens[place:], end)
        return Pair(np.append(tokens[:place], end), predicted, predicted)


@dataclasses.dataclass(frozen=True)
class Examples(EncoderDecoderObjective):
    """The encoder reads the prompt of an example, the decoder predicts the answer.

    What follows the first token with loss is the decoder's; masked tokens there are no targets.
    Both are cut at their end to `seq` tokens, the prompt's end token included.
    """

    name: ClassVar[str] = "examples"
    of_examples: ClassVar[bool] = True

    @property
    def raw_length(self) -> int:
        return 2 * self.seq

    @property
    def target_length(self) -> int:
        return self.seq

    def pair(self, sequence: Batch, random: np.random.Generator) -> Pair:
        length = int((sequence["segments"] > 0).sum())
        tokens, next_targets = sequence["tokens"][:length], sequence["targets"][:length]
        (with_loss,) = np.nonzero(next_targets != NO_TARGET)
        answer = int(with_loss[0]) + 1 if len(with_loss) else length
        inputs = np.append(tokens[:answer][: self.seq - 1], np.int32(self.end))
        targets = next_targets[answer - 1 : length - 1] if length else next_targets
        return Pair(inputs, tokens[answer:][: self.seq], targets[: self.seq])


OBJECTIVES: dict[str, type[EncoderDecoderObjective]] = {
    one.name: one for one in (SpanCorruption, PrefixLM, Examples)
}


def sentinel_top(tokenizer: Tokenizer, vocab: int) -> int:
    """One above the first sentinel: <extra_id_0> of the tokenizer, else the model's last token."""
    return next(iter(_sentinels(tokenizer)), vocab - 1) + 1


def _sentinels(tokenizer: Tokenizer) -> list[int]:
    """The ids of <extra_id_0>, <extra_id_1> …"""
    added = tokenizer.to_json().get("definition", {}).get("added_tokens", [])
    ids = {str(one["content"]): int(one["id"]) for one in added}
    names = itertools.takewhile(ids.__contains__, (f"<extra_id_{i}>" for i in itertools.count()))
    return [ids[name] for name in names]


def _parts(total: int, parts: int, random: np.random.Generator) -> npt.NDArray[np.int64]:
    """`total` as a sum of `parts` numbers from 1, all ways equally likely."""
    places = np.sort(random.choice(total - 1, parts - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], places, [total]])).astype(np.int64)
