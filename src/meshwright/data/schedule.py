"""Which source each sample of a mixture comes from: a pure function of the sample index.

>>> schedule = Schedule.of_weights(["0.5", "0.25", "0.25"])
>>> source, number = schedule.assign(range(8))
>>> source.tolist()  # half of any prefix comes from source 0, to within one sample
[0, 1, 2, 0, 0, 1, 2, 0]
>>> number.tolist()  # index of the sample within its source
[0, 0, 0, 1, 2, 1, 1, 3]
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from meshwright.errors import MeshwrightError

LONGEST_PERIOD = 10_000  # four decimals

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Schedule:
    """A repeating period of samples in which source s occurs `quotas[s]` times."""

    quotas: tuple[int, ...]
    table: Counts  # [period] the source of each sample
    rank: Counts  # [period] samples of the same source before it

    @property
    def period(self) -> int:
        return len(self.table)

    @classmethod
    def of_weights(cls, weights: Sequence[str | float | Fraction]) -> "Schedule":
        """Exact for weights of up to four decimals with sum 1; others round to 1 in 10,000."""
        quotas = _quotas([_fraction(weight) for weight in weights])
        table = np.array(_spread(quotas), np.int64)
        rank = np.zeros_like(table)
        for source, quota in enumerate(quotas):
            rank[table == source] = np.arange(quota)
        return cls(tuple(quotas), table, rank)

    def assign(self, samples: npt.ArrayLike) -> tuple[Counts, Counts]:
        """For each sample index: its source, and its index within that source."""
        period, place = np.divmod(np.asarray(samples, np.int64), self.period)
        source = self.table[place]
        return source, period * np.array(self.quotas)[source] + self.rank[place]


def _fraction(weight: str | float | Fraction) -> Fraction:
    try:
        if isinstance(weight, Fraction):
            value = weight
        elif abs(float(weight)) > 1e30:
            raise ValueError  # 1e999999999 as an exact fraction takes hours
        else:
            value = Fraction(0) if abs(float(weight)) < 1e-30 else Fraction(str(weight))
    except (ValueError, ZeroDivisionError, OverflowError):
        raise MeshwrightError(f"weight {weight!r} is not a number; write 0.7 or 2") from None
    if value <= 0:
        raise MeshwrightError(f"weight {weight!r} must be above 0; leave the source out instead")
    return value


def _quotas(weights: list[Fraction]) -> list[int]:
    total = sum(weights)
    shares = [weight / total for weight in weights]
    period = math.lcm(*(share.denominator for share in shares))
    if period > LONGEST_PERIOD:
        # round down in the longest period, then give the rest to the largest remainders
        period = LONGEST_PERIOD
        quotas = [max(1, math.floor(share * period)) for share in shares]
        by_need = sorted(range(len(shares)), key=lambda s: quotas[s] - shares[s] * period)
        for source in by_need[: max(0, period - sum(quotas))]:
            quotas[source] += 1
        return quotas
    return [int(share * period) for share in shares]


def _spread(quotas: list[int]) -> list[int]:
    """An order in which every prefix of n samples holds n·quota/period of each source, within 1.

    This is the chairman assignment problem, solved by Tijdeman's rule: among the sources that are
    far enough behind, take the one with the earliest deadline.
    """
    period, sources = sum(quotas), len(quotas)
    if sources == 1:
        return [0] * period
    # integers only: shares and the rule's slack 1/(2·sources - 2), both multiplied by `scale`
    scale = period * (2 * sources - 2)
    slack = period
    shares = [quota * (2 * sources - 2) for quota in quotas]
    behind = [0] * sources  # n·share - occurrences so far
    order = []
    for _ in range(period):
        behind = [due + share for due, share in zip(behind, shares, strict=True)]
        ready = [s for s in range(sources) if behind[s] >= slack]
        chosen = min(ready, key=lambda s: Fraction(scale - slack - behind[s], shares[s]))
        behind[chosen] -= scale
        order.append(chosen)
    return order
