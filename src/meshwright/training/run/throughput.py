"""How fast a run is: tokens per second, TFLOP/s and MFU per device, memory.

>>> speed = throughput(6e9, 8 * 2048, 0.25, devices=1, peak_flops=989e12)
>>> round(speed.tokens_per_second), round(speed.tflops_per_device), round(speed.mfu, 3)
(65536, 393, 0.398)
"""

import collections
import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from meshwright.errors import MeshwrightError
from meshwright.machines import chip_of_kind

UNSTEADY_STEPS = 2  # the first holds the compilation, the second may wait for another process's
WINDOW = 50


@dataclasses.dataclass(frozen=True)
class Throughput:
    """`mfu`, model FLOP/s over the chip's bf16 peak, is None where the peak is unknown."""

    tokens_per_second: float
    tflops_per_device: float
    mfu: float | None

    def metrics(self) -> dict[str, float]:
        """As the columns of metrics.jsonl."""
        values = dataclasses.asdict(self)
        return {name: value for name, value in values.items() if value is not None}


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on the fullest of this process's devices."""

    used: int
    peak: int
    limit: int

    def metrics(self) -> dict[str, float]:
        """As the columns of metrics.jsonl."""
        return {"memory_bytes": self.peak, "memory_limit_bytes": self.limit}


def throughput(
    flops_per_token: float,
    tokens_per_step: int,
    step_seconds: float,
    devices: int,
    peak_flops: float | None,
) -> Throughput:
    """The speed of a whole step on `devices`, each of which can do `peak_flops`."""
    if step_seconds <= 0:
        raise MeshwrightError(f"step_seconds={step_seconds} must be above 0")
    tokens_per_second = tokens_per_step / step_seconds
    flops_per_device = flops_per_token * tokens_per_second / devices
    mfu = None if peak_flops is None else flops_per_device / peak_flops
    return Throughput(tokens_per_second, flops_per_device / 1e12, mfu)


def peak_flops(devices: Sequence[Any] | None = None) -> float | None:
    """The bf16 FLOP/s one jax device can do; None for a CPU and for a chip not in the catalogue."""
    device = (jax.devices() if devices is None else devices)[0]
    return chip_peak_flops(device.device_kind, device.platform)


def chip_peak_flops(kind: str, platform: str) -> float | None:
    """The bf16 FLOP/s of one device of this kind, in jax's words."""
    if platform == "cpu":
        return None  # the catalogue's figure for CPUs is nominal
    try:
        chip = chip_of_kind(kind, platform)
    except MeshwrightError:
        return None
    return chip.bf16_flops / chip.cores_per_chip


def memory(devices: Sequence[Any] | None = None) -> Memory | None:
    """Memory of the fullest device here; None where the runtime does not tell (CPU)."""
    told = []
    for device in jax.local_devices() if devices is None else devices:
        stats = device.memory_stats()
        if stats and "bytes_in_use" in stats:
            used = stats["bytes_in_use"]
            limit = stats.get("bytes_limit", 0)
            told.append(Memory(used, stats.get("peak_bytes_in_use", used), limit))
    return max(told, key=lambda memory: memory.used, default=None)


class StepClock:
    """Seconds a step takes, averaged over the last steps, without compiling, evaluating, saving.

    clock = StepClock()
    for step in …:
        …
        clock.tick(keys_seen)           # a step's result has come
        with clock.paused(): save()
        clock.seconds                   # None until the third step
        clock.keys_seen                 # by a token, averaged over the same steps
    """

    def __init__(
        self, window: int = WINDOW, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self._durations: collections.deque[float] = collections.deque(maxlen=window)
        self._keys_seen: collections.deque[float | None] = collections.deque(maxlen=window)
        self._ticks = 0
        self._last = clock()

    def tick(self, keys_seen: float | None = None) -> float | None:
        """A step is done; gives back how long it took, None for the first ones."""
        now = self._clock()
        took, self._last = now - self._last, now
        self._ticks += 1
        if self._ticks <= UNSTEADY_STEPS:
            return None
        self._durations.append(took)
        self._keys_seen.append(keys_seen)
        return took

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside is not part of a step."""
        began = self._clock()
        try:
            yield
        finally:
            self._last += self._clock() - began

    @property
    def seconds(self) -> float | None:
        """The mean over the window; None before there is one."""
        # a mean, not a median: a loop that looks at results every tenth step ticks unevenly
        return sum(self._durations) / len(self._durations) if self._durations else None

    @property
    def keys_seen(self) -> float | None:
        """The mean over the same steps; None if they did not tell."""
        told = [keys for keys in self._keys_seen if keys is not None]
        return statistics.fmean(told) if told else None
