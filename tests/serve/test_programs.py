"""Which of the compiled step programs are used."""

import types

import pytest

from meshwright.serve import EngineConfig
from meshwright.serve.programs import Programs


@pytest.mark.parametrize(
    ("platform", "times", "used"),
    [
        ("gpu", {1: 1.46, 4: 1.2, 16: 1.14, 32: 1.25}, (16, 32)),
        ("gpu", {1: 1.0, 4: 1.1, 16: 1.2, 32: 1.3}, (1, 4, 16, 32)),
        ("gpu", {1: 1.0, 4: 1.3, 16: 1.3, 32: 1.3}, (1, 32)),
        ("cpu", {1: 2.0, 4: 1.0, 16: 1.0, 32: 1.0}, (1, 4, 16, 32)),  # not timed there
    ],
)
def test_a_batch_that_takes_as_long_as_a_larger_one_is_not_used(
    platform: str, times: dict[int, float], used: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = object.__new__(Programs)  # nothing is compiled
    programs.config = EngineConfig(max_batch=32, batch_buckets=(1, 4, 16))
    devices = types.SimpleNamespace(flat=[types.SimpleNamespace(platform=platform)])
    programs.mesh = types.SimpleNamespace(devices=devices)  # type: ignore[assignment]
    monkeypatch.setattr(Programs, "_seconds", lambda self, shape: times[shape.decode])
    assert programs.fastest_batches() == used
