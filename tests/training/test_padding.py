"""Training with a padded vocabulary is training without: values, moments, checkpoints, resuming.

The reference is one device, where nothing is padded. Vocabularies of 65, 127 and 129 are one token
off what tp divides; 17 over 8 devices leaves two of them with padding alone. 127 is one below the
size from which adafactor factors its moments, and is padded to it.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.serving.models import generate
from tests.training.conftest import TrainCommand
from tests.training.test_loop import MODEL, SETTINGS, losses
from tests.training.toy import CONFIG, ONE, Parts, Setting, packed_batch, parts, train

from meshwright.checkpoint import Checkpoints
from meshwright.layouts import fit
from meshwright.models import save_hf
from meshwright.models.decoder import DecoderConfig, abstract_arrays, decoder_rules, t5x_rules
from meshwright.models.decoder.hf_config import from_hf_config
from meshwright.serving.sampling import Sampling
from meshwright.serving.source import generation_mesh, load_weights, model_source
from meshwright.training.state import TrainState, stored_state

slow = pytest.mark.slow
ODD = dataclasses.replace(CONFIG, vocab=65)
TIED = dataclasses.replace(ODD, tied_embeddings=True)
FEW = dataclasses.replace(CONFIG, vocab=17)
BELOW, ABOVE = (dataclasses.replace(CONFIG, vocab=v, embed=128, mlp=256) for v in (127, 129))
ALONG_TP = decoder_rules(sp=True, sequence_parallel=True)


@functools.cache
def on_one_device(optimizer: str, config: DecoderConfig) -> tuple[np.ndarray, Any]:
    return train(Setting(ONE, optimizer, config=config))


def test_a_padded_vocabulary_trains_as_on_one_device() -> None:
    agrees(Setting("dp=1,fsdp=2,tp=2,sp=1", config=ODD))


@slow
@pytest.mark.parametrize(
    "setting",
    [
        Setting("dp=1,fsdp=1,tp=4,sp=1", config=ODD),
        Setting("dp=2,fsdp=1,tp=4,sp=1", config=TIED, rules=ALONG_TP),
        Setting("dp=1,fsdp=2,tp=2,sp=2", config=TIED, remat="full"),
        Setting("dp=2,fsdp=2,tp=2,sp=1", config=ODD, rules=t5x_rules(2, 2)),
        Setting("dp=1,fsdp=1,tp=8,sp=1", config=FEW),
        Setting("dp=1,fsdp=2,tp=2,sp=1", "lion", config=TIED),
        Setting("dp=1,fsdp=2,tp=4,sp=1", "muon", config=ODD),
        Setting("dp=1,fsdp=2,tp=2,sp=1", "adafactor", config=BELOW),
        Setting("dp=1,fsdp=2,tp=4,sp=1", "adafactor", config=ABOVE),
    ],
    ids=lambda s: f"{s.optimizer} {s.mesh} of {s.config.vocab}",
)
def test_so_it_does_on_every_mesh_and_with_every_optimizer(setting: Setting) -> None:
    agrees(setting)


def agrees(setting: Setting) -> None:
    expected, expected_params = on_one_device(setting.optimizer, setting.config)
    found, params = train(setting)
    assert expected[-1, 0] < 0.97 * expected[0, 0]  # it does learn
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert params["embedding"].shape[0] > setting.config.vocab

    def near(array: np.ndarray, right: np.ndarray) -> None:
        inside = array[tuple(map(slice, right.shape))]
        off = np.abs(inside - right)
        if setting.optimizer == "lion":  # takes the sign of a gradient, which may be rounding
            turned = off > 1e-5 * np.abs(right).max()
            assert np.count_nonzero(turned) <= 1e-3 * turned.size
            off = np.where(turned, 0, off)
        assert np.linalg.norm(off) < 1e-5 * np.linalg.norm(right)
        assert np.count_nonzero(array) == np.count_nonzero(inside)

    jax.tree.map(near, params, expected_params)


@pytest.mark.parametrize(
    "config", [pytest.param(BELOW, marks=pytest.mark.slow), ABOVE], ids=["127", "129"]
)
def test_an_optimizer_sees_and_keeps_what_it_would_on_one_device(config: DecoderConfig) -> None:
    setting = Setting("dp=1,fsdp=2,tp=2,sp=1", "adafactor", config=config)
    run, alone = parts(setting), parts(dataclasses.replace(setting, mesh=ONE))
    on_disk = stored_state(run.arrays, run.target, run.optimizer)
    shapes = jax.tree.map(lambda leaf: leaf.shape, (on_disk, alone.target))
    assert shapes[0] == shapes[1]
    state, _ = run.functions.train(run.new_state(), run.put(packed_batch(0, config.vocab)))
    for padded, inside in zip(
        jax.tree.leaves(state), jax.tree.leaves(fit(state, on_disk)), strict=True
    ):
        assert np.count_nonzero(padded) == np.count_nonzero(inside)


@pytest.mark.slow
def test_a_checkpoint_is_the_same_whatever_was_padded(tmp_path: Path) -> None:
    meshes = (
        "dp=1,fsdp=2,tp=2,sp=1", "dp=1,fsdp=1,tp=4,sp=1", ONE, "dp=1,fsdp=2,tp=1,sp=2",
        "dp=1,fsdp=1,tp=8,sp=1",
    )  # fmt: skip
    random = np.random.default_rng(0)
    runs = {mesh: abstract(mesh) for mesh in meshes}

    def value(leaf: Any) -> np.ndarray:
        numbers = random.normal(size=leaf.shape) if leaf.ndim else np.array(7)
        return numbers.astype(leaf.dtype)

    values = jax.tree.map(value, runs[ONE][1])
    sizes = {run[0].target.params["embedding"].shape[0] for run in runs.values()}
    assert sizes == {65, 66, 68, 72}
    folders = [Checkpoints(tmp_path / str(i)) for i in range(len(runs))]
    state: Any = None
    for i, (run, on_disk) in enumerate(runs.values()):
        if i == 0:
            shardings = jax.tree.map(lambda leaf: leaf.sharding, on_disk)
            read = jax.device_put(values, shardings)
        else:
            read = folders[i - 1].restore(1, on_disk)
        state = fit(read, run.target)
        abstract_shapes = jax.tree.map(lambda leaf: leaf.shape, run.target)
        assert jax.tree.map(lambda leaf: leaf.shape, state) == abstract_shapes
        folders[i].save(1, fit(state, on_disk), {}, wait=True)
        jax.tree.map(np.testing.assert_array_equal, fit(state, on_disk), values)
        assert folders[i].arrays(1) == folders[0].arrays(1)  # shapes, dtypes and fingerprints
        folders[i].close()


def abstract(mesh: str) -> tuple[Parts, TrainState]:
    run = parts(Setting(mesh, config=ODD))
    return run, stored_state(run.arrays, run.target, run.optimizer)


@pytest.fixture
def odd_model(tmp_path: Path) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MODEL | {"vocab_size": 321}))
    return str(file)


@pytest.mark.slow
def test_a_run_says_what_it_pads_and_generates_the_same_on_other_meshes(
    train_command: TrainCommand, odd_model: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    mesh = ["--cpu-devices", "4", "--mesh", "fsdp=2,tp=2"]
    said = train_command(odd_model, *SETTINGS, *mesh, "--stop-at", "4", "--run", str(run))
    assert said.count("vocab 321 padded to 322 for tp=2 (in memory only)") == 1
    elements = 2 * 321 * 32 + 32 + 2 * (2 * 32 + 2 * 32 * 8 * (4 + 2) + 3 * 32 * 64)
    assert f"{elements:,} elements" in said
    saved = Checkpoints(run / "checkpoints").arrays(4)
    assert saved["params/embedding"].shape == (321, 32)
    assert saved["params/output"].shape == (32, 321)
    prompts = [[10, 20, 30], [99]]
    for sampling in (Sampling(0), Sampling(50.0), Sampling(50.0, top_k=300, top_p=0.99)):
        alone, split = (
            generate(load_weights(model_source(run), generation_mesh(text)), prompts, 24, sampling)
            for text in ("tp=1", "tp=2")
        )
        assert split == alone
        assert max(token for row in split for token in row.tokens) < 257  # its tokenizer's


@slow
def test_a_run_starts_from_weights_whose_vocabulary_its_mesh_does_not_divide(
    train_command: TrainCommand, odd_model: str, tmp_path: Path
) -> None:
    config = from_hf_config(Path(odd_model))
    random = np.random.default_rng(0)
    params = jax.tree.map(
        lambda spec: random.normal(scale=0.1, size=spec.shape).astype("f"), abstract_arrays(config)
    )
    folder = str(save_hf(tmp_path / "weights", params, config, dtype=jnp.float32))
    alone, split = tmp_path / "alone", tmp_path / "split"
    settings = [*SETTINGS, "--init-from", folder, "--stop-at", "3"]
    train_command(folder, *settings, "--cpu-devices", "1", "--run", str(alone))
    train_command(folder, *settings, "--cpu-devices", "2", "--mesh", "tp=2", "--run", str(split))
    np.testing.assert_allclose(losses(split), losses(alone), rtol=1e-5)


@slow
def test_a_run_resumes_under_another_padding(
    train_command: TrainCommand, odd_model: str, tmp_path: Path
) -> None:
    through, moved = tmp_path / "through", tmp_path / "moved"
    train_command(odd_model, *SETTINGS, "--cpu-devices", "1", "--run", str(through))
    for mesh, stop in (("fsdp=2,tp=2", "4"), ("dp=2", "8"), ("tp=2", "12")):
        settings = [*SETTINGS, "--cpu-devices", "4" if "fsdp" in mesh else "2", "--mesh", mesh]
        train_command(odd_model, *settings, "--stop-at", stop, "--run", str(moved))
    np.testing.assert_allclose(losses(moved), losses(through), rtol=1e-5)
