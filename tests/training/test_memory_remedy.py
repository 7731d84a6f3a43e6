"""What is advised where a host has too little memory would fit, or is another machine."""

import re

import pytest

from meshwright.training import OptimizerConfig, TrainConfig, jax_backend

GIB = 2**30


@pytest.mark.parametrize(
    ("free", "optimizer", "remedy"),
    [
        (100, {}, "--optimizer.moments int8 or --optimizer.name adafactor would fit"),
        (70, {}, "--optimizer.name adafactor would fit"),
        (20, {}, "use a smaller model, or ask which machine .* plan llama-3.1-8b --on any"),
        (100, {"moments": "int8"}, "use a smaller model"),
        (100, {"name": "adafactor"}, "use a smaller model"),
    ],
)
def test_only_what_fits_is_advised(
    free: int, optimizer: dict[str, str], remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax_backend, "free_host_memory", lambda: free * GIB)
    config = TrainConfig("llama-3.1-8b", optimizer=OptimizerConfig(**optimizer))
    assert re.match(remedy, jax_backend.memory_remedy(config, 120 * GIB, 60 * GIB))
