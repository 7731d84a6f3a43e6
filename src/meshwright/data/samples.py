"""Sample index to (store, row): training rows shuffled and mixed, held-out rows in order."""

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
PADDING = -1  # the row of a sample that is past the end


class Samples(Protocol):
    """Where a sample comes from, as a pure function of its index."""

    def locate(self, samples: npt.ArrayLike) -> tuple[Counts, Counts]:
        """The store and the row of each sample; row -1 is a row of padding."""


@dataclass(frozen=True)
class TrainingSamples:
    """Endless: each store goes through its own epochs, every epoch in another order."""

    mixture: Mixture
    seq: int
    held_out: int = 0
    seed: int | None = 0  # None: in the order they were packed

    def locate(self, samples: npt.ArrayLike) -> tuple[Counts, Counts]:
        source, number = self.mixture.schedule.assign(samples)
        row = np.zeros_like(number)
        for i, store in enumerate(self.mixture.stores):
            mine = source == i
            if not mine.any():
                continue
            rows = training_sequences(store, self.seq, self.held_out)
            if self.seed is None:
                row[mine] = in_order(number[mine], rows)
            else:
                # an order of its own for each store, whatever it is mixed with
                own = self.seed + int(store.identity[:12], 16)
                row[mine] = shuffled(number[mine], rows, own)
        return source, row


@dataclass(frozen=True)
class HeldOutSamples:
    """The last `held_out` rows of each store, once, one store after the other; then padding."""

    mixture: Mixture
    seq: int
    held_out: int

    @property
    def count(self) -> int:
        return self.held_out * len(self.mixture.stores)

    def locate(self, samples: npt.ArrayLike) -> tuple[Counts, Counts]:
        samples = np.asarray(samples, np.int64)
        source, number = np.divmod(np.minimum(samples, self.count - 1), self.held_out)
        first = np.array(
            [training_sequences(store, self.seq, self.held_out) for store in self.mixture.stores]
        )
        return source, np.where(samples < self.count, first[source] + number, PADDING)


def training_sequences(store: TokenStore, seq: int, held_out: int) -> int:
    """How many rows of the store are trained on, the last `held_out` set apart."""
    rows = sequence_count(store, seq)
    if held_out >= rows:
        raise MeshwrightError(
            f"store '{store.name}' has {count(rows, 'row')} of {seq} tokens and {held_out} are to "
            f"be held out: none would be left to train on; hold out fewer than {rows}"
        )
    return rows - held_out
