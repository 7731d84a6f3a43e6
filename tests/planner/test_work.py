"""FLOPs against the compiler's count, step times against measured and published ones."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from tests.planner.workloads import workload
from tests.training.toy import ONE, Setting, parts

from meshwright.machines import CHIPS, Machine
from meshwright.models import preset
from meshwright.models.decoder import DecoderConfig
from meshwright.planner import efficiency, plan
from meshwright.planner.compilers import staged
from meshwright.planner.step import StepModel
from meshwright.planner.time import StepTime, step_time
from meshwright.planner.workload import Choice

CONFIG = DecoderConfig(vocab=64, layers=2, embed=256, heads=4, kv_heads=2, head_dim=64, mlp=768)
ROWS, SEQ = 24, 16


@functools.cache
def compiled_flops(remat: str) -> float:
    """XLA's count, layers unrolled: it counts what is in a loop once."""
    run = parts(Setting(ONE, remat=remat, scan=False, config=CONFIG))
    one = jax.ShapeDtypeStruct((1, ROWS, SEQ), jnp.int32, sharding=run.functions.batch_sharding)
    batch = dict.fromkeys(("tokens", "targets", "segments", "positions"), one)
    # XLA for CPU alone would drop the barriers that keep what is made again apart
    options = {
        "xla_disable_hlo_passes": "cse_barrier_expander",
        "xla_backend_optimization_level": 0,
    }
    program = run.functions.train.lower(run.target, batch).compile(compiler_options=options)
    return float(program.cost_analysis()["flops"])


def test_float32_is_multiplied_at_half_of_the_peak_on_gpus() -> None:
    for on, ratio in (("h200:8", 2.0), ("v5p:2x2x2", 1.0)):
        seconds = {
            dtype: plan("llama-3.1-8b", on, 64, 4096, mesh="fsdp=8", remat="full", dtype=dtype)
            for dtype in ("bfloat16", "float32")
        }
        parts = [one.best.seconds for one in seconds.values()]
        assert parts[1]["matmuls"] == pytest.approx(ratio * parts[0]["matmuls"], rel=0.02)
        assert parts[1]["attention"] >= ratio * parts[0]["attention"]


def planned_flops(remat: str) -> float:
    run = workload(CONFIG, "cpu:1", ROWS, SEQ, dtype="float32", layers="unroll")
    return StepModel(run, Choice.of(remat=remat)).work.computed


def test_flops_are_those_of_the_compiled_step_within_what_is_elementwise() -> None:
    # the head is in the loss's loop, of which it counts one round of 24 tokens
    tokens = ROWS * SEQ
    in_loop = 6 * CONFIG.vocab * CONFIG.embed * (tokens - 24)
    assert compiled_flops("none") + in_loop == pytest.approx(planned_flops("none"), rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["mlp", "full"])
def test_remat_makes_again_what_the_compiled_step_does(remat: str) -> None:
    more = compiled_flops(remat) - compiled_flops("none")
    assert planned_flops(remat) - planned_flops("none") == pytest.approx(more, rel=0.03)


def step(model: str | DecoderConfig, on: str, batch: int, seq: int, choice: Choice, **settings: str) -> StepTime:  # fmt: skip
    config = preset(model) if isinstance(model, str) else model
    return step_time(StepModel(workload(config, on, batch, seq, **settings), choice))


def mfu(found: StepTime, on: str) -> float:
    chip = Machine.parse(on).chip
    return found.work.flops / found.step / (chip.bf16_flops / chip.cores_per_chip)


# ---- measured: benchmarks/RESULTS.md, one H200, unrolled layers. The parts of these steps are where
# the GPU's constants come from, so this shows that the parts add up, not that they hold elsewhere.


@pytest.mark.parametrize(("batch", "seq", "measured"), [(8, 2048, 0.2393), (4, 8192, 0.5689)])
def test_a_step_on_one_gpu_takes_what_was_measured(batch: int, seq: int, measured: float) -> None:
    found = step("llama-3.2-1b", "h200:1", batch, seq, Choice.of(), layers="unroll")
    assert found.step == pytest.approx(measured, rel=0.05)
    assert not found.collectives


# ---- published: MaxText's MFU. What it ran is assumed: 2K tokens on v5, 8K on v6e, two to eight rows
# a chip, weights over all chips; what is made again is left to the plan. v6e's matmuls are fitted to
# the two of v6e; v5p and v5e use no figure of theirs.

# 16B by a usual shape
SIXTEEN = DecoderConfig(32000, 34, 6144, 48, 48, 128, 16384)


@pytest.mark.parametrize("rows", [2, 4, 8])
@pytest.mark.parametrize(
    ("model", "on", "seq", "published"),
    [
        ("llama-2-70b", "v5p:8x8x8", 2048, 0.65),
        ("llama-3.1-8b", "v6e:16x16", 8192, 0.45),
        ("llama-3.1-70b", "v6e:16x16", 8192, 0.50),
        (SIXTEEN, "v5e:16x16", 2048, 0.61),
    ],
    ids=["70B v5p-1024", "8B v6e-256", "70B v6e-256", "16B v5e-256"],
)
def test_utilization_is_within_ten_points_of_what_was_published(
    model: str | DecoderConfig, on: str, seq: int, published: float, rows: int
) -> None:
    found = plan(model, on, rows * Machine.parse(on).num_chips, seq, mesh="tp=1,sp=1")
    assert found.best.mfu == pytest.approx(published, abs=0.10)
    assert found.best.choice.size("fsdp") >= found.machine.num_chips // 2


def test_ends_that_are_one_array_send_one_gradient_on_accelerators() -> None:
    """As compiled for llama-3.2-1b on eight H100: 2.3 GiB of scattered gradients, not 2.8."""
    sizes = {}
    for on in ("h100:8", "v5e:2x4", "cpu:8"):
        run = workload(preset("llama-3.2-1b"), on, 16, 2048)
        rows = staged(StepModel(run, Choice.of(fsdp=8)))
        sizes[on] = sum(one.bytes * one.times for one in rows if one.what.startswith("gradient of"))
    assert sizes["h100:8"] == sizes["v5e:2x4"] == pytest.approx(2.3 * 2**30, rel=0.03)
    assert sizes["cpu:8"] - sizes["h100:8"] == 2 * 128256 * 2048


# ---- what hides under what


def waited(found: StepTime, *axes: str) -> float:
    return sum(one.seconds - one.hidden for one in found.collectives if one.axes == axes)


def test_weights_hide_under_layers_and_sums_of_tp_under_nothing() -> None:
    both = step("llama-3.1-8b", "h100:8x8", 128, 4096, Choice.of(fsdp=16, tp=4))
    of_weights = [
        one for one in both.collectives if one.axes == ("fsdp",) and "weights" in one.what
    ]
    assert all(one.hidden >= 0.5 * one.seconds > 0 for one in of_weights)
    assert all(one.hidden == 0 for one in both.collectives if one.axes == ("tp",))
    assert waited(both, "tp") > waited(both, "fsdp") > 0


def test_nothing_hides_for_longer_than_there_is_work() -> None:
    """Few tokens: the gathers are most of the step."""
    found = step("llama-3.1-8b", "h100:8x8", 64, 64, Choice.of(fsdp=64))
    hidden = sum(one.hidden for one in found.collectives)
    assert hidden <= found.work.forward + found.work.backward
    assert waited(found, "fsdp") > sum(found.work.seconds.values())


def test_rings_hide_where_parts_are_long_and_do_not_where_they_are_short() -> None:
    def share(seq: int) -> float:
        ring = Choice.of(fsdp=8, sp=8, context_parallel="ring")
        found = step("llama-2-7b", "v5p:4x4x4", 8, seq, ring)
        rows = [one for one in found.collectives if "keys" in one.what]
        return sum(one.hidden for one in rows) / sum(one.seconds for one in rows)

    assert share(2**19) > 0.8
    assert share(2**12) < 0.6


def test_gathers_are_waited_for_where_the_compiler_makes_them_synchronous() -> None:
    for on, hides in (("v5p:4x4x4", False), ("v5e:8x8", True), ("h100:8x8", True)):
        found = step("llama-3.1-8b", on, 128, 4096, Choice.of(fsdp=64))
        assert any(one.hidden > 0 for one in found.collectives) == hides


def test_seconds_add_up_to_the_step() -> None:
    found = step("llama-3.1-8b", "h100:2x8", 64, 4096, Choice.of(fsdp=8, tp=2))
    assert sum(found.seconds.values()) == pytest.approx(found.step)
    exposed = sum(one.seconds - one.hidden for one in found.collectives)
    assert found.seconds["waiting for links"] == pytest.approx(exposed)


def test_a_model_split_over_tp_has_its_share_of_the_work() -> None:
    run = workload(preset("llama-3.1-8b"), "v5p:4x4x4", 64, 4096)
    one, eight = (StepModel(run, Choice.of(fsdp=64 // tp, tp=tp)).work for tp in (1, 8))
    assert one.computed == pytest.approx(eight.computed)
    # each device's matmuls are narrower, and what tp repeats between blocks is not shared
    assert eight.seconds["matmuls"] >= one.seconds["matmuls"]
    assert eight.seconds["elementwise"] > one.seconds["elementwise"]
    along = StepModel(run, Choice.of(fsdp=8, tp=8, sequence_parallel=True)).work
    assert along.seconds["elementwise"] == pytest.approx(one.seconds["elementwise"])


def test_useful_flops_are_counted_within_the_window() -> None:
    """Pairs of a query and a key that it sees, one by one."""
    seq, window = 48, 5
    model = dataclasses.replace(CONFIG, sliding_window=window)
    pairs = sum(min(query + 1, window) for query in range(seq))
    exact = 12 * model.layers * model.heads * model.head_dim * pairs / seq
    counted = model.flops_per_token(seq) - 6 * model.matmul_params
    # without the half pair of a query with itself, as the causal count has it too
    assert counted == pytest.approx(exact, rel=0.6 / window)
    assert model.flops_per_token(seq) < CONFIG.flops_per_token(seq)
    for wide in (seq, 10 * seq):
        same = dataclasses.replace(CONFIG, sliding_window=wide)
        assert same.flops_per_token(seq) == CONFIG.flops_per_token(seq)


def test_a_window_shortens_attention_as_far_as_it_hides() -> None:
    model = preset("mistral-7b")
    whole = dataclasses.replace(model, sliding_window=None)
    with_window, without = (
        StepModel(run, Choice.of(fsdp=8)).work.seconds["attention"]
        for run in (workload(config, "v5p:2x2x2", 8, 32768) for config in (model, whole))
    )
    # pairs within 4,096 of 32,768 tokens: 4096 * (32768 - 2048) of 32768 ** 2 / 2
    assert with_window / without == pytest.approx(4096 * (32768 - 2048) / (32768**2 / 2))


# mesh, batch, seq, remat: MiB of a device of a step of tiny, as XLA for CPUs counts them (jax 0.10.2)
ON_CPUS = {
    ("fsdp=8", 32, 512, "none"): 186.0,
    ("fsdp=4,tp=2", 32, 512, "none"): 208.0,
    ("dp=8", 32, 512, "full"): 134.2,
    ("fsdp=8", 16, 2048, "mlp"): 383.8,
}


@pytest.mark.parametrize(("case", "compiled"), ON_CPUS.items())
def test_memory_on_cpus_counts_the_scores_of_attention(
    case: tuple[str, int, int, str], compiled: float
) -> None:
    mesh, batch, seq, remat = case
    given = {"remat": remat, "accumulation": 1, "sequence_parallel": False}
    found = plan("tiny", "cpu:8", batch, seq, mesh=mesh, **given)
    assert found.best.memory.total / 2**20 == pytest.approx(compiled, rel=0.05)


def test_attention_does_not_grow_as_sequences_shrink() -> None:
    """A kernel pads short sequences to 128 tokens: each takes as long as one of 128."""
    seconds = {
        seq: plan("llama-3.1-8b", "v5e:4x4", 16, seq, mesh="fsdp=2,tp=8").best.seconds["attention"]
        for seq in (1, 2, 16, 64, 128, 256)
    }
    for seq in (1, 2, 16, 64):
        assert seconds[seq] == pytest.approx(seconds[128])
    assert seconds[128] < seconds[256]


# the smaller side of matmuls: how many times as fast they are in fp8 in a training step, measured
# on one H200 (benchmarks/train_step.py); the constants are from the first two
MEASURED_FP8 = {2048: 1.38, 4096: 1.59, 8192: 1.75, 16384: 1.91}
# the same of experts, whose smaller side is their mlp or embed; forward and backward in uneven
# groups (benchmarks/expert_step.py --sides kernels); no constant is from these
MEASURED_FP8_OF_EXPERTS = {1024: 1.06, 1536: 1.13, 4096: 1.56}


@pytest.mark.parametrize(("side", "gain"), MEASURED_FP8.items())
def test_wider_layers_gain_more_by_fp8(side: int, gain: float) -> None:
    assert efficiency.fp8(CHIPS["h200"], side) == pytest.approx(gain, rel=0.07)
    assert efficiency.fp8(CHIPS["7x"], side) == efficiency.fp8(CHIPS["h200"], side)
    assert efficiency.fp8(CHIPS["v6e"], side) == 1.0  # whose peak is no higher


@pytest.mark.parametrize(("side", "gain"), MEASURED_FP8_OF_EXPERTS.items())
def test_experts_gain_by_fp8_as_other_matrices_do(side: int, gain: float) -> None:
    assert efficiency.fp8(CHIPS["h200"], side) == pytest.approx(gain, rel=0.14)
