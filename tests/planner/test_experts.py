"""Mixtures of experts in a plan: what is stored, what a token meets, what is sent and assumed."""

import dataclasses
import math

import numpy as np
import pytest
from tests.planner.compiled import Case, compiled
from tests.planner.workloads import workload

from meshwright import plan
from meshwright.errors import MeshwrightError
from meshwright.models import PRESETS, family_of, preset
from meshwright.planner.memory import memory
from meshwright.planner.sizes import array_leaves, sizes_of
from meshwright.planner.step import StepModel
from meshwright.planner.time import step_time
from meshwright.planner.workload import Choice, Workload

TINY = preset("tiny-moe")


def on(chip: str, **settings: object) -> Workload:
    return workload(TINY, chip, 16, 64, **settings)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("mixtral-8x7b", 46.7e9, 12.9e9),  # arXiv 2401.04088, section 1
        ("qwen3-30b-a3b", 30.5e9, 3.3e9),  # its model card
        ("qwen3-235b-a22b", 235e9, 22e9),
        ("olmoe-1b-7b", 6.9e9, 1.3e9),  # arXiv 2409.02060
        ("deepseek-v3", 671e9, 37e9),  # arXiv 2412.19437
    ],
)
def test_parameters_are_those_that_their_authors_name(
    name: str, total: float, active: float
) -> None:
    sizes = sizes_of(preset(name))
    assert sizes.parameters == pytest.approx(total, rel=0.01)
    assert sizes.active_parameters == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("ep", [1, 2, 8])
def test_the_flops_of_a_step_are_those_of_the_experts_that_tokens_meet(ep: int) -> None:
    work = StepModel(on("h100:8"), Choice.of(fsdp=8 // ep, ep=ep, remat="none")).work
    flops = family_of(TINY).flops(TINY, {"tokens": 64}) * 16 / 8
    again = 2 * TINY.embed * TINY.experts * TINY.layers  # the router, whose logits are not saved
    if ep > 1:  # gate and up of a token's experts, which an exchange does not save
        again += 2 * 2 * TINY.embed * TINY.mlp * TINY.experts_per_token * TINY.layers
    assert work.flops == flops
    assert work.computed == pytest.approx(flops + again * 64 * 16 / 8)


def test_a_device_stores_the_same_part_of_all_weights_and_gathers_fewer_experts() -> None:
    kinds = []
    for choice in (Choice.of(fsdp=8), Choice.of(fsdp=2, ep=4), Choice.of(ep=8)):
        step = StepModel(on("h100:8"), choice)
        kinds.append((memory(step).kinds["parameters"], step.last.layer))
    stored, gathered = zip(*kinds, strict=True)
    assert len(set(stored)) == 1
    expert = 3 * TINY.embed * TINY.mlp * 2  # bytes in bfloat16
    assert gathered[0] - gathered[1] == 6 * expert
    assert gathered[1] - gathered[2] == expert


@pytest.mark.parametrize(
    ("ep", "exchange", "rows"),
    [(1, "auto", 2), (4, "ring", 0), (4, "all-to-all", 0), (8, "all-to-all", 0)],
)
def test_what_the_experts_make_is_saved_unless_tokens_are_exchanged(
    ep: int, exchange: str, rows: int
) -> None:
    """As the compiled step stacks them: [layers, rows of tokens, mlp]."""
    steps = [
        StepModel(on("h100:8", experts=exchange), Choice.of(fsdp=8 // ep, ep=ep, remat=remat))
        for remat in ("none", "mlp")
    ]
    difference = steps[0].saved_up_to[-1] - steps[1].saved_up_to[-1]
    tokens, others = 16 * 64 // 8, 2 * TINY.embed  # the inputs of both blocks, after their norms
    of_experts = 3 * rows * TINY.mlp  # gate, up and their product
    assert difference == 2 * TINY.layers * tokens * (of_experts + others)
    # and computed again: both policies take as long, up to the elementwise work
    assert (steps[0].work.computed == steps[1].work.computed) == bool(ep > 1)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["ring", "all-to-all"])
def test_a_compiled_step_saves_what_the_plan_says(exchange: str) -> None:
    cases = [
        Case("experts", "fsdp=2,ep=4", remat=remat, experts=exchange, seq=256)
        for remat in ("none", "mlp")
    ]
    planned = [StepModel(case.workload("cpu:8"), case.choice).saved_up_to[-1] for case in cases]
    held = [compiled(case)[0].memory_analysis().temp_size_in_bytes for case in cases]
    assert held[0] - held[1] == pytest.approx(planned[0] - planned[1], rel=0.01)


def test_imbalance_makes_experts_and_an_all_to_all_take_longer_and_nothing_else() -> None:
    even = on("h100:8", experts="all-to-all")
    uneven = dataclasses.replace(even, imbalance=1.5)
    steps = [StepModel(one, Choice.of(ep=8)) for one in (even, uneven)]
    sent = [
        {(one.operation, one.what): one.bytes for one in step.collectives if one.axes == ("ep",)}
        for step in steps
    ]
    for key, size in sent[0].items():
        assert sent[1][key] == (1.5 * size if key[0] == "all-to-all" else size)
    times = [step_time(step) for step in steps]
    assert times[0].seconds["matmuls"] < times[1].seconds["matmuls"]
    assert times[0].seconds["attention"] == times[1].seconds["attention"]
    assert steps[0].work.computed == steps[1].work.computed


@pytest.mark.parametrize(
    ("ep", "capacity", "most"),
    [
        (2, 0.0, 2),  # all tokens choose experts of one device of two
        (8, 0.0, 4),  # a token chooses 2 experts, and no device has more than one
        (4, 1.25, 1.25),  # what is beyond the capacity is dropped
    ],
)
def test_no_device_gets_more_tokens_than_can_choose_its_experts(
    ep: int, capacity: float, most: float
) -> None:
    given = on("h100:8", experts="all-to-all", capacity=capacity)
    choice = Choice.of(fsdp=8 // ep, ep=ep)
    highest, assumed = (
        StepModel(dataclasses.replace(given, imbalance=imbalance), choice)
        for imbalance in (most, 30)
    )
    assert highest.collectives == assumed.collectives
    assert step_time(highest).seconds == step_time(assumed).seconds
    lower = StepModel(dataclasses.replace(given, imbalance=0.9 * most), choice)
    assert lower.collectives != highest.collectives


@pytest.mark.parametrize("kind", ["train", "serve"])
def test_without_ep_no_device_has_more_than_another(kind: str) -> None:
    mesh = "fsdp=8" if kind == "train" else "tp=4,dp=2"
    first, second = (
        plan("qwen3-30b-a3b", "h100:8", 64, 512, kind=kind, mesh=mesh, imbalance=imbalance).best
        for imbalance in (1, 3)
    )
    assert (first.step_seconds, first.mfu) == (second.step_seconds, second.mfu)
    mesh = "fsdp=4,ep=2" if kind == "train" else "dp=4,ep=2"
    most, more = (
        plan("qwen3-30b-a3b", "h100:8", 64, 512, kind=kind, mesh=mesh, imbalance=imbalance).best
        for imbalance in (2, 30)  # one of two devices has all tokens of both
    )
    assert (
        most.seconds["matmuls" if kind == "train" else "weights"]
        == (more.seconds["matmuls" if kind == "train" else "weights"])
    )


def test_an_imbalance_below_one_is_refused() -> None:
    with pytest.raises(MeshwrightError, match=r"imbalance=0\.5 must be at least 1"):
        plan("tiny-moe", "h100:8", batch=16, seq=64, imbalance=0.5)


def test_an_imbalance_without_experts_is_refused() -> None:
    with pytest.raises(MeshwrightError, match="imbalance=2: tiny has no experts; leave it out"):
        plan("tiny", "h100:8", batch=16, seq=64, imbalance=2)


def test_meshes_that_train_refuses_with_a_capacity_are_refused() -> None:
    given = {"batch": 16, "seq": 64, "compute.capacity": 1.25}
    found = plan("tiny-moe", "h100:8", **given)
    choices = [one.choice for one in found.ranked]
    assert any(one.size("tp") > 1 for one in choices)
    assert not any(one.size("sp") > 1 or one.sequence_parallel for one in choices)
    assert any("whole sequences, and sp splits them" in one.why for one in found.refused)
    with pytest.raises(MeshwrightError, match=r"compute\.capacity=1\.25: tiny has no experts"):
        plan("tiny", "h100:8", **given)


def test_a_search_splits_experts_over_every_number_that_divides_them() -> None:
    found = plan("tiny-moe", "h100:2x8", batch=16, seq=64)
    looked_at = [*found.ranked, *found.refused]
    assert {one.choice.size("ep") for one in looked_at} == {1, 2, 4, 8}
    assert all(("ep" in one.choice.sizes) == (one.choice.size("ep") > 1) for one in looked_at)
    named = plan("tiny-moe", "h100:8", batch=16, seq=64, mesh="ep=4")
    assert {one.choice.size("ep") for one in named.ranked} == {4}
    assert "tokens reach experts over ep=4 by all-to-all" in named.best.reason
    assert ",ep=4,tp=" in named.mesh


@pytest.mark.parametrize(
    ("model", "mesh", "why"),
    [
        ("tiny", "ep=4", "the model has no experts to be split in ep=4"),
        ("tiny-moe", "ep=16", "experts=8 cannot be split in ep=16"),
    ],
)
def test_experts_that_cannot_be_split_are_refused(model: str, mesh: str, why: str) -> None:
    with pytest.raises(MeshwrightError, match=why):
        plan(model, "h100:2x8", batch=16, seq=64, mesh=mesh)


def test_no_sizes_are_named_where_none_would_fit() -> None:
    with pytest.raises(MeshwrightError, match=r"experts=8 cannot be split in ep=3(?!, but in)"):
        plan("mixtral-8x7b", "cpu:9", batch=9, seq=1024, mesh="ep=3,fsdp=3")


@pytest.mark.parametrize("batch", [1, 4, 64])
def test_a_decode_step_reads_the_experts_that_its_tokens_choose(batch: int) -> None:
    """Against a drawn choice of experts for each token."""
    count, chosen = 64, 4
    model = dataclasses.replace(TINY, experts=count, experts_per_token=chosen)
    step = StepModel(workload(model, "h100:1", batch, 64, serve=True), Choice.of())
    random = np.random.default_rng(0)
    drawn = [
        len({int(e) for _ in range(batch) for e in random.choice(count, chosen, replace=False)})
        for _ in range(200)
    ]
    expert = 3 * model.embed * model.mlp
    attention = 2 * model.embed * model.head_dim * (model.heads + model.kv_heads)
    dense = model.layers * (attention + model.embed * count) + model.vocab * model.embed
    cache = 2 * model.layers * batch * 64 * model.kv_heads * model.head_dim
    read = 2 * (dense + model.layers * float(np.mean(drawn)) * expert + cache)
    assert step.work.memory_bytes == pytest.approx(read, rel=0.02)


def test_an_engine_splits_experts_over_ep_and_replicates_the_rest() -> None:
    served = workload(TINY, "h100:8", 16, 64, serve=True)
    steps = [StepModel(served, Choice.of(dp=1, ep=ep)) for ep in (2, 8)]
    experts = TINY.layers * (3 * TINY.embed * TINY.mlp + TINY.embed) * TINY.experts * 2
    held = [memory(step).kinds["parameters"] for step in steps]
    assert held[0] - held[1] == math.ceil(experts * (1 / 2 - 1 / 8))
    sent = {one.operation: (one.axes, one.times) for one in steps[1].collectives}
    assert sent == dict.fromkeys(("all-reduce", "all-gather"), (("ep",), TINY.layers))


@pytest.mark.parametrize("on", ["h100:8", "v5e:2x4"])
def test_quantized_weights_of_an_engine_are_all_but_routers_and_on_tpus_experts(on: str) -> None:
    served = workload(TINY, on, 16, 64, serve=True)
    steps = [StepModel(served, Choice.of(dp=8, weights=weights)) for weights in (None, "int8")]
    attention = 2 * TINY.embed * TINY.head_dim * (TINY.heads + TINY.kv_heads)
    fewer = TINY.layers * attention + TINY.vocab * TINY.embed  # a byte less of each
    scales = TINY.layers * (2 * TINY.embed + 2 * TINY.kv_heads * TINY.head_dim) + TINY.vocab
    of_experts = TINY.layers * 3 * TINY.embed * TINY.mlp
    read = TINY.experts * (1 - (1 - TINY.experts_per_token / TINY.experts) ** 2)  # by two tokens
    if on == "v5e:2x4":
        of_experts = 0
    else:
        scales += TINY.layers * TINY.experts * (2 * TINY.mlp + TINY.embed)
    held = [memory(step).kinds["parameters"] for step in steps]
    assert held[0] - held[1] == fewer + TINY.experts * of_experts - 4 * scales
    less = steps[0].work.memory_bytes - steps[1].work.memory_bytes
    assert less == pytest.approx(fewer + read * of_experts)


def test_a_served_token_of_latent_attention_keeps_keys_and_values_of_every_head() -> None:
    """As the engine's pages do: values are padded to the size of keys. All layers have some."""
    model = preset("deepseek-v3")
    steps = [
        StepModel(workload(model, "h200:4x8", 16, length, serve=True), Choice.of(tp=32))
        for length in (64, 1088)
    ]
    cache = [memory(step).kinds["key-value cache"] for step in steps]
    assert cache[1] - cache[0] == 16 * 1024 * 61 * 2 * 128 * 192 * 2 // 32
    # tp does not split what makes latents, nor routers
    whole = 7168 * (1536 + 512 + 64) * 61 + 7168 * 256 * 58
    parameters = sizes_of(model).parameters
    assert steps[0].layers_and_tables == pytest.approx((parameters - whole) / 32 + whole, rel=1e-9)


def test_every_preset_is_planned() -> None:
    for name, config in PRESETS.items():
        sizes = sizes_of(config)
        leaves = [one for one in array_leaves(family_of(config).arrays(config)) if one.inputs]
        learned = sum(one.size for one in leaves if "positions" in one.dims)
        assert sizes.parameters == sum(one.size for one in leaves) - learned, name


def test_arrays_whose_work_is_not_declared_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    family = family_of(TINY)
    (stack,) = family.work(TINY)
    block = dataclasses.replace(stack.blocks[0], outputs={"wq": "q"})
    declared = dataclasses.replace(stack, blocks=(block, *stack.blocks[1:]))
    other = dataclasses.replace(family, work=lambda config: (declared,))
    monkeypatch.setattr("meshwright.planner.sizes.family_of", lambda config: other)
    with pytest.raises(MeshwrightError, match="cannot be planned yet: its layers have wk, wv, wo"):
        sizes_of(dataclasses.replace(TINY, vocab=352))


def test_a_balance_that_train_refuses_is_not_planned() -> None:
    with pytest.raises(MeshwrightError, match="tiny has no experts; leave it out"):
        plan("tiny", "h100:8", 64, 128, balance_bias=0.001)
    with pytest.raises(MeshwrightError, match="this model has none; leave it out and balance"):
        plan("mixtral-8x7b", "h100:8x8", 64, 1024, balance_bias=0.001)
    mesh = "fsdp=64,ep=8"
    assert plan("deepseek-v3", "v5p:8x8x8", 512, 4096, mesh=mesh, balance_bias=0.001).ranked
