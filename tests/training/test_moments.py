"""Moments kept in fewer bits: the codes' error, and runs against moments in float32."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.training import toy

from meshwright.checkpoint import Checkpoints, read_record
from meshwright.errors import MeshwrightError
from meshwright.training.config import TrainConfig, config_to_dict
from meshwright.training.exchange import load_pieces, save_pieces
from meshwright.training.moments import ALONE, IN_ROOTS, SECOND, FloatCode, stored_moments, unpack
from meshwright.training.optimizer import OptimizerConfig
from meshwright.training.resume import check_saved
from meshwright.training.state import TrainState, stored_state

CODES = {"second": SECOND, "first, in roots": IN_ROOTS, "first, alone": ALONE}
# from one code to the next, as the module's table says
GAPS = {"second": 0.25, "first, in roots": 0.0625, "first, alone": 0.25}


@pytest.mark.parametrize("name", CODES)
def test_every_code_is_the_code_of_its_number(name: str) -> None:
    code = CODES[name]
    least = 0 if code.dtype == jnp.uint8 else -code.codes
    every = jnp.arange(least, code.codes + 1).astype(code.dtype)
    numbers = code.decode(every)
    assert np.all(np.diff(numbers) > 0)
    for random in (0, 2**15, 2**16 - 1):
        np.testing.assert_array_equal(code.encode(numbers, jnp.uint32(random)), every)
    above = numbers[numbers > 0]
    assert (code.lowest, code.largest) == (above[0], above[-1])


def test_ranges_are_those_of_the_table() -> None:
    ranges = {name: (code.lowest, code.largest) for name, code in CODES.items()}
    assert ranges == {
        "second": (2.0**-60 * 1.25, 2.0**4 * 0.875),
        "first, in roots": (2.0**-5 * 1.0625, 2.0**3 * 0.96875),
        "first, alone": (2.0**-30 * 1.25, 2.0**2 * 0.875),
    }


@pytest.mark.parametrize("name", CODES)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_the_error_of_a_code_is_at_most_the_gap_to_the_next(name: str, data: Any) -> None:
    code = CODES[name]
    x = data.draw(st.floats(code.lowest / 16, code.largest, width=32))
    x *= data.draw(st.sampled_from([1, -1] if code.dtype == jnp.int8 else [1]))
    random = data.draw(st.integers(0, 2**16 - 1))
    found = float(code.decode(code.encode(jnp.float32(x), jnp.uint32(random))))
    assert abs(found - x) <= max(GAPS[name] * abs(x), code.lowest)


@pytest.mark.parametrize("name", CODES)
def test_the_mean_over_random_bits_is_the_number(name: str) -> None:
    code = CODES[name]
    x = jnp.exp2(jnp.linspace(np.log2(code.lowest) - 2, np.log2(code.largest), 500))
    random = jnp.arange(8, 2**16, 16, dtype=jnp.uint32)
    mean = code.decode(code.encode(x[:, None], random[None])).mean(1)
    np.testing.assert_allclose(mean, x, rtol=1e-4, atol=code.lowest / 4096)


@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_zero_stays_and_what_is_too_large_is_the_largest(code: FloatCode) -> None:
    assert code.decode(code.encode(jnp.float32(0), jnp.uint32(0))) == 0
    assert code.decode(code.encode(jnp.float32(1e30), jnp.uint32(60000))) == code.largest


# ---- one moment over many steps


@pytest.mark.parametrize("kept_as", ["bfloat16", "int8"])
def test_a_second_moment_follows_slow_changes(kept_as: Any) -> None:
    # with b2 0.999 it changes by less than half of what the next number of bfloat16 is away
    steps, b2 = 3000, 0.999
    adam = stored_moments(optax.scale_by_adam(b2=b2), kept_as)
    nearest = optax.scale_by_adam(b2=b2)

    @jax.jit
    def run() -> Any:
        def step(carry: Any, number: jax.Array) -> Any:
            gradient = jnp.where(number < 100, 1.0, 0.1) * jnp.ones(2048)
            kept, rounded = carry
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                kept = adam.update(gradient, kept)[1]
                rounded = nearest.update(gradient, rounded)[1]
            rounded = rounded._replace(nu=rounded.nu.astype(jnp.bfloat16).astype(jnp.float32))
            return (kept, rounded), None

        start = adam.init(jnp.zeros(2048)), nearest.init(jnp.zeros(2048))
        return jax.lax.scan(step, start, jnp.arange(steps))[0]

    kept, rounded = run()
    exact = 0.01 * (1 - b2 ** (steps - 100)) + b2 ** (steps - 100) * (1 - b2**100)
    assert float(unpack(kept).nu.mean()) == pytest.approx(exact, rel=0.02)
    assert float(rounded.nu.mean()) > 3 * exact  # rounded to the nearest it stays where it was


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**31), octave=st.integers(-40, 10))
def test_no_update_is_larger_than_eight_learning_rates(seed: int, octave: int) -> None:
    adam = stored_moments(optax.scale_by_adam(0.9, 0.999), "int8")
    random = np.random.default_rng(seed)
    spread = np.exp2(random.uniform(-20, 0, (3, 256)) + octave)
    gradients = jnp.asarray(spread * random.choice([-1, 0, 1], (3, 256)), jnp.float32)
    state = adam.init(gradients[0])
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for gradient in gradients:
            updates, state = adam.update(gradient, state)
            assert float(jnp.abs(updates).max()) <= 8
    kept = unpack(state)
    bound = np.asarray(8 * jnp.sqrt(kept.nu)) * 1.001
    assert np.all(np.abs(np.asarray(kept.mu)) <= bound)


# ---- whole runs

EIGHT = "dp=2,fsdp=2,tp=2,sp=1"
STEPS = 50
SOME = 15  # where fewer show it


@functools.cache
def run_parts(moments: str, mesh: str = toy.ONE) -> toy.Parts:
    return toy.parts(toy.Setting(mesh=mesh, moments=moments, steps=STEPS))


def train(parts: toy.Parts, state: TrainState, steps: range) -> tuple[TrainState, list[float]]:
    losses = []
    for step in steps:
        state, report = parts.functions.train(state, parts.put(toy.packed_batch(step)))
        losses.append(float(report["loss"]))
    return state, losses


@functools.cache
def losses(moments: str, mesh: str = toy.ONE) -> np.ndarray:
    parts = run_parts(moments, mesh)
    return np.array(train(parts, parts.new_state(), range(STEPS))[1])


# of the loss, at any of the steps; measured: see docs/decisions.md
ERRORS = {"bfloat16": 0.002, "int8": 0.02}


@pytest.mark.parametrize("moments", [pytest.param("bfloat16", marks=pytest.mark.slow), "int8"])
def test_losses_are_near_those_with_moments_in_float32(moments: str) -> None:
    usual = losses("auto")
    assert usual[-5:].mean() < 0.8 * usual[:5].mean()  # something was learned
    np.testing.assert_allclose(losses(moments), usual, rtol=ERRORS[moments], atol=0)


def test_moments_in_float32_are_the_usual_ones() -> None:
    def program(moments: str) -> str:
        parts = run_parts(moments)
        return str(
            parts.functions.train.lower(parts.target, parts.put(toy.packed_batch(0))).as_text()
        )

    assert program("float32") == program("auto")
    assert program("bfloat16") != program("auto")


@pytest.mark.parametrize("moments", [pytest.param("bfloat16", marks=pytest.mark.slow), "int8"])
def test_eight_devices_train_as_one(moments: str) -> None:
    eight = run_parts(moments, EIGHT)
    _, found = train(eight, eight.new_state(), range(SOME))
    np.testing.assert_allclose(found, losses(moments)[:SOME], rtol=2e-3)


@pytest.mark.parametrize(
    ("moments", "dtypes"), [("bfloat16", ("bfloat16", "bfloat16")), ("int8", ("int8", "uint8"))]
)
def test_moments_lie_with_their_parameters(moments: str, dtypes: tuple[str, str]) -> None:
    target = run_parts(moments, EIGHT).target
    adam = target.optimizer[0]
    for moment, dtype in zip((adam.mu, adam.nu), dtypes, strict=True):
        pairs = zip(jax.tree.leaves(moment), jax.tree.leaves(target.params), strict=True)
        for kept, param in pairs:
            assert (kept.shape, kept.sharding) == (param.shape, param.sharding)
            assert kept.dtype == dtype


@pytest.mark.parametrize("moments", [pytest.param("bfloat16", marks=pytest.mark.slow), "int8"])
def test_a_checkpoint_resumes_on_another_mesh(moments: str, tmp_path: Path) -> None:
    one, eight = run_parts(moments), run_parts(moments, EIGHT)
    state, _ = train(one, one.new_state(), range(STEPS // 2))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(int(state.step), state, {}, wait=True)
        stored = stored_state(eight.arrays, eight.target, eight.optimizer)
        restored = checkpoints.restore(STEPS // 2, stored)
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
        np.testing.assert_array_equal(old, new)
    further = range(STEPS // 2, STEPS // 2 + SOME)
    _, found = train(eight, restored, further)
    np.testing.assert_allclose(found, losses(moments)[further.start : further.stop], rtol=2e-3)


def test_moments_go_to_pytorch_as_numbers_and_come_back_as_codes(tmp_path: Path) -> None:
    eight = run_parts("int8", EIGHT)
    state, _ = train(eight, eight.new_state(), range(5))
    before = jax.tree.map(np.asarray, unpack(state.optimizer[0]))
    save_pieces(tmp_path, state, toy.CONFIG)
    dtypes = {array.dtype for array in read_record(tmp_path / "step-00000005").arrays.values()}
    assert dtypes == {"float32"}
    loaded, _ = load_pieces(tmp_path, 5, eight.target, toy.CONFIG)
    found = loaded.optimizer[0]
    assert all(leaf.dtype == jnp.int8 for leaf in jax.tree.leaves(found.mu))
    assert int(found.count) == 5
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(unpack(found)), strict=True):
        # what rounding puts beside its code may become the next one
        assert np.mean(~np.isclose(new, old, rtol=1e-4, atol=0)) < 1e-3


# ---- settings


def test_a_run_that_kept_its_moments_otherwise_is_not_resumed() -> None:
    def settings_of(moments: Any) -> dict[str, Any]:
        return config_to_dict(TrainConfig("tiny", optimizer=OptimizerConfig(moments=moments)))

    check_saved(settings_of("float32"), settings_of("auto"), "step 2")  # the same numbers
    with pytest.raises(
        MeshwrightError,
        match=r"^step 2 was trained with optimizer\.moments int8, now it is float32: what is saved "
        r"does not fit\. Give --optimizer\.moments int8 again, or --run another folder$",
    ):
        check_saved(settings_of("auto"), settings_of("int8"), "step 2")


def test_settings_that_do_not_apply_are_refused() -> None:
    with pytest.raises(MeshwrightError, match=r"not of adafactor, .* leave it out"):
        OptimizerConfig("adafactor", moments="int8")
    with pytest.raises(MeshwrightError, match=r"too coarse for muon.*give bfloat16"):
        OptimizerConfig("muon", moments="int8")
    with pytest.raises(MeshwrightError, match="moments 'int4' is not known; did you mean 'int8'"):
        OptimizerConfig(moments="int4")  # type: ignore[arg-type]
