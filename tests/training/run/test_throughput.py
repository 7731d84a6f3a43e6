"""Speed against hand arithmetic; a step time without what is not a step."""

import dataclasses

import jax
import pytest

from meshwright import CHIPS, MeshwrightError
from meshwright.training.run import StepClock, memory, peak_flops, throughput


@dataclasses.dataclass
class Device:
    """What of a jax device is looked at, for chips that are not here."""

    platform: str = "gpu"
    device_kind: str = "NVIDIA H200"
    stats: dict[str, int] | None = None

    def memory_stats(self) -> dict[str, int] | None:
        return self.stats


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_speed_is_what_arithmetic_says() -> None:
    # 1B parameters, 6 FLOPs each and token; 4 devices, 32 sequences of 2048 in half a second
    speed = throughput(6e9, 32 * 2048, 0.5, 4, 1e15)
    assert speed.tokens_per_second == 131072
    assert speed.tflops_per_device == pytest.approx(6e9 * 131072 / 4 / 1e12)
    assert speed.mfu == pytest.approx(0.196608)
    assert throughput(6e9, 2048, 0.5, 4, None).mfu is None
    assert "mfu" not in throughput(6e9, 2048, 0.5, 4, None).metrics()
    with pytest.raises(MeshwrightError, match="step_seconds"):
        throughput(6e9, 2048, 0.0, 4, None)


def test_the_peak_is_the_chips_and_of_one_device() -> None:
    assert peak_flops([Device()]) == CHIPS["h200"].bf16_flops
    # two devices a chip: each has half
    assert peak_flops([Device("tpu", "TPU v3")]) == CHIPS["v3"].bf16_flops / 2
    assert peak_flops([Device("gpu", "NVIDIA Unheard-of")]) is None
    assert peak_flops() is None  # CPUs, here


def test_memory_is_that_of_the_fullest_device() -> None:
    full = Device(stats={"bytes_in_use": 7, "peak_bytes_in_use": 9, "bytes_limit": 10})
    empty = Device(stats={"bytes_in_use": 1, "bytes_limit": 10})
    told = memory([empty, full])
    assert told is not None
    assert (told.used, told.peak, told.limit) == (7, 9, 10)
    assert memory([Device()]) is None
    assert memory(jax.devices()) is None


def test_compiling_and_pauses_are_no_part_of_a_step() -> None:
    clock = Clock()
    steps = StepClock(clock=clock)
    clock.now += 90  # compiling
    assert steps.tick() is None
    clock.now += 2
    assert steps.tick() is None
    assert steps.seconds is None
    for pause in (0, 40, 0):
        clock.now += 0.25
        with steps.paused():
            clock.now += pause
        clock.now += 0.25
        assert steps.tick() == pytest.approx(0.5)
    assert steps.seconds == pytest.approx(0.5)


def test_steps_whose_results_come_in_bunches_are_averaged() -> None:
    clock = Clock()
    steps = StepClock(window=20, clock=clock)
    for step in range(42):
        clock.now += 0 if step % 10 else 3
        steps.tick()
    assert steps.seconds == pytest.approx(0.3)


def test_keys_are_averaged_over_the_steps_that_are_timed() -> None:
    steps = StepClock(window=2)
    assert steps.keys_seen is None
    for keys in (900.0, 900.0, 70.0, 10.0, 20.0):  # the first two are not timed
        steps.tick(keys)
    assert steps.keys_seen == 15.0
