"""A run that trains a subset of its arrays: only norms, or only the last layer."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from tests.training.conftest import TrainCommand
from tests.training.test_loop import MODEL, losses, parameters
from tests.training.test_step import global_norm, plain_loss
from tests.training.toy import CONFIG, ONE, Setting, packed_batch, parts

from meshwright.errors import MeshwrightError
from meshwright.layouts import select_trainable, tree_paths
from meshwright.models.decoder import abstract_arrays
from meshwright.training.optimizer import OptimizerConfig, learning_rate

slow = pytest.mark.slow
STEPS = 4
SUBSETS = {"norms": ("norm",), "the last layer": ("layers/-1/",)}


def is_trained(subset: str, path: str) -> Any:
    """Which numbers of an array are trained: all, none, or by layer; written without patterns."""
    stacked = path.startswith("layers/")
    if subset == "norms":
        return path.endswith("norm")
    return np.arange(CONFIG.layers) == CONFIG.layers - 1 if stacked else False


def masks(subset: str, params: Any) -> Any:
    def mask(path: Any, x: np.ndarray) -> np.ndarray:
        trained = np.asarray(is_trained(subset, "/".join(key.key for key in path)))
        return np.broadcast_to(trained.reshape(-1, *(1,) * (x.ndim - 1)), x.shape)

    return jax.tree_util.tree_map_with_path(mask, params)


@functools.cache
def reference(subset: str) -> tuple[Any, Any, list[float], list[float]]:
    """Dense, on one device: gradients, clipping and AdamW in optax; what is frozen is put back."""
    run = parts(Setting())
    params = before = jax.tree.map(np.asarray, run.new_state().params)
    mask = masks(subset, params)
    rate = learning_rate(OptimizerConfig(learning_rate=1e-3, warmup_steps=5), Setting.steps)
    decayed = jax.tree.map(lambda spec: spec.is_matrix, abstract_arrays(CONFIG))
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(rate, 0.9, 0.95, 1e-8, weight_decay=0.1, mask=decayed),
    )
    state = optimizer.init(params)
    losses, norms = [], []
    with jax.set_mesh(run.mesh), jax.numpy_dtype_promotion("standard"):
        both = jax.jit(jax.value_and_grad(plain_loss, has_aux=True), static_argnums=2)
        for step in range(STEPS):
            (_, entropy), gradient = both(params, packed_batch(step), Setting.z_loss)
            gradient = jax.tree.map(lambda g, m: np.where(m, g, 0), gradient, mask)
            updates, state = optimizer.update(gradient, state, params)
            moved = optax.apply_updates(params, updates)
            params = jax.tree.map(lambda m, new, old: np.where(m, new, old), mask, moved, params)
            losses.append(float(entropy))
            norms.append(global_norm(gradient))
    return before, params, losses, norms


@pytest.mark.parametrize(
    ("mesh", "subset"),
    [
        pytest.param(ONE, "norms", marks=slow),
        pytest.param(ONE, "the last layer", marks=slow),
        pytest.param("dp=1,fsdp=4,tp=2,sp=1", "norms", marks=slow),
        pytest.param("dp=1,fsdp=4,tp=2,sp=1", "the last layer", marks=slow),
        pytest.param("dp=2,fsdp=2,tp=1,sp=2", "norms", marks=slow),
        pytest.param("dp=2,fsdp=2,tp=1,sp=2", "the last layer", marks=slow),
    ],
)
def test_what_is_trained_is_the_reference_and_what_is_frozen_keeps_its_bits(
    mesh: str, subset: str
) -> None:
    """Batches are two micro-batches."""
    before, expected, losses, norms = reference(subset)
    run = parts(Setting(mesh, trainable=SUBSETS[subset]))
    state = run.new_state()
    for step in range(STEPS):
        state, report = run.functions.train(state, run.put(packed_batch(step)))
        assert float(report["loss"]) == pytest.approx(losses[step], rel=1e-5)
        assert float(report["gradient_norm"]) == pytest.approx(norms[step], rel=1e-4)
    mask = masks(subset, before)
    found = jax.tree.map(np.asarray, state.params)
    for path, start, after, right, trained in zip(
        *map(jax.tree.leaves, (tree_paths(before), before, found, expected, mask)), strict=True
    ):
        np.testing.assert_array_equal(after[~trained], start[~trained], err_msg=path)
        # Adam moves a number by the learning rate, whatever its gradient: the error is of that
        np.testing.assert_allclose(after[trained], right[trained], atol=2e-5, err_msg=path)
        assert not trained.any() or (after[trained] != start[trained]).mean() > 0.9
    for made, described in zip(jax.tree.leaves(state), jax.tree.leaves(run.target), strict=True):
        assert (made.shape, made.dtype) == (described.shape, described.dtype)
        assert made.sharding == described.sharding


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "adafactor", "muon"])
@pytest.mark.parametrize("subset", SUBSETS)
def test_optimizer_state_is_of_what_is_trained_alone(subset: str, optimizer: str) -> None:
    run = parts(Setting("dp=1,fsdp=4,tp=2,sp=1", optimizer, trainable=SUBSETS[subset]))
    everything = parts(Setting("dp=1,fsdp=4,tp=2,sp=1", optimizer))

    def sizes(state: Any) -> dict[str, tuple[int, ...]]:
        leaves, _ = jax.tree_util.tree_flatten_with_path(state.optimizer)
        paths = {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}
        return {path: x.shape for path, x in paths.items() if x.ndim}

    of_all, found = sizes(everything.target), sizes(run.target)
    found.pop("inner_states/muon/inner_state/0/ns_coeffs", None)
    if subset == "norms":
        assert found == {path: of_all[path] for path in of_all if "norm" in path.split("/")}
    else:
        assert found.keys() == {path for path in of_all if "layers/" in path}
        assert all(shape[0] == 1 for shape in found.values())
        assert all(shape[1:] == of_all[path][1:] for path, shape in found.items())


def test_patterns_are_of_paths_and_of_layers() -> None:
    arrays = abstract_arrays(CONFIG)

    def trained(*patterns: str) -> dict[str, Any]:
        chosen = select_trainable(arrays, patterns)
        return {
            path: spec.trained
            for path, spec in zip(
                jax.tree.leaves(tree_paths(chosen)), jax.tree.leaves(chosen), strict=True
            )
            if spec.trained
        }

    assert select_trainable(arrays, ()) is arrays
    assert trained("^norm$", "layers/0/mlp/(gate|up)") == {
        "norm": True, "layers/mlp/gate": (0,), "layers/mlp/up": (0,)
    }  # fmt: skip
    assert trained("layers/.*/norm$").keys() == {"layers/attention/norm", "layers/mlp/norm"}
    assert set(trained("layers/.*/norm$").values()) == {True}
    assert trained("layers/1/attention/wq") == trained("layers/-1/attention/wq")
    # all layers, by two patterns, are the array
    assert trained("layers/0/mlp/up", "layers/-1/mlp/up") == {"layers/mlp/up": True}


def test_a_pattern_that_finds_nothing_is_answered_with_paths() -> None:
    arrays = abstract_arrays(CONFIG)
    with pytest.raises(MeshwrightError, match=r"trainable 'layers/atention/wq' is found in .*"):
        select_trainable(arrays, ("norm", "layers/atention/wq"))
    with pytest.raises(MeshwrightError, match=r"mean 'layers/attention/wq'"):
        select_trainable(arrays, ("layers/atention/wq",))
    with pytest.raises(MeshwrightError, match=r"'layers/2/' is found .* of a layer layers/-1/"):
        select_trainable(arrays, ("layers/2/",))  # it has two
    with pytest.raises(MeshwrightError, match=r"trainable: .*'\(norm' is not a regex"):
        select_trainable(arrays, ("(norm",))


def test_a_run_saves_all_arrays_resumes_bit_for_bit_and_keeps_its_subset(
    train_command: TrainCommand, tmp_path: Path
) -> None:
    model = tmp_path / "config.json"
    model.write_text(json.dumps(MODEL))
    settings = [
        *(str(model), "--batch", "8", "--seq", "32", "--steps", "6", "--cpu-devices", "4"),
        *("--mesh", "fsdp=2,tp=2", "--checkpoint.every", "3", "--eval.sequences", "8"),
    ]
    subset = ["--trainable", "layers/-1/", "^norm$"]
    through, stopped = tmp_path / "through", tmp_path / "stopped"
    said = train_command(*settings, *subset, "--run", str(through))
    layer = 32 * (4 + 2 + 2 + 4) * 8 + 3 * 32 * 64 + 2 * 32
    assert f"trains {layer + 32:,} of {2 * layer + 32 + 2 * 320 * 32:,} parameters" in said
    train_command(*settings, *subset, "--run", str(stopped), "--stop-at", "3")
    train_command(*settings, *subset, "--run", str(stopped))
    assert losses(stopped) == losses(through)
    end, resumed, middle = (parameters(*of) for of in ((through, 6), (stopped, 6), (stopped, 3)))
    assert end.keys() == resumed.keys()
    for path, array in end.items():
        np.testing.assert_array_equal(resumed[path], array, err_msg=path)
        if path.startswith("params/"):
            frozen = slice(0, 1) if "layers/" in path else slice(0, 0 if "norm" in path else None)
            np.testing.assert_array_equal(array[frozen], middle[path][frozen], err_msg=path)
            assert (array != middle[path]).any() == (path[7:] == "norm" or "layers/" in path)
    moments = {path: x.shape[0] for path, x in end.items() if "/mu/" in path or "/nu/" in path}
    assert len(moments) == 2 * (9 + 1)
    assert {size for path, size in moments.items() if "layers/" in path} == {1}
    for other in ([], ["--trainable", "norm"]):
        refused = train_command(*settings, *other, "--run", str(stopped), expect=2)
        assert "was trained with trainable layers/-1/ '^norm$', now it is" in refused
        assert "Give --trainable layers/-1/ '^norm$' again" in refused
    mistaken = train_command(*settings, "--trainable", "nrm", "--run", "none", expect=2)
    assert "trainable 'nrm' is found in the path of no array" in mistaken
