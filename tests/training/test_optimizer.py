"""Optimizers and learning rates: by hand, and against optax on layers that are not stacked."""

import dataclasses
import math
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshwright.errors import MeshwrightError
from meshwright.layouts import ArraySpec, tree_paths
from meshwright.models import preset
from meshwright.models.decoder import abstract_arrays
from meshwright.training.optimizer import learning_rate, make_optimizer
from meshwright.training.optimizer_config import OptimizerConfig, ScheduleName

PEAK = 3e-3


def rates(schedule: str, steps: int = 100, **config: Any) -> np.ndarray:
    options = {"learning_rate": PEAK, "warmup_steps": 10, **config}
    rate = learning_rate(OptimizerConfig(schedule=schedule, **options), steps)
    return np.array([float(rate(step)) for step in range(steps + 1)])


@pytest.mark.parametrize("schedule", get_args(ScheduleName))
def test_the_warm_up_rises_by_equal_steps_to_the_peak(schedule: str) -> None:
    found = rates(schedule)
    np.testing.assert_allclose(found[:10], PEAK * np.arange(1, 11) / 10, rtol=1e-5)
    assert found.max() == pytest.approx(PEAK)
    assert found[0] == pytest.approx(PEAK / 10)  # as the help says: not 0


def test_cosine_falls_along_half_a_cosine() -> None:
    x = np.arange(91) / 90
    expected = PEAK * (0.1 + 0.9 * (1 + np.cos(np.pi * x)) / 2)
    np.testing.assert_allclose(rates("cosine")[10:], expected, rtol=1e-4)


def test_linear_falls_along_a_line() -> None:
    expected = PEAK * (1 - 0.75 * np.arange(91) / 90)
    np.testing.assert_allclose(rates("linear", final_fraction=0.25)[10:], expected, rtol=1e-4)


def test_wsd_stays_and_falls_over_the_last_part() -> None:
    found = rates("wsd", decay_fraction=0.2, final_fraction=0.0)
    np.testing.assert_allclose(found[10:81], PEAK, rtol=1e-5)
    np.testing.assert_allclose(found[80:], PEAK * (1 - np.arange(21) / 20), rtol=1e-4, atol=1e-9)


def test_wsd_reaches_its_end_after_a_long_warm_up() -> None:
    found = rates("wsd", warmup_steps=90, decay_fraction=0.2, final_fraction=0.1)
    assert found[-1] == pytest.approx(0.1 * PEAK)


def test_constant_stays() -> None:
    np.testing.assert_allclose(rates("constant")[10:], PEAK, rtol=1e-6)


def test_without_warm_up_the_first_step_is_at_the_peak() -> None:
    for schedule in get_args(ScheduleName):
        assert rates(schedule, warmup_steps=0)[0] == pytest.approx(PEAK)


def test_a_warm_up_of_one_step_begins_at_the_peak() -> None:
    assert rates("cosine", warmup_steps=1)[0] == pytest.approx(PEAK)


@pytest.mark.parametrize(("steps", "warmup"), [(1, 1), (5, 2), (60, 30), (200, 100), (5000, 100)])
def test_the_default_warm_up_takes_half_of_a_short_run_at_most(steps: int, warmup: int) -> None:
    found = rates("constant", steps, warmup_steps=None)
    np.testing.assert_allclose(found[:warmup], PEAK * np.arange(1, warmup + 1) / warmup, rtol=1e-5)
    np.testing.assert_allclose(found[warmup:], PEAK, rtol=1e-6)


def test_inverse_sqrt_with_adafactor_is_the_schedule_of_palm() -> None:
    """PaLM, section 5: 1e-2 for the first 10,000 steps, then 1/sqrt(k), where k is the step."""
    steps = np.array([0, 1, 5000, 9999, 10_000, 10_001, 40_000, 255_000, 1_000_000])
    palm = OptimizerConfig(
        "adafactor", 1e-2, schedule="inverse_sqrt", warmup_steps=0, decay_from=10_000
    )
    rate = learning_rate(palm, steps=255_000)
    expected = [0.01 if k <= 10_000 else 1 / math.sqrt(k) for k in steps]
    np.testing.assert_allclose([float(rate(k)) for k in steps], expected, rtol=1e-6)


def test_inverse_sqrt_after_a_warm_up_is_t5x_s_normalized_rsqrt_decay() -> None:
    """T5X's factors 'constant * rsqrt_normalized_decay': sqrt(W) / sqrt(max(step, W))."""
    found = rates("inverse_sqrt", warmup_steps=16)
    expected = [PEAK * math.sqrt(16) / math.sqrt(max(step, 16)) for step in range(16, 101)]
    np.testing.assert_allclose(found[16:], expected, rtol=1e-5)
    # whatever the length of the run: it can be prolonged
    np.testing.assert_array_equal(found, rates("inverse_sqrt", 1000, warmup_steps=16)[:101])


def test_inverse_sqrt_holds_the_peak_between_the_warm_up_and_its_decay() -> None:
    found = rates("inverse_sqrt", warmup_steps=10, decay_from=25)
    np.testing.assert_allclose(found[9:26], PEAK, rtol=1e-6)
    assert found[100] == pytest.approx(PEAK / 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "adam"}, r"optimizer 'adam' is not known; did you mean 'adamw'\?"),
        ({"schedule": "cosin"}, r"schedule 'cosin' is not known; did you mean 'cosine'\?"),
        ({"learning_rate": 0.0}, "learning_rate=0.0 must be above 0"),
        ({"learning_rate": math.nan}, "learning_rate=nan must be above 0"),
        ({"warmup_steps": -1}, "warmup_steps=-1 must be at least 0"),
        ({"b2": 1.5}, "b2=1.5 must be from 0 to below 1"),
        ({"final_fraction": -0.1}, "final_fraction=-0.1 must lie between 0 and 1"),
        ({"clip_norm": 0.0}, "clip_norm=0.0 must be above 0, or None"),
        ({"clip_norm": math.nan}, "clip_norm=nan must be above 0, or None"),
        ({"weight_decay": -0.1}, "optimizer.weight_decay=-0.1 must be at least 0"),
        ({"weight_decay": math.nan}, "optimizer.weight_decay=nan must be at least 0"),
        ({"eps": -1e-8}, "optimizer.eps=-1e-08 must be above 0, such as 1e-8"),
        ({"eps": 0.0}, "optimizer.eps=0.0 must be above 0"),
        ({"eps": math.nan}, "optimizer.eps=nan must be above 0"),
        ({"b1": math.nan}, "b1=nan must be from 0 to below 1"),
        ({"decay_fraction": math.nan}, "decay_fraction=nan must lie between 0 and 1"),
        ({"decay_from": 10}, "decay_from=10 belongs to --optimizer.schedule inverse_sqrt"),
        (
            {"schedule": "inverse_sqrt", "warmup_steps": 20, "decay_from": 10},
            "decay_from=10 must be at least 20",
        ),
        ({"schedule": "inverse_sqrt", "decay_from": 0}, "decay_from=0 must be at least 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(MeshwrightError, match=words):
        OptimizerConfig(**change)


def test_matrices_decay_and_norms_and_biases_do_not() -> None:
    config = dataclasses.replace(preset("tiny"), qkv_bias=True, output_bias=True, qk_norm=True)
    arrays = abstract_arrays(config)
    by_name = {
        path.split("/")[-1]: spec.is_matrix
        for path, spec in zip(tree_paths(arrays), jax.tree.leaves(arrays), strict=True)
    }
    matrices = {"embedding", "output", "wq", "wk", "wv", "wo", "gate", "up", "down"}
    assert {name for name, decayed in by_name.items() if decayed} == matrices
    assert {"norm", "bq", "bk", "bv", "bo", "q_norm", "k_norm"} == by_name.keys() - matrices


ARRAYS = {
    "embedding": ArraySpec((24, 128), "vocab embed", inputs=1),
    "layers": {
        "norm": ArraySpec((3, 128), "layers norm"),
        "up": ArraySpec((3, 128, 160), "layers embed mlp", inputs=1),
        "down": ArraySpec((3, 160, 128), "layers mlp embed", inputs=1),
        "wq": ArraySpec((3, 128, 4, 32), "layers embed heads head_dim", inputs=1),
        "wo": ArraySpec((3, 4, 32, 128), "layers heads head_dim embed", inputs=2),
    },
}


def values(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    # layers of very different sizes: what mixes them is seen
    sizes = np.array([1.0, 30.0, 0.01], "f")

    def one(spec: ArraySpec) -> jax.Array:
        drawn = rng.normal(size=spec.shape).astype("f")
        if spec.dims[0] == "layers":
            drawn *= sizes.reshape(-1, *(1,) * (spec.ndim - 1))
        return jnp.asarray(drawn)

    return jax.tree.map(one, ARRAYS)


def steps_of(tx: optax.GradientTransformation, params: Any, gradients: list[Any]) -> Any:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        update = jax.jit(tx.update)
        state = jax.jit(tx.init)(params)
        for gradient in gradients:
            updates, state = update(gradient, state, params)
            params = optax.apply_updates(params, updates)
    return params


def unstacked(tree: Any, matrices: bool = False) -> Any:
    """Every layer an array of its own; `matrices`: heads and head_dim as one dim, too."""

    def one(name: str, x: jax.Array) -> jax.Array:
        if matrices and name in ("wq", "wo"):
            return x.reshape((128, 128))
        return x

    layers = [{name: one(name, x[i]) for name, x in tree["layers"].items()} for i in range(3)]
    return {"embedding": tree["embedding"], "layers": layers}


def same(stacked: Any, separate: Any) -> None:
    for i, layer in enumerate(separate["layers"]):
        for name, expected in layer.items():
            found = stacked["layers"][name][i].reshape(expected.shape)
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(stacked["embedding"], separate["embedding"], rtol=1e-4, atol=1e-6)


def config_of(name: str) -> OptimizerConfig:
    return OptimizerConfig(name, learning_rate=0.01, warmup_steps=0, schedule="constant")


def test_adafactor_treats_each_layer_by_itself() -> None:
    tx, _ = make_optimizer(config_of("adafactor"), 10, ARRAYS)
    params, gradients = values(0), [values(1), values(2)]
    mask = unstacked(jax.tree.map(lambda s: jnp.full(3, s.is_matrix), ARRAYS))
    mask = jax.tree.map(bool, {**mask, "embedding": True})
    plain = optax.chain(
        optax.scale_by_factored_rms(),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_param_block_rms(),
        optax.add_decayed_weights(0.1, mask),
        optax.scale_by_learning_rate(0.01),
    )
    separate = steps_of(plain, unstacked(params), [unstacked(g) for g in gradients])
    same(steps_of(tx, params, gradients), separate)


def test_adafactor_keeps_no_whole_moment_of_a_layers_matrix() -> None:
    tx, _ = make_optimizer(config_of("adafactor"), 10, ARRAYS)
    state = jax.eval_shape(tx.init, values(0))
    shapes = {leaf.shape for leaf in jax.tree.leaves(state)}
    assert {(3, 128), (3, 160)} < shapes
    assert not shapes & {(3, 128, 160), (3, 160, 128)}


def test_muon_makes_each_layers_matrix_orthogonal_by_itself() -> None:
    tx, _ = make_optimizer(config_of("muon"), 10, ARRAYS)
    params, gradients = values(0), [values(1), values(2)]
    is_matrix = lambda tree: {  # noqa: E731
        "embedding": None,
        "layers": [
            {n: optax.contrib.MuonDimensionNumbers() if x.ndim == 2 else None for n, x in layer.items()}
            for layer in tree["layers"]
        ],
    }  # fmt: skip
    separate_params = unstacked(params, matrices=True)
    plain = optax.contrib.muon(
        0.01, weight_decay=0.1, adam_b1=0.9, adam_b2=0.95, consistent_rms=0.2,
        weight_decay_mask=jax.tree.map(lambda x: x.ndim == 2, separate_params),
        muon_weight_dimension_numbers=is_matrix(separate_params),
    )  # fmt: skip
    separate = steps_of(plain, separate_params, [unstacked(g, matrices=True) for g in gradients])
    same(steps_of(tx, params, gradients), separate)


@pytest.mark.slow
def test_muons_update_of_a_layer_has_equal_singular_values() -> None:
    config = dataclasses.replace(config_of("muon"), weight_decay=0.0)
    tx, _ = make_optimizer(config, 10, ARRAYS)
    zeros = jax.tree.map(jnp.zeros_like, values(0))
    moved = steps_of(tx, zeros, [values(1)])["layers"]
    for name in ("up", "down", "wq", "wo"):
        for layer in np.asarray(moved[name]).reshape(3, -1, moved[name].shape[-1]):
            matrix = layer.reshape(128, -1) if name in ("up", "wq") else layer.reshape(-1, 128)
            singular = np.linalg.svd(matrix, compute_uv=False)
            assert singular.max() < 2 * np.median(singular), name
            # as large as an update of Adam's, times 0.2
            assert np.sqrt((matrix**2).mean()) == pytest.approx(0.01 * 0.2, rel=0.3), name


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_adamw_and_lion_are_optaxs_with_our_mask(name: str) -> None:
    """Elementwise, so stacking changes nothing; by hand for one array, decayed and not."""
    tx, _ = make_optimizer(config_of(name), 10, ARRAYS)
    params, (first, second) = values(0), (values(1), values(2))
    moved = steps_of(tx, params, [first, second])
    for path, decay in ((("layers", "up"), 0.1), (("layers", "norm"), 0.0)):
        w, g1, g2 = (np.asarray(t[path[0]][path[1]], "f8") for t in (params, first, second))
        if name == "adamw":
            m, v = 0.1 * g1, 0.05 * g1**2
            w = w - 0.01 * (m / 0.1 / (np.sqrt(v / 0.05) + 1e-8) + decay * w)
            m, v = 0.9 * m + 0.1 * g2, 0.95 * v + 0.05 * g2**2
            w = w - 0.01 * (m / (1 - 0.9**2) / (np.sqrt(v / (1 - 0.95**2)) + 1e-8) + decay * w)
        else:
            w = w - 0.01 * (np.sign(g1) + decay * w)
            w = w - 0.01 * (np.sign(0.9 * 0.05 * g1 + 0.1 * g2) + decay * w)
        np.testing.assert_allclose(moved[path[0]][path[1]], w, rtol=1e-4, atol=1e-6)
