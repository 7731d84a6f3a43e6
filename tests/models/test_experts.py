"""Mixtures of experts: the choice, the experts of other devices, the losses of routers."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax._src.lax.parallel import ragged_all_to_all_p
from jax.interpreters import mlir
from tests.models.tiny_architectures import save
from tests.training import toy

import meshwright as mw
from meshwright import MeshwrightError
from meshwright.models import Compute, LossConfig, from_hf_config, load_hf, model_config
from meshwright.models.decoder import DecoderConfig, abstract_arrays, decoder_rules, experts
from meshwright.models.decoder.experts import RouterSums, choose, mixture, with_router_losses
from meshwright.models.decoder.kinds import ExpertsKind, MlpKind
from meshwright.models.loss import LossSums
from meshwright.ops import (
    Mlp,
    Rows,
    exchange_by_bytes,
    expert_capacity,
    grouped_matmul,
    over_capacity,
    rows_per_token,
)
from meshwright.ops import experts as exchanges
from meshwright.ops.experts import _through_own
from meshwright.training import TrainConfig, abstract_step
from meshwright.training.compute import exchange_text
from meshwright.training.config import ComputeConfig
from meshwright.training.setup import check_sizes, choose_rules, training_mesh
from meshwright.training.state import new_state

CONFIG = DecoderConfig(
    48, 2, 32, heads=4, kv_heads=2, head_dim=8, mlp=24, max_seq=64, experts=8, experts_per_token=2,
    router_bias=True, mlp_bias=True, shared_mlp=16,
)  # fmt: skip


def trained(mesh: str, **settings: Any) -> tuple[np.ndarray, Any]:
    """Losses and gradient norms of three steps of SGD, and the sum of their gradients."""
    has_ep = "ep=" in mesh
    rules = decoder_rules(
        sp=True, ep=has_ep, sequence_parallel=settings.pop("sequence_parallel", False)
    )
    setting = toy.Setting(mesh=mesh, config=CONFIG, steps=3, rules=rules, **settings)
    reports, weights = toy.train(setting, optax.sgd(1.0))
    first = toy.first_params(CONFIG, setting.params_dtype)
    return reports, jax.tree.map(np.subtract, first, weights)


def close(found: tuple[np.ndarray, Any], right: tuple[np.ndarray, Any]) -> None:
    np.testing.assert_allclose(found[0], right[0], rtol=1e-5)
    for one, other in zip(jax.tree.leaves(found[1]), jax.tree.leaves(right[1]), strict=True):
        rounding = 3 * 2.0**-23  # of weights near 1, in three steps
        atol = 1e-5 * np.abs(other).max() + rounding
        np.testing.assert_allclose(one, other, rtol=0, atol=atol)


@pytest.fixture(scope="module")
def alone() -> tuple[np.ndarray, Any]:
    return trained(toy.ONE)


@pytest.fixture
def exchange(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How tokens reach experts; "ragged": by the all-to-all of accelerators, which CPUs lack."""
    name: str = request.param
    if name == "ragged":
        emulate_ragged_all_to_all()
        monkeypatch.setattr(exchanges, "current_platform", lambda: "cuda")
        return "all-to-all"
    return name


@functools.cache
def emulate_ragged_all_to_all() -> None:
    """Give CPUs the primitive, as its documentation says; its gradients are jax's own rules."""

    def emulate(
        operand: jax.Array, output: jax.Array, starts: jax.Array, sizes: jax.Array, there: jax.Array,
        _: jax.Array, *, axis_name: Any, axis_index_groups: None,
    ) -> jax.Array:  # fmt: skip
        all_of = functools.partial(jax.lax.all_gather, axis_name=axis_name)
        operands, starts, sizes, there = (all_of(one) for one in (operand, starts, sizes, there))
        me = jax.lax.axis_index(axis_name)
        for device, rows in enumerate(operands):
            places = jnp.arange(output.shape[0]) - there[device, me]
            sent = (places >= 0) & (places < sizes[device, me])
            index = jnp.where(sent, starts[device, me] + places, 0)
            output = jnp.where(sent[:, None], rows[index], output)
        return output

    lowered = mlir.lower_fun(emulate, multiple_results=False)
    mlir.register_lowering(ragged_all_to_all_p, lowered, platform="cpu")


EXCHANGES = ["ring", "all-to-all", "ragged"]


@pytest.mark.parametrize("exchange", ["ring", "ragged"], indirect=True)
def test_losses_and_gradients_are_the_same_with_experts_of_other_devices(
    exchange: str, alone: Any
) -> None:
    close(trained("dp=1,fsdp=2,ep=2,tp=2,sp=1", experts=exchange), alone)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", EXCHANGES, indirect=True)
@pytest.mark.parametrize(
    "mesh",
    [
        "dp=1,fsdp=1,ep=8,tp=1,sp=1",
        "dp=1,fsdp=2,ep=4,tp=1,sp=1",
        "dp=2,fsdp=1,ep=4,tp=1,sp=1",
        "dp=1,fsdp=4,ep=2,tp=1,sp=1",
        "dp=1,fsdp=1,ep=4,tp=2,sp=1",
        "dp=1,fsdp=1,ep=4,tp=1,sp=2",
        "dp=2,fsdp=1,ep=2,tp=2,sp=1",
        "dp=1,fsdp=2,ep=2,tp=1,sp=2",
        "ep=2,dp=2,fsdp=2,tp=1,sp=1",
        "dp=1,fsdp=4,ep=1,tp=2,sp=1",
    ],
)
def test_losses_and_gradients_are_the_same_on_any_mesh(
    mesh: str, exchange: str, alone: Any
) -> None:
    close(trained(mesh, experts=exchange), alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"remat": "full"}, {"remat": "mlp"}, {"scan": False}, {"sequence_parallel": True}],
    ids=str,
)
def test_remat_unrolling_and_sequence_parallelism_change_nothing(
    settings: dict[str, Any], alone: Any
) -> None:
    close(trained("dp=1,fsdp=1,ep=2,tp=2,sp=1", **settings), alone)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["ring", "all-to-all"])
def test_a_step_in_fp8_on_eight_devices_is_that_of_one(exchange: str, alone: Any) -> None:
    """tests/ops/test_grouped.py compares products and gradients with an independent rounding."""
    (one, _), (found, _) = (
        trained(mesh, experts=exchange, matmul="fp8")
        for mesh in (toy.ONE, "dp=1,fsdp=2,ep=2,tp=2,sp=1")
    )
    np.testing.assert_allclose(found[0], one[0], rtol=1e-4)
    # later, a sum in another order may round a number of 8 bits the other way
    np.testing.assert_allclose(found, one, rtol=5e-3)
    assert np.abs(one[0] / alone[0][0] - 1).max() > 1e-4


def numpy_choice(logits: np.ndarray, kind: ExpertsKind, bias: np.ndarray) -> np.ndarray:
    """The weight of every expert for a token, 0 of those that are not chosen, one at a time."""
    weights = np.zeros_like(logits)
    for token, row in enumerate(logits):
        scores = 1 / (1 + np.exp(-row)) if kind.scores == "sigmoid" else np.exp(row - row.max())
        scores = scores if kind.scores == "sigmoid" else scores / scores.sum()
        ranked = scores + bias
        groups = ranked.reshape(kind.groups, -1)
        best = np.argsort([-np.sort(group)[-2:].sum() for group in groups])[: kind.groups_per_token]
        allowed = [
            expert for expert in range(len(row)) if expert // groups.shape[1] in best.tolist()
        ]
        chosen = sorted(allowed, key=lambda expert: -ranked[expert])[: kind.per_token]
        total = sum(scores[chosen]) if kind.normalized else 1
        weights[token, chosen] = scores[chosen] / total * kind.scale
    return weights


@pytest.mark.parametrize(
    "kind",
    [
        ExpertsKind(8, 2),
        ExpertsKind(8, 3, normalized=False),
        ExpertsKind(8, 2, scores="sigmoid", scale=2.5, selection_bias=True),
        ExpertsKind(16, 4, scores="sigmoid", groups=4, groups_per_token=2, selection_bias=True),
    ],
)
def test_the_choice_of_experts(kind: ExpertsKind) -> None:
    random = np.random.default_rng(0)
    logits = random.normal(0, 2, (50, kind.count)).astype(np.float32)
    bias = random.normal(0, 0.3, kind.count).astype(np.float32) * kind.selection_bias
    chosen, weights, _ = choose(jnp.asarray(logits), kind, jnp.asarray(bias))
    found = np.zeros_like(logits)
    np.put_along_axis(found, np.asarray(chosen), np.asarray(weights), axis=1)
    np.testing.assert_allclose(found, numpy_choice(logits, kind, bias), rtol=1e-5)


def test_the_balance_loss_is_that_of_transformers() -> None:
    torch = pytest.importorskip("torch")
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    logits = np.random.default_rng(1).normal(0, 1, (3, 40, 8)).astype(np.float32)
    kind, layers = ExpertsKind(8, 2), []
    for layer in logits:
        chosen, _, scores = choose(jnp.asarray(layer), kind)
        times = jnp.sum(jax.nn.one_hot(chosen, 8), axis=(0, 1))
        squares = jnp.sum(jax.nn.logsumexp(jnp.asarray(layer), axis=-1) ** 2)
        layers.append(RouterSums(times[None], jnp.sum(scores, 0)[None], squares[None]))
    sums = LossSums(jnp.float32(0), jnp.int32(40), {})
    extra = with_router_losses(sums, layers, 40, sums.count, LossConfig()).extra
    right = [
        float(mixtral.load_balancing_loss_func((torch.as_tensor(layer),), 8, 2)) for layer in logits
    ]
    assert float(extra["load_balance"].sum) / 40 == pytest.approx(np.mean(right), rel=1e-5)
    squared = torch.logsumexp(torch.as_tensor(logits), -1) ** 2
    assert float(extra["router_z"].sum) / 40 == pytest.approx(float(squared.mean()), rel=1e-5)


def test_choices_are_in_the_order_of_layers_in_a_loop_over_a_pattern() -> None:
    """Five layers of a pattern of two, on three devices: two stacks, and the layer left over."""
    random = np.random.default_rng(3)
    chosen = random.integers(1, 9, (5, 3, 4)).astype(np.float32)

    def sums(*layers: int) -> RouterSums:
        at = np.array(layers) if len(layers) > 1 else layers[0]
        return RouterSums(*(jnp.asarray(one[at]) for one in (chosen, chosen, chosen[..., 0])))

    loss = LossSums(jnp.float32(0), jnp.int32(40), {})
    kept = [sums(0, 2), sums(1, 3), sums(4)]
    found = with_router_losses(loss, kept, 40, loss.count, LossConfig(), period=2).chosen
    np.testing.assert_array_equal(found, chosen.sum(axis=1))
    leading = [None, *(sums(layer) for layer in range(5))]  # not a loop, after a dense layer
    found = with_router_losses(loss, leading, 40, loss.count, LossConfig(), period=2).chosen
    np.testing.assert_array_equal(found, chosen.sum(axis=1))


@pytest.mark.parametrize(("ways", "per_token"), [(2, 8), (4, 8), (8, 8), (16, 8), (4, 2)])
def test_the_exchange_that_is_chosen_sends_no_more_than_the_other(
    ways: int, per_token: int
) -> None:
    rows = {one: rows_per_token(one, ways, per_token) for one in ("ring", "all-to-all")}
    assert rows[exchange_by_bytes(ways, per_token)] == min(rows.values())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"experts_per_token": 9}, "experts_per_token=9 is more than the 8"),
        ({"router_scores": "softmx"}, "router_scores='softmx' is not known; did you mean"),
        ({"expert_groups": 3}, "experts=8 cannot be in expert_groups=3"),
        ({"expert_groups": 4, "experts_per_token": 3}, "is more than the 2 that a token can"),
    ],
)
def test_experts_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(MeshwrightError, match=message):
        dataclasses.replace(CONFIG, **fields)


@pytest.mark.parametrize(
    ("model", "mesh", "message"),
    [
        ("tiny", "fsdp=2,ep=2", "the model has no experts to be split in ep=2"),
        ("tiny-moe", "ep=3", "experts=8 cannot be split in ep=3"),
    ],
)
def test_a_mesh_that_does_not_divide_the_experts(model: str, mesh: str, message: str) -> None:
    config = TrainConfig(model, mesh=mesh, batch=12, seq=64)
    found = model_config(model)
    shape = {"fsdp": 2, "ep": 2} if "fsdp" in mesh else {"ep": 3}
    shape = {"dp": 1, "fsdp": 1, "tp": 1, "sp": 1} | shape
    with pytest.raises(MeshwrightError, match=message):
        check_sizes(config, found, choose_rules(config, found), shape)


@pytest.mark.parametrize("some", [pytest.param(False, marks=pytest.mark.slow), True])
def test_experts_that_begin_at_multiples_of_rows_compute_the_same(some: bool) -> None:
    random = np.random.default_rng(2)
    x = jnp.asarray(random.normal(size=(13, 6)), jnp.float32)
    chosen = jnp.asarray([random.choice(8, 3, replace=False) for _ in range(13)], jnp.int32)
    weights = jnp.asarray(random.uniform(size=(13, 3)), jnp.float32)
    matrices = jnp.asarray(random.normal(size=(4 if some else 8, 6, 5)), jnp.float32)

    def out(alignment: int) -> Any:
        def total(x: jax.Array, weights: jax.Array, matrices: jax.Array) -> Any:
            def run(rows: Rows) -> jax.Array:
                assert rows.weights is not None
                assert rows.values.shape[0] % alignment == 0
                y = grouped_matmul(rows.values, matrices, rows.sizes)
                return y * rows.weights[:, None]

            y = _through_own(x, chosen, weights, Mlp(run, alignment), len(matrices), some)
            return jnp.sum(jnp.sin(y)), y

        return jax.value_and_grad(total, (0, 1, 2), has_aux=True)(x, weights, matrices)

    (_, found), gradients = out(4)
    right = np.zeros((13, 5))
    for token, expert in np.ndindex(13, 3):
        number = int(chosen[token, expert])
        if number < len(matrices):
            right[token] += float(weights[token, expert]) * (
                np.asarray(x[token]) @ np.asarray(matrices[number])
            )
    np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-5)
    for one, other in zip(gradients, out(1)[1], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def maxtexts_mask(chosen: np.ndarray, experts: int, factor: float) -> np.ndarray:
    """Which choices [batch, length, k] are kept, by a running count of each expert's."""
    _, length, per_token = chosen.shape
    capacity = int(max(np.ceil(length * per_token / experts) * factor, factor))
    kept = np.zeros(chosen.shape, bool)
    for sequence, tokens in enumerate(chosen):
        counts = np.zeros(experts, int)
        for place in np.ndindex(*tokens.shape):
            counts[tokens[place]] += 1
            kept[(sequence, *place)] = counts[tokens[place]] <= capacity
    return kept


@pytest.mark.parametrize("factor", [0.3, 1.0, 1.25, 8.0])
def test_later_tokens_of_a_sequence_are_dropped_first(factor: float) -> None:
    random = np.random.default_rng(5)
    # uneven: low numbers are chosen more often
    scores = random.uniform(size=(3, 17, 6)) * np.arange(6, 0, -1)
    chosen = np.argsort(-scores, axis=-1)[..., :2].astype(np.int32)
    full = over_capacity(jnp.asarray(chosen), expert_capacity(factor, 17, 2, 6))
    np.testing.assert_array_equal(~np.asarray(full), maxtexts_mask(chosen, 6, factor))


def test_experts_with_a_capacity_compute_what_a_dense_reference_does() -> None:
    """Every token through every expert in numpy, and the sum of those that are kept."""
    random = np.random.default_rng(6)
    kind, embed, size = ExpertsKind(4, 2), 8, 6
    shapes = {"router": (embed, 4), "gate": (4, embed, size), "up": (4, embed, size)}
    shapes["down"] = (4, size, embed)
    w = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    x = random.normal(size=(3, 10, embed)).astype(np.float32)
    mesh = mw.mesh("dp=1,fsdp=1,tp=1,sp=1", devices=jax.devices()[:1], axis_types="explicit")

    def out(capacity: float) -> tuple[np.ndarray, RouterSums]:
        compute = Compute(decoder_rules(), capacity=capacity)
        with jax.set_mesh(mesh):
            run = jax.jit(lambda x, w: mixture(x, w, MlpKind(size), kind, compute))
            found, sums = run(jnp.asarray(x), jax.tree.map(jnp.asarray, w))
        return np.asarray(found), sums

    weights = numpy_choice((x @ w["router"]).reshape(-1, 4), kind, np.zeros(4))
    weights = weights.reshape(3, 10, 4)
    chosen = np.argsort(-weights, axis=-1)[..., :2]
    gate, up = (np.einsum("ble,xem->blxm", x, w[name]) for name in ("gate", "up"))
    each = np.einsum("blxm,xme->blxe", gate / (1 + np.exp(-gate)) * up, w["down"])
    for capacity in (0.75, 100.0):
        kept = np.zeros_like(weights)
        np.put_along_axis(kept, chosen, maxtexts_mask(chosen, 4, capacity), axis=-1)
        found, sums = out(capacity)
        expected = np.einsum("blx,blxe->ble", weights * kept, each)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
        assert float(sums.dropped[0]) == 60 - kept.sum()
        assert (kept.sum() == 60) == (capacity == 100)


@pytest.mark.parametrize("by_triton", [False, True])
@pytest.mark.parametrize("kind", [ExpertsKind(4, 2), ExpertsKind(4, 2, groups=2)])
def test_padding_of_a_decode_step_goes_through_no_expert(
    by_triton: bool, kind: ExpertsKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(6)
    embed, size = 64, 64
    shapes = {"router": (embed, 4), "gate": (4, embed, size), "up": (4, embed, size)}
    shapes["down"] = (4, size, embed)
    w = {name: random.normal(size=shape).astype(np.float32) / 8 for name, shape in shapes.items()}
    x = random.normal(size=(1, 6, embed)).astype(np.float32)
    padding = np.array([[False, False, True, False, True, True]])
    mesh = mw.mesh("dp=1,fsdp=1,tp=1,sp=1", devices=jax.devices()[:1], axis_types="explicit")
    compute = Compute(decoder_rules())

    def run(*padding: jax.Array) -> Any:
        with jax.set_mesh(mesh):
            arrays = jax.tree.map(jnp.asarray, (x, w))
            of = jax.jit(lambda x, w, *p: mixture(x, w, MlpKind(size), kind, compute, *p))
            found, sums = of(*arrays, *padding)
        return np.asarray(found), np.asarray(sums.chosen)[0]

    whole, _ = run()
    if by_triton:
        monkeypatch.setattr(experts, "few_tokens_unavailable", lambda *_: None)
        for name in ("few_tokens_mlp", "top_experts"):
            kernel = functools.partial(getattr(experts, name), interpret=True)
            monkeypatch.setattr(experts, name, kernel)
    found, times = run(jnp.asarray(padding))
    np.testing.assert_allclose(found[~padding], whole[~padding], rtol=1e-4, atol=1e-5)
    assert not found[padding].any()
    assert whole[padding].any()
    assert times.sum() == 2 * 3  # choices of the three tokens


@pytest.mark.slow
@pytest.mark.parametrize("exchange", EXCHANGES, indirect=True)
@pytest.mark.parametrize("mesh", ["dp=1,fsdp=2,ep=4,tp=1,sp=1", "dp=1,fsdp=2,ep=2,tp=2,sp=1"])
def test_what_is_dropped_does_not_depend_on_the_mesh(mesh: str, exchange: str) -> None:
    alone = trained(toy.ONE, capacity=0.8)
    close(trained(mesh, experts=exchange, capacity=0.8), alone)
    assert not np.allclose(alone[0], trained(toy.ONE)[0], rtol=1e-4)


@pytest.mark.slow
def test_a_capacity_that_no_expert_reaches_changes_nothing(alone: Any) -> None:
    close(trained("dp=1,fsdp=1,ep=4,tp=1,sp=1", experts="all-to-all", capacity=100.0), alone)


@pytest.mark.parametrize(
    ("model", "mesh", "message"),
    [
        ("tiny", "fsdp=4", "compute.capacity=1.25: tiny has no experts"),
        ("tiny-moe", "fsdp=2,sp=2", "counts the tokens of whole sequences, and sp splits them"),
    ],
)
def test_a_capacity_that_is_refused(model: str, mesh: str, message: str) -> None:
    settings = ComputeConfig(capacity=1.25)
    config = TrainConfig(model, mesh=mesh, batch=16, seq=64, compute=settings)
    with pytest.raises(MeshwrightError, match=message):
        abstract_step(config, training_mesh(config, devices=jax.devices()[:4]))


def test_a_run_says_how_tokens_reach_experts() -> None:
    model = model_config("tiny-moe")
    assert exchange_text("auto", model, {"ep": 4, "fsdp": 2}) == (
        "experts: all-to-all over ep=4 (copies of a token on the way there: ring sends 3, "
        "all-to-all sends 1.5)"
    )
    assert "experts: ring over ep=2 (as asked; " in str(exchange_text("ring", model, {"ep": 2}))
    assert exchange_text("auto", model, {"fsdp": 2}) is None
    assert exchange_text("auto", model_config("tiny"), {"fsdp": 2}) is None


def test_experts_are_not_computed_in_chunks() -> None:
    config = TrainConfig("tiny-moe", batch=16, seq=64, compute=ComputeConfig(mlp_chunk=16))
    with pytest.raises(MeshwrightError, match="mlp_chunk=16: the experts of tiny-moe are not"):
        abstract_step(config)


def test_routers_stay_in_float32() -> None:
    arrays = abstract_arrays(CONFIG)["layers"]["mlp"]
    assert [name for name, spec in arrays.items() if spec.is_matrix and not spec.is_cast] == [
        "router"
    ]


@pytest.mark.parametrize("mesh", [toy.ONE, "dp=1,fsdp=2,ep=2,tp=1,sp=2"])
def test_the_losses_of_routers_and_the_loads_leave_padding_out(mesh: str, tmp_path: Path) -> None:
    """As transformers leaves out what an attention mask of 0 has."""
    import torch
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    model = save("qwen3_moe", tmp_path)
    config, lengths = from_hf_config(tmp_path), [16, 5, 9, 2]
    rules = decoder_rules(sp=True, ep="ep=" in mesh)
    run = toy.parts(toy.Setting(mesh=mesh, config=config, rules=rules), optax.set_to_zero())
    shardings = jax.tree.map(lambda leaf: leaf.sharding, run.target.params)
    params = load_hf(tmp_path, config, shardings)
    state = new_state(run.arrays, run.target, run.optimizer, run.mesh, params=params)
    tokens = np.random.default_rng(2).integers(0, 48, (1, 4, 16)).astype(np.int32)
    segments = (np.arange(16) < np.array(lengths)[:, None])[None].astype(np.int32)
    targets = np.where(segments[..., 1:] > 0, tokens[..., 1:], -1)
    batch = {
        "tokens": tokens * segments,
        "targets": np.pad(targets, ((0, 0), (0, 0), (0, 1)), constant_values=-1),
        "segments": segments,
        "positions": np.broadcast_to(np.arange(16, dtype=np.int32), tokens.shape),
    }
    _, report = run.functions.train(state, run.put(batch))
    mask = torch.as_tensor(segments[0], dtype=torch.int64)
    out = model(torch.as_tensor(batch["tokens"][0]), attention_mask=mask, output_router_logits=True)
    layers = [load_balancing_loss_func((one,), 8, 3, mask) for one in out.router_logits]
    np.testing.assert_allclose(report["load_balance"], torch.stack(layers).mean().item(), rtol=1e-5)
    counted = [one.detach()[mask.reshape(-1) > 0] for one in out.router_logits]
    squares = [float((torch.logsumexp(one, -1) ** 2).mean()) for one in counted]
    np.testing.assert_allclose(report["router_z"], np.mean(squares), rtol=1e-5)
    chosen = [torch.bincount(one.topk(3).indices.reshape(-1), minlength=8) for one in counted]
    loads = [(one / one.float().mean()).tolist() for one in chosen]
    np.testing.assert_allclose(report["expert_loads"], loads, rtol=1e-6)
