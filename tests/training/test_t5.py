"""T5 trains on any mesh as on one device, resumes on another, and says what it cannot do."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tests.processes import run_commands

import meshwright as mw
from meshwright import MeshwrightError
from meshwright.data import Mixture, training_loader
from meshwright.models import abstract_arrays, preset, save_hf
from meshwright.training import TrainConfig, abstract_step
from meshwright.training.setup import objective_of
from meshwright.training.state import new_state

STEPS = 20
MESHES = [
    ("fsdp=4,tp=2", 6),
    *(
        pytest.param(mesh, STEPS, marks=pytest.mark.slow)
        for mesh in (
            "fsdp=4,tp=2", "dp=8", "fsdp=8", "tp=8", "dp=2,fsdp=4", "dp=2,tp=4", "dp=2,fsdp=2,tp=2", "tp=2,fsdp=4",
            "fsdp=2,tp=4",
        )
    ),
]  # fmt: skip


def losses(mesh: str, devices: int, steps: int = STEPS, **settings: Any) -> list[float]:
    """Of the first steps of a small T5 on the embedded text."""
    config = TrainConfig("t5-tiny", mesh=mesh, batch=8, seq=32, steps=STEPS, **settings)
    spec = mw.MeshSpec.parse(mesh).with_standard_axes()
    placed = mw.mesh(spec, devices=jax.devices()[:devices], axis_types="explicit")
    step = abstract_step(config, placed)
    data = Mixture.parse("embedded")
    objective = objective_of(config, step.model, data.tokenizer)
    assert objective is not None
    loader = training_loader(data, batch=8, seq=objective.raw_length, objective=objective)
    state = new_state(step.arrays, step.state, step.optimizer, placed)
    found = []
    for number in range(steps):
        batch = loader.device_batch(number, step.functions.batch_sharding)
        state, report = step.functions.train(state, batch)
        found.append(float(report["loss"]))
    return found


@functools.cache
def reference(steps: int = STEPS) -> list[float]:
    return losses("dp=1", 1, steps)


@pytest.mark.parametrize(("mesh", "steps"), MESHES)
def test_losses_on_a_mesh_are_those_of_one_device(mesh: str, steps: int) -> None:
    one = reference(steps)
    assert one[-1] < one[0]
    np.testing.assert_allclose(losses(mesh, 8, steps), one, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rules", ["t5x:1,1", "t5x:2,1", "t5x:1,2", "t5x:2,2"])
def test_t5xs_rules_train_the_same(rules: str) -> None:
    np.testing.assert_allclose(losses("dp=4,tp=2", 8, rules=rules), reference(), rtol=1e-5)


def test_a_run_resumes_and_starts_from_a_hugging_face_folder(tmp_path: Path) -> None:
    config = preset("t5-tiny")
    folder = tmp_path / "hf"
    arrays = jax.tree.map(
        lambda spec: np.full(spec.shape, 0.01, np.float32), abstract_arrays(config)
    )
    save_hf(folder, arrays, config)
    run = ["train", str(folder), "--init-from", str(folder), "--batch", "2", "--seq", "32"]
    run += ["--run", str(tmp_path / "run"), "--steps", "4", "--eval.sequences", "2"]
    first, second = run_commands([*run, "--stop-at", "2"], run)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "resum" in second.out
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    assert record["model_config"]["family"] == "t5"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mesh": "fsdp=4,sp=2"}, "cannot be trained with context parallelism"),
        ({"mesh": "tp=3,fsdp=1"}, "needs 3 devices"),
        ({"objective": "next-token"}, "it trains on 'span-corruption', 'prefix-lm' or 'examples'"),
        ({"override": ("rope.theta=5",)}, "'rope.theta' is not a field of the model"),
    ],
)
def test_what_a_t5_cannot_do_is_said(settings: dict[str, Any], words: str) -> None:
    config = TrainConfig("t5-tiny", batch=16, seq=32, **settings)
    spec = mw.MeshSpec.parse(config.mesh).with_standard_axes()
    with pytest.raises(MeshwrightError, match=words):
        abstract_step(config, mw.mesh(spec, devices=jax.devices()[:8], axis_types="explicit"))
