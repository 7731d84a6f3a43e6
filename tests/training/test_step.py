"""One step: the gradient of the mean loss, clipped, applied once, or left out when not finite."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.training.toy import CONFIG, ONE, Parts, Setting, packed_batch, parts

from meshwright.models import Compute, loss
from meshwright.models.decoder import REMAT, decoder_rules, logits
from meshwright.ops import tie_gradients
from meshwright.training import step
from meshwright.training.state import new_state

slow = pytest.mark.slow
MESH = "dp=2,fsdp=2,tp=2,sp=1"
DESCENT = optax.sgd(1.0)  # the parameters then move by the gradient


def plain_loss(params: Any, batch: Any, z_loss: float) -> tuple[jax.Array, jax.Array]:
    """Mean over the counted tokens, from all logits at once: total and entropy."""
    rows = {name: x.reshape(-1, x.shape[-1]) for name, x in batch.items()}
    out = logits(params, rows, CONFIG, Compute(decoder_rules()))
    counts = rows["targets"] >= 0
    at = jnp.maximum(rows["targets"], 0)[..., None]
    entropy = -jnp.take_along_axis(jax.nn.log_softmax(out), at, -1)[..., 0]
    z = z_loss * jax.nn.logsumexp(out, axis=-1) ** 2
    weights = counts.astype(jnp.float32)
    means = [jnp.vdot(x, weights) / jnp.sum(weights) for x in (entropy + z, entropy)]
    return means[0], means[1]


@functools.cache
def by_hand(seed: int = 0, z_loss: float = 1e-3) -> tuple[float, float, Any, Any]:
    """Total loss, entropy, first parameters and gradient, on one device."""
    run = parts(Setting())
    params = run.new_state().params
    with jax.set_mesh(run.mesh):
        value_and_gradient = jax.jit(jax.value_and_grad(plain_loss, has_aux=True), static_argnums=2)
        (total, entropy), gradient = value_and_gradient(params, packed_batch(seed), z_loss)
    as_numpy = functools.partial(jax.tree.map, lambda x: np.asarray(x, "f8"))
    return float(total), float(entropy), as_numpy(params), as_numpy(gradient)


def global_norm(tree: Any) -> float:
    return float(np.sqrt(sum((np.asarray(x, "f8") ** 2).sum() for x in jax.tree.leaves(tree))))


def close(found: Any, expected: Any, within: float) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(np.asarray(a, "f8") - b) <= within * np.linalg.norm(b)


def descend(
    setting: Setting, clip_norm: float | None, batch: dict[str, np.ndarray] | None = None
) -> tuple[Any, Any, Any]:
    """The report of a step of plain descent, and the parameters before and after."""
    run = parts(setting, DESCENT, clip_norm)
    state = run.new_state()
    before = jax.tree.map(np.asarray, state.params)
    state, report = run.functions.train(state, run.put(packed_batch(0) if batch is None else batch))
    return report, before, jax.tree.map(np.asarray, state.params)


@pytest.mark.parametrize("mesh", [MESH, pytest.param(ONE, marks=slow)])
def test_a_step_moves_along_the_gradient_of_the_mean_loss(mesh: str) -> None:
    total, entropy, _, gradient = by_hand()
    report, before, after = descend(Setting(mesh), clip_norm=None)
    assert float(report["total_loss"]) == pytest.approx(total, rel=1e-6)
    assert float(report["loss"]) == pytest.approx(entropy, rel=1e-6)
    assert float(report["gradient_norm"]) == pytest.approx(global_norm(gradient), rel=1e-5)
    assert int(report["tokens"]) == (packed_batch(0)["targets"] >= 0).sum()
    # a difference of float32 numbers: norms of 1 leave 1e-7 of a gradient of 1e-3
    close(jax.tree.map(lambda a, b: a - b, before, after), gradient, 2e-4)


def test_gradients_are_clipped_to_the_global_norm_and_the_report_is_not() -> None:
    _, _, _, gradient = by_hand()
    norm = global_norm(gradient)
    report, before, after = descend(Setting(), clip_norm=norm / 7)
    assert float(report["gradient_norm"]) == pytest.approx(norm, rel=1e-5)
    moved = jax.tree.map(lambda a, b: a - b, before, after)
    assert global_norm(moved) == pytest.approx(norm / 7, rel=1e-4)
    close(jax.tree.map(lambda x: 7 * x, moved), gradient, 5e-3)


@slow
def test_gradients_below_the_limit_are_left_alone() -> None:
    _, _, _, gradient = by_hand()
    _, before, after = descend(Setting(), clip_norm=2 * global_norm(gradient))
    close(jax.tree.map(lambda a, b: a - b, before, after), gradient, 2e-4)


@pytest.mark.parametrize(
    "setting",
    [
        *(pytest.param(Setting(remat=name), marks=slow, id=name) for name in REMAT),
        pytest.param(Setting(scan=False), marks=slow, id="unrolled"),
        pytest.param(Setting(remat="full", scan=False), marks=slow, id="full, unrolled"),
    ],
)
def test_how_it_is_computed_does_not_change_the_gradient(setting: Setting) -> None:
    total, _, params, gradient = by_hand()
    report, before, after = descend(setting, clip_norm=None)
    assert float(report["total_loss"]) == pytest.approx(total, rel=1e-6)
    close(before, params, 0)
    close(jax.tree.map(lambda a, b: a - b, before, after), gradient, 2e-4)


@pytest.mark.parametrize("micro_batches", [1, pytest.param(4, marks=slow)])
def test_micro_batches_weigh_by_their_tokens_not_alike(micro_batches: int) -> None:
    """Cut in another way, the same sequences give the same step; their counts differ."""
    total, _, _, gradient = by_hand()
    batch = {n: x.reshape(micro_batches, -1, x.shape[-1]) for n, x in packed_batch(0).items()}
    counts = (batch["targets"] >= 0).sum((1, 2))
    assert len(set(counts)) == micro_batches
    report, before, after = descend(Setting(), None, batch)
    assert float(report["total_loss"]) == pytest.approx(total, rel=1e-6)
    close(jax.tree.map(lambda a, b: a - b, before, after), gradient, 2e-4)


def test_evaluation_is_the_summed_entropy_by_hand() -> None:
    _, entropy, _, _ = by_hand()
    run = parts(Setting(MESH))
    batch = packed_batch(0)
    found = run.functions.evaluate(run.new_state().params, run.put(batch))["loss"]
    assert int(found.count) == (batch["targets"] >= 0).sum()
    assert float(found.sum) / int(found.count) == pytest.approx(entropy, rel=1e-6)


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("mesh", [MESH, pytest.param(ONE, marks=slow)])
def test_a_step_that_is_not_finite_is_left_out_and_counted(mesh: str) -> None:
    """Token 63 has a row of NaN: batches with it are bad, others good."""
    run = parts(Setting(mesh))
    good, bad = (packed_batch(seed, vocab=63) for seed in (0, 1))
    bad["tokens"][1, 5, 3] = 63

    def poisoned() -> Any:
        state = run.new_state()
        table = np.asarray(state.params["embedding"]).copy()
        table[63] = np.nan
        table = jax.device_put(table, state.params["embedding"].sharding)
        return dataclasses.replace(state, params={**state.params, "embedding": table})

    def step(state: Any, batch: dict[str, np.ndarray]) -> tuple[Any, Any]:
        return run.functions.train(state, run.put(batch))

    state, report = step(poisoned(), good)
    assert np.isfinite(report["loss"])
    assert [int(x) for x in (state.step, state.skipped, state.skipped_in_a_row)] == [1, 0, 0]
    first_rate = float(report["learning_rate"])
    kept = bits((state.params, state.optimizer))
    for count in (1, 2):
        state, report = step(state, bad)
        assert not np.isfinite(report["total_loss"])
        assert bits((state.params, state.optimizer)) == kept
        numbers = (state.step, state.skipped, state.skipped_in_a_row)
        assert [int(x) for x in numbers] == [1 + count, count, count]
        assert int(report["skipped"]) == int(report["skipped_in_a_row"]) == count
    state, report = step(state, good)
    numbers = (state.step, state.skipped, state.skipped_in_a_row)
    assert [int(x) for x in numbers] == [4, 2, 0]
    assert bits(state.params) != kept[: len(bits(state.params))]
    # the schedule counts what was done: this is its second step
    assert float(report["learning_rate"]) == pytest.approx(2 * first_rate)


@slow
def test_the_reported_learning_rate_is_the_one_applied() -> None:
    """Lion moves every weight by exactly the learning rate: its sign, and the decay."""
    run = parts(Setting(optimizer="lion"))
    state = run.new_state()
    norms = [np.asarray(state.params["norm"])]  # not decayed
    rates = []
    for seed in range(3):
        state, report = run.functions.train(state, run.put(packed_batch(seed)))
        norms.append(np.asarray(state.params["norm"]))
        rates.append(float(report["learning_rate"]))
    assert len(set(rates)) == 3
    for rate, before, after in zip(rates, norms, norms[1:], strict=False):
        np.testing.assert_allclose(np.abs(after - before), rate, rtol=1e-2)  # beside a 1


def losses(run: Parts, steps: int) -> list[float]:
    state = run.new_state()
    found = []
    for seed in range(steps):
        state, report = run.functions.train(state, run.put(packed_batch(seed)))
        found.append(float(report["loss"]))
    assert int(state.skipped) == 0
    return found


@functools.cache
def in_float32() -> list[float]:
    return losses(parts(Setting(MESH)), 10)


@slow
def test_bfloat16_compute_with_float32_weights_follows_float32() -> None:
    run = parts(Setting(MESH, dtype=jnp.bfloat16))
    assert {x.dtype for x in jax.tree.leaves(run.target.params)} == {jnp.dtype("float32")}
    found = losses(run, 10)
    np.testing.assert_allclose(found, in_float32(), rtol=5e-3)
    assert found != in_float32()  # it is another computation
    assert found[-1] < found[0] - 0.1


@pytest.mark.slow
def test_weights_in_bfloat16_too_follow_float32_roughly() -> None:
    run = parts(Setting(MESH, dtype=jnp.bfloat16, params_dtype=jnp.bfloat16))
    kinds = {x.dtype for x in jax.tree.leaves(run.target.params)}
    assert kinds == {jnp.dtype("bfloat16")}
    found = losses(run, 10)
    np.testing.assert_allclose(found, in_float32(), rtol=2e-2)
    assert found[-1] < found[0] - 0.1


def test_state_lies_where_its_description_says() -> None:
    run = parts(Setting("dp=1,fsdp=4,tp=2,sp=1"))
    state = new_state(run.arrays, run.target, run.optimizer, run.mesh)
    for made, described in zip(jax.tree.leaves(state), jax.tree.leaves(run.target), strict=True):
        assert (made.shape, made.dtype) == (described.shape, described.dtype)
        assert made.sharding == described.sharding
    gate = run.target.params["layers"]["mlp"]["gate"]
    assert gate.sharding.spec == jax.P(None, "fsdp", "tp")
    moments = [x for x in jax.tree.leaves(run.target.optimizer) if x.shape == gate.shape]
    assert {m.sharding for m in moments} == {gate.sharding}


@pytest.mark.parametrize(("mesh", "waits"), [(ONE, False), ("dp=1,fsdp=8,tp=1,sp=1", True)])
def test_the_backward_pass_waits_for_the_heads_gradient_where_that_is_summed_over_devices(
    mesh: str, waits: bool
) -> None:
    """XLA for GPUs would else put it off, and keep what it is made of."""
    run = parts(Setting(mesh))
    rows, length, embed = 8, 16, CONFIG.embed
    one = jax.ShapeDtypeStruct((1, rows, length), jnp.int32, sharding=run.functions.batch_sharding)
    batch = dict.fromkeys(("tokens", "targets", "segments", "positions"), one)
    text = run.functions.train.lower(run.target, batch).as_text()
    gradients = f"tensor<{rows}x{length}x{embed}xf32>, tensor<{embed}x{CONFIG.vocab}xf32>"
    assert (re.search(rf"optimization_barrier .* : {gradients}$", text, re.M) is not None) is waits


@pytest.mark.parametrize(
    ("mesh", "tied", "waits"),
    [
        ("dp=1,fsdp=4,tp=1,sp=2", False, True),
        ("dp=1,fsdp=8,tp=1,sp=1", True, True),
        ("dp=1,fsdp=8,tp=1,sp=1", False, False),
    ],
)
def test_on_tpus_layers_wait_for_the_heads_gradient_if_it_is_tied_or_sequences_are_split(
    monkeypatch: pytest.MonkeyPatch, mesh: str, tied: bool, waits: bool
) -> None:
    calls = []

    def seen(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        calls.append(weight.shape)
        return tie_gradients(x, weight)

    monkeypatch.setattr(loss, "tie_gradients", seen)
    monkeypatch.setattr(loss, "current_platform", lambda: "tpu")
    model = dataclasses.replace(CONFIG, tied_embeddings=tied)
    run = parts(Setting(mesh, config=model))
    run.functions.train.lower(run.target, run.put(packed_batch(0)))
    assert bool(calls) == waits


EXPERTS = dataclasses.replace(CONFIG, experts=4, experts_per_token=2)


@pytest.mark.parametrize(
    ("mesh", "setting", "held"),
    [(ONE, {}, False), (ONE, {"matmul": "fp8"}, True), ("dp=1,fsdp=2,tp=1,sp=1", {}, True)],
)
def test_the_backward_pass_copies_no_weights_that_are_used_as_they_are(
    mesh: str, setting: dict[str, Any], held: bool
) -> None:
    """Those that are all-gathered or converted are held apart: XLA would keep the results."""
    run = parts(Setting(mesh, config=EXPERTS, scan=False, remat="full", **setting))
    text = run.functions.train.lower(run.target, run.put(packed_batch(0))).as_text()
    barriers = "\n".join(re.findall(r"optimization_barrier .* : (.*)$", text, re.M))
    stored = EXPERTS.mlp if mesh == ONE else EXPERTS.mlp // 2
    assert barriers  # of the layers' inputs
    assert (re.search(rf"tensor<4x64x({EXPERTS.mlp}|{stored})xf", barriers) is not None) is held


@pytest.mark.slow
def test_the_norm_of_gradients_written_by_layer_is_that_of_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def report(platform: str) -> tuple[Any, str]:
        monkeypatch.setattr(step, "current_platform", lambda: platform)
        alignment = 128 if platform == "gpu" else 1  # as of our kernel for experts
        monkeypatch.setattr(step, "group_alignment", lambda *_: (alignment, ""))
        run = parts(Setting(config=EXPERTS, scan=False), clip_norm=0.1)
        state, batch = run.new_state(), run.put(packed_batch(0))
        text = run.functions.train.lower(run.target, batch).as_text()
        state, metrics = run.functions.train(state, batch)
        return (metrics["gradient_norm"], state.params), text

    (norm, params), _ = report("cpu")
    (by_layer, same_params), text = report("gpu")
    np.testing.assert_allclose(by_layer, norm, rtol=1e-6)
    for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(same_params), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    stacked = f"tensor<{EXPERTS.layers}x4x{EXPERTS.mlp}x{EXPERTS.embed}xf32>"
    barriers = re.findall(r"optimization_barrier .* : (.*)$", text, re.M)
    assert barriers
    assert not any(stacked in types for types in barriers)
