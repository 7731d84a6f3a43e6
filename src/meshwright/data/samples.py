"""Sample index → (store, sequence index): shuffled and mixed for training, in order if held out."""

import functools
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from meshwright.data.mixture import Mixture
from meshwright.data.order import in_order, shuffled
from meshwright.data.sequences import sequence_count
from meshwright.data.store import TokenStore
from meshwright.errors import MeshwrightError
from meshwright.present import count

Counts = npt.NDArray[np.int64]
PADDING = -1  # sequence index of a sample past the end


class Samples(Protocol):
    """Where each sample comes from: a pure function of the sample index."""

    def locate(self, samples: npt.ArrayLike) -> tuple[Counts, Counts]:
        """The store index and the sequence index of each sample; index -1 is padding."""


@dataclass(frozen=True)
class TrainingSamples:
    """Endless samples: each store has its own epochs, and every epoch has a new order."""

    mixture: Mixture
    seq: int
    held_out: int = 0
    seed: int | None = 0  # None: in packed order
    packed: bool = True

    def locate(self, samples: npt.ArrayLike) -> tuple[Counts, Counts]:
        source, number = self.mixture.schedule.assign(samples)
        sequence = np.zeros_like(number)
        for i, store in enumerate(self.mixture.stores):
            mine = source == i
            if not mine.any():
                continue
            sequences = training_sequences(store, self.seq, self.held_out, self.packed)
            if self.seed is None:
                sequence[mine] = in_order(number[mine], sequences)
            else:
                # a store's order does not depend on the rest of the mixture
                own = self.seed + int(store.identity[:12], 16)
                sequence[mine] = shuffled(number[mine], sequences, own)
        return source, sequence


@dataclass(frozen=True)
class HeldOutSamples:
    """The last `held_out` sequences of each store, once, store by store; then padding."""

    mixture: Mixture
    seq: int
    held_out: int
    packed: bool = True

    @property
    def count(self) -> int:
        return self.held_out * len(self.mixture.stores)

    def locate(self, samples: npt.ArrayLike) -> tuple[Counts, Counts]:
        samples = np.asarray(samples, np.int64)
        source, number = np.divmod(np.minimum(samples, self.count - 1), self.held_out)
        first = np.array(
            [
                training_sequences(store, self.seq, self.held_out, self.packed)
                for store in self.mixture.stores
            ]
        )
        return source, np.where(samples < self.count, first[source] + number, PADDING)


@dataclass(frozen=True)
class AllSamples:
    """All sequences of all stores, once, store by store; then padding."""

    mixture: Mixture
    seq: int
    packed: bool = True

    @functools.cached_property
    def _ends(self) -> Counts:
        counts = [sequence_count(store, self.seq, self.packed) for store in self.mixture.stores]
        return np.cumsum(np.array(counts, np.int64))

    @property
    def count(self) -> int:
        return int(self._ends[-1])

    def locate(self, samples: npt.ArrayLike) -> tuple[Counts, Counts]:
        samples = np.asarray(samples, np.int64)
        source = np.searchsorted(self._ends, np.minimum(samples, self.count - 1), side="right")
        first = np.concatenate([[0], self._ends])[source]
        return source, np.where(samples < self.count, samples - first, PADDING)


def training_sequences(store: TokenStore, seq: int, held_out: int, packed: bool = True) -> int:
    """Number of sequences to train on: all but the last `held_out` of the store."""
    sequences = sequence_count(store, seq, packed)
    if held_out >= sequences:
        raise MeshwrightError(
            f"store '{store.name}' has {count(sequences, 'sequence')} of {seq} tokens; holding out "
            f"{held_out} leaves none to train on; hold out fewer than {sequences}"
        )
    return sequences - held_out
