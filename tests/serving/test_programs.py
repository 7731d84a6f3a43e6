"""What a step sends, and which of the compiled step programs are used."""

import dataclasses
import re
import types

import jax.numpy as jnp
import numpy as np
import pytest
from tests.serving.models import BASE

from meshwright.serving import EngineConfig
from meshwright.serving.program_inputs import Shape
from meshwright.serving.programs import Programs, Steps
from meshwright.serving.source import generation_mesh


def test_a_step_sends_activations_and_no_weights() -> None:
    config = dataclasses.replace(BASE, embed=256, mlp=512, head_dim=32)
    mesh = generation_mesh("fsdp=4,tp=2")
    steps = Steps(config, mesh, jnp.float32, EngineConfig(max_batch=1, max_length=64), 64)
    pages = 3
    compiled = steps.lower(Shape(1), pages).compile()
    sent = collectives(compiled.as_text())
    assert sent  # the partial sums
    smallest = config.embed * config.kv_heads * config.head_dim // mesh.size
    assert max(sent) < smallest  # matrix, what a device holds of it
    held = 4 * 2 * pages * 64 * config.kv_heads * config.head_dim // mesh.shape["tp"]
    aliased = compiled.memory_analysis().alias_size_in_bytes
    assert aliased >= config.layers * held  # pages are written where they are


def collectives(hlo: str) -> list[int]:
    """Elements of each array that a compiled program gets from other devices."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    return [
        int(np.prod([int(size) for size in dims.split(",") if size]))
        for made in re.findall(rf"= (.*?) (?:{kinds})(?:-start)?\(", hlo)
        for dims in re.findall(r"\w+\[([\d,]*)\]", made)
    ]


def uncompiled(config: EngineConfig, platform: str) -> Programs:
    programs = object.__new__(Programs)
    programs.config = config
    devices = types.SimpleNamespace(flat=[types.SimpleNamespace(platform=platform)])
    programs.mesh = types.SimpleNamespace(devices=devices)  # type: ignore[assignment]
    return programs


@pytest.mark.parametrize(("platform", "batches"), [("gpu", (2,)), ("tpu", (1,)), ("cpu", (1,))])
def test_one_sequence_is_decoded_as_two_on_gpus(platform: str, batches: tuple[int, ...]) -> None:
    """There XLA multiplies a single token with weights at less than half of the bandwidth."""
    assert uncompiled(EngineConfig(max_batch=1), platform).batches == batches


@pytest.mark.parametrize(
    ("platform", "times", "used"),
    [
        ("gpu", {2: 1.46, 4: 1.2, 16: 1.14, 32: 1.25}, (16, 32)),
        ("gpu", {2: 1.0, 4: 1.1, 16: 1.2, 32: 1.3}, (2, 4, 16, 32)),
        ("gpu", {2: 1.0, 4: 1.3, 16: 1.3, 32: 1.3}, (2, 32)),
        ("cpu", {1: 2.0, 4: 1.0, 16: 1.0, 32: 1.0}, (1, 4, 16, 32)),  # not timed there
    ],
)
def test_a_batch_that_takes_as_long_as_a_larger_one_is_not_used(
    platform: str, times: dict[int, float], used: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = uncompiled(EngineConfig(max_batch=32, batch_buckets=(1, 4, 16)), platform)
    monkeypatch.setattr(Programs, "_seconds", lambda self, shape: times[shape.decode])
    assert programs.fastest_batches() == used
