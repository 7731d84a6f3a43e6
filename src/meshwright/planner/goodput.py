"""Of the time that a machine is rented, how much is training: checkpoints, failures, restarts.

>>> llama = LongRun()
>>> f"{llama.goodput(chips=16_384, checkpoint=4.9e12):.0%}"  # 405B; published: over 90%
'93%'
"""

import dataclasses
import math

DAY = 86400.0


@dataclasses.dataclass(frozen=True)
class LongRun:
    """What stops a run, and for how long.

    The defaults are those of Llama 3 405B (arXiv 2407.21783, 3.3.1 and 3.3.4): 419 unexpected
    interruptions in 54 days on 16,384 GPUs, and a store that takes 2 TB/s from all of them. The
    time to restart is that of MegaScale (arXiv 2402.15627, 6.3): failures are found and diagnosed
    in less than 10 minutes.
    """

    failures: float = 419 / (54 * 16384)  # of a chip, a day
    restart: float = 600.0  # seconds from a failure until steps are taken again
    write: float = 2e12 / 16384  # bytes a second that each chip writes to the store

    def between_failures(self, chips: int) -> float:
        """Seconds, on average."""
        return DAY / (self.failures * chips) if self.failures else math.inf

    def interval(self, chips: int, checkpoint: float) -> float:
        """Seconds of work between checkpoints that lose the least (Young, CACM 1974)."""
        return math.sqrt(2 * self.writing(chips, checkpoint) * self.between_failures(chips))

    def writing(self, chips: int, checkpoint: float) -> float:
        """Seconds in which a checkpoint of so many bytes is written; the step waits for it."""
        return checkpoint / (self.write * chips)

    def goodput(self, chips: int, checkpoint: float) -> float:
        """Of the time rented, the part in which steps are taken that are not repeated.

        A second of work costs its part of a checkpoint, and of a failure: the restart and, on
        average, half of the interval once more.
        """
        between = self.between_failures(chips)
        if between == math.inf:
            return 1.0
        interval = self.interval(chips, checkpoint)
        writes = self.writing(chips, checkpoint) / interval if interval else 0.0
        return 1 / (1 + writes + (self.restart + interval / 2) / between)
