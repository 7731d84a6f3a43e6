"""A step's time from a program's text: hand-computed for a small one, held to audit for real ones."""

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from tests.planner.workloads import workload

from compiled_roofline import Roofline, roofline
from instruction_times import FLOPS_PER_CYCLE, Prices
from meshwright.audits import collectives, read_program
from meshwright.errors import MeshwrightError
from meshwright.machines import CHIPS, Machine
from meshwright.models import model_config
from meshwright.planner import efficiency
from meshwright.planner.links import over, place_axes
from meshwright.planner.step import StepModel
from meshwright.planner.workload import Choice

approx = pytest.approx
V5P = Machine.parse("v5p:4x4x4")
PEAK, MEMORY = 459e12, 0.9 * 2.765e12
CLOCK = PEAK / 2**18  # 1.75 GHz
# all 64 chips: x, y and z, both ways round each
LINKS = 6 * 90e9 * efficiency.ICI
CHOICE = Choice.of(fsdp=64, remat="full")
MODEL = model_config("llama-3.1-8b")

# four layers, each: a weight is all-gathered, multiplied with, and the result scaled; the logits'
# weight is all-gathered once
TEXT = """\
HloModule jit_train, is_scheduled=true, num_partitions=64

%fused_matmul (p0: bf16[4096,1024], p1: bf16[1024,2048]) -> bf16[4096,2048] {
  %p0 = bf16[4096,1024]{1,0:T(8,128)(2,1)} parameter(0)
  %p1 = bf16[1024,2048]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %convolution.1 = bf16[4096,2048]{1,0:T(8,128)(2,1)} convolution(%p0, %p1), dim_labels=bf_io->bf
}

%fused_scale (p0.1: bf16[4,4096,2048], p1.1: s32[]) -> bf16[1,4096,2048] {
  %p0.1 = bf16[4,4096,2048]{2,1,0:T(8,128)(2,1)} parameter(0)
  %p1.1 = s32[]{:T(128)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %part = bf16[1,4096,2048]{2,1,0:T(8,128)(2,1)} dynamic-slice(%p0.1, %p1.1, %zero, %zero), dynamic_slice_sizes={1,4096,2048}
  ROOT %negate.1 = bf16[1,4096,2048]{2,1,0:T(8,128)(2,1)} negate(%part)
}

%body (state: (s32[], bf16[4096,1024], bf16[16,2048], bf16[4,4096,2048])) -> (s32[], bf16[4096,1024], bf16[16,2048], bf16[4,4096,2048]) {
  %state = (s32[]{:T(128)}, bf16[4096,1024]{1,0}, bf16[16,2048]{1,0}, bf16[4,4096,2048]{2,1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  %x = bf16[4096,1024]{1,0:T(8,128)(2,1)} get-tuple-element(%state), index=1
  %w = bf16[16,2048]{1,0:T(8,128)(2,1)} get-tuple-element(%state), index=2
  %stack = bf16[4,4096,2048]{2,1,0:T(8,128)(2,1)} get-tuple-element(%state), index=3
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%i, %one)
  %gathered = bf16[1024,2048]{1,0:T(8,128)(2,1)} all-gather(%w), channel_id=1, replica_groups=[1,64]<=[64], dimensions={0}, metadata={op_name="jit(train)/while/body/mlp/all_gather"}
  %product = bf16[4096,2048]{1,0:T(8,128)(2,1)} fusion(%x, %gathered), kind=kOutput, calls=%fused_matmul, backend_config={"window_config":{"estimated_cycles":"70000"}}
  %scaled = bf16[1,4096,2048]{2,1,0:T(8,128)(2,1)} fusion(%stack, %i), kind=kLoop, calls=%fused_scale, backend_config={"window_config":{"estimated_cycles":"100000"}}
  ROOT %tuple.1 = (s32[]{:T(128)}, bf16[4096,1024]{1,0}, bf16[16,2048]{1,0}, bf16[4,4096,2048]{2,1,0}) tuple(%next, %x, %w, %stack)
}

%condition (state.1: (s32[], bf16[4096,1024], bf16[16,2048], bf16[4,4096,2048])) -> pred[] {
  %state.1 = (s32[]{:T(128)}, bf16[4096,1024]{1,0}, bf16[16,2048]{1,0}, bf16[4,4096,2048]{2,1,0}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  %four = s32[]{:T(128)} constant(4)
  ROOT %less = pred[]{:T(512)} compare(%i.1, %four), direction=LT
}

ENTRY %main (a: bf16[4096,1024], b: bf16[16,2048], c: bf16[4,4096,2048], d: bf16[512,4096]) -> bf16[4096,1024] {
  %a = bf16[4096,1024]{1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[16,2048]{1,0:T(8,128)(2,1)} parameter(1)
  %c = bf16[4,4096,2048]{2,1,0:T(8,128)(2,1)} parameter(2)
  %d = bf16[512,4096]{1,0:T(8,128)(2,1)} parameter(3)
  %none = s32[]{:T(128)} constant(0)
  %start = (s32[]{:T(128)}, bf16[4096,1024]{1,0}, bf16[16,2048]{1,0}, bf16[4,4096,2048]{2,1,0}) tuple(%none, %a, %b, %c)
  %loop = (s32[]{:T(128)}, bf16[4096,1024]{1,0}, bf16[16,2048]{1,0}, bf16[4,4096,2048]{2,1,0}) while(%start), condition=%condition, body=%body
  %logits = bf16[32768,4096]{1,0:T(8,128)(2,1)} all-gather(%d), channel_id=2, replica_groups=[1,64]<=[64], dimensions={0}, metadata={op_name="jit(train)/jvp(loss)/all_gather"}
  ROOT %result = bf16[4096,1024]{1,0:T(8,128)(2,1)} get-tuple-element(%loop), index=1
}
"""
MATMUL = 70000 / CLOCK
SCALE = 2 * 2 * 4096 * 2048 / MEMORY  # a layer's part is read, and as much written
GATHER = 2 * 1024 * 2048 * 63 / 64 / LINKS
LOGITS = 2 * 32768 * 4096 * 63 / 64 / LINKS
START = over(place_axes(V5P, {"fsdp": 64}), ("fsdp",)).latency


def found_in(text: str, choice: Choice = CHOICE) -> Roofline:
    return roofline(text, choice.sizes, StepModel(workload(MODEL, V5P, 64, 4096), choice))


def prices_of(body: str, others: str = "", machine: Machine = V5P, model: Any = MODEL) -> Prices:
    """Of a program of one computation."""
    text = f"HloModule m\n\n{others}\nENTRY %main () -> f32[] {{\n{body}\n}}\n"
    step = StepModel(workload(model, machine, 64, 4096), CHOICE)
    return Prices(read_program(text), text, step)


def price(prices: Prices, name: str, part: str = "elementwise") -> float:
    """Seconds of an instruction, which is of that part."""
    one = prices.of(prices.by_name("main")[name], "main")
    assert one.part == part
    return one.seconds


def test_a_program_takes_its_matmuls_its_bytes_and_what_it_waits_for() -> None:
    found = found_in(TEXT)
    assert found.compute["matmuls"] == approx(4 * MATMUL)
    assert found.compute["elementwise"] == approx(4 * SCALE)
    assert found.compute["attention"] == 0
    assert found.exposed == {"fsdp": approx(4 * GATHER + LOGITS + 5 * START)}
    assert found.flops["matmuls"] == 4 * 2 * 4096 * 1024 * 2048
    assert found.seconds == approx(sum(found.compute.values()) + sum(found.exposed.values()))
    assert found.tokens_per_second == approx(64 * 4096 / found.seconds)
    assert found.notes == ()


def test_overlapped_a_layer_hides_its_weights_but_not_the_logits() -> None:
    found = found_in(TEXT)
    assert GATHER + START < MATMUL + SCALE
    assert found.overlapped == approx(sum(found.compute.values()) + LOGITS + START)


def test_overlapped_what_is_longer_than_its_layer_is_waited_for() -> None:
    large = TEXT.replace("bf16[16,2048]", "bf16[4096,2048]").replace(
        "%gathered = bf16[1024,2048]", "%gathered = bf16[262144,2048]"
    )
    found = found_in(large)
    left = 4 * (256 * GATHER + START - MATMUL - SCALE)
    assert left > 0
    assert found.left["fsdp"] == approx(left + LOGITS + START)


def test_what_tp_sends_hides_under_nothing() -> None:
    tp = Choice.of(fsdp=16, tp=4)
    text = TEXT.replace("[1,64]<=[64]", "[16,4]<=[64]")
    found = found_in(text, tp)
    assert set(found.exposed) == {"tp"}
    assert found.left == approx(found.exposed)


def permuting(size: int, many: int = 1) -> str:
    """With permutes that begin before the matmul and end after it."""
    shape = f"bf16[{size}]{{0}}"
    pairs = ",".join(f"{{{i},{(i + 1) % 64}}}" for i in range(64))
    lines = TEXT.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("  %product"))
    lines[at + 1 : at + 1] = [
        f"  %there.{n} = {shape} collective-permute-done(%begun.{n})" for n in range(many)
    ]
    lines[at:at] = [
        f"  %y = {shape} constant(0)",
        *(
            f"  %begun.{n} = ({shape}, {shape}, u32[], u32[]) collective-permute-start(%y), "
            f"channel_id={3 + n}, source_target_pairs={{{pairs}}}"
            for n in range(many)
        ),
    ]
    return "\n".join(lines)


def test_an_asynchronous_permute_is_waited_for_as_far_as_the_matmul_is_shorter() -> None:
    link = over(place_axes(V5P, {"fsdp": 64}), ("fsdp",))
    without = found_in(TEXT)
    for size in (2**18, 2**24):
        seconds = link.seconds("collective-permute", 2 * size)
        found = found_in(permuting(size))
        waited = max(0.0, seconds - MATMUL)
        assert (waited > 0) == (size == 2**24)
        assert found.seconds - without.seconds == approx(4 * waited, abs=1e-12)
        assert found.hidden["fsdp"] == approx(4 * (seconds - waited))


def test_two_permutes_at_once_share_their_links() -> None:
    link = over(place_axes(V5P, {"fsdp": 64}), ("fsdp",))
    seconds = link.seconds("collective-permute", 2 * 2**24)
    more = found_in(permuting(2**24, many=2)).seconds - found_in(TEXT).seconds
    assert more == approx(4 * (2 * seconds - MATMUL))


def spread(rows: int) -> str:
    """The gather of `rows` of a weight, spread over three fusions, the matmul's among them."""
    whole = f"bf16[{rows},2048]{{1,0}}"
    gather = (
        f"%g.N = {whole} all-gather(%q.N), channel_id=1, replica_groups=[1,64]<=[64], "
        'dimensions={0}, frontend_attributes={chain_id="7"}, '
        'metadata={op_name="jit(train)/while/body/mlp/all_gather"}'
    )
    others = "".join(
        f"%fused_{name} (q.{n}: bf16[16,2048]) -> {whole} {{\n"
        f"  %q.{n} = bf16[16,2048]{{1,0}} parameter(0)\n  {root}{gather.replace('N', str(n))}\n"
        for n, (name, root) in enumerate([("start", "ROOT "), ("step", ""), ("done", "ROOT ")])
    )
    first, middle, last = others.split("%fused_")[1:]
    middle += (
        "  %l = bf16[4096,1024]{1,0} parameter(1)\n  %r = bf16[1024,2048]{1,0} parameter(2)\n"
        "  ROOT %c = bf16[4096,2048]{1,0} convolution(%l, %r), dim_labels=bf_io->bf\n"
    )
    fused = "\n".join(f"%fused_{each}}}\n" for each in (first, middle, last))
    lines = TEXT.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("  %gathered"))
    lines[at : at + 2] = [
        f"  %begin = {whole} fusion(%w), kind=kCustom, calls=%fused_start",
        "  %product = bf16[4096,2048]{1,0} fusion(%w, %x, %begin), kind=kOutput, "
        'calls=%fused_step, backend_config={"estimated_cycles":"70000"}',
        f"  %gathered = {whole} fusion(%w), kind=kCustom, calls=%fused_done",
    ]
    return "\n".join(lines).replace("%fused_matmul", f"{fused}\n%fused_matmul", 1)


def test_a_gather_spread_over_fusions_hides_under_the_matmul_of_one() -> None:
    small = found_in(spread(1024))
    assert small.compute["matmuls"] == approx(4 * MATMUL)
    assert small.compute["elementwise"] == approx(4 * SCALE)
    assert small.exposed["fsdp"] == approx(LOGITS + START)
    assert small.hidden["fsdp"] == approx(4 * (GATHER + START))
    large = found_in(spread(262144))
    assert large.exposed["fsdp"] == approx(4 * (256 * GATHER + START - MATMUL) + LOGITS + START)
    assert large.overlapped == approx(large.seconds - 4 * SCALE)


@pytest.mark.parametrize(
    ("chip", "shape", "gigahertz"),
    [("v4", "4x4x4", 1.05), ("v5e", "4x4", 1.5), ("v5p", "4x4x4", 1.75), ("v3", "4x4", 0.94)],
)
def test_the_clock_is_the_published_one(chip: str, shape: str, gigahertz: float) -> None:
    """It is derived from the peak and what the matrix units do in a cycle."""
    clock = prices_of("", machine=Machine.parse(f"{chip}:{shape}")).clock
    assert clock is not None
    assert clock / 1e9 == approx(gigahertz, rel=0.01)


@pytest.mark.parametrize(
    ("left", "right", "out", "spelled"),
    [
        ("4096,8192", "8192,28672", "4096,28672", "convolution(%l, %r), dim_labels=bf_io->bf"),
        (
            "4096,8192,1", "8192,64,448", "4096,64,448",
            "convolution(%l, %r), window={size=64 pad=63_63 rhs_reversal=1}, dim_labels=bf0_i0o->b0f",
        ),
        (
            "4096,64,128", "64,128,28672", "4096,28672,1",
            "convolution(%l, %r), window={size=64}, dim_labels=b0f_0io->bf0",
        ),
        (
            "8,512,8192", "8,8192,28672", "8,512,28672",
            "dot(%l, %r), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}",
        ),
    ],
)  # fmt: skip
def test_flops_of_a_matmul_do_not_depend_on_its_spelling(
    left: str, right: str, out: str, spelled: str
) -> None:
    """All are 4096 tokens by 8192 by 28672."""
    prices = prices_of(
        f"  %l = bf16[{left}]{{0}} parameter(0)\n  %r = bf16[{right}]{{0}} parameter(1)\n"
        f"  ROOT %m = bf16[{out}]{{0}} {spelled}"
    )
    flops = 2 * 4096 * 8192 * 28672
    assert prices.flops(prices.by_name("main")["m"], "main") == approx(flops)
    assert price(prices, "m", "matmuls") == approx(flops / PEAK / 0.9)  # no cycles are written


def test_a_matmul_that_waits_for_memory_takes_its_bytes() -> None:
    prices = prices_of(
        "  %l = bf16[65536,4096]{1,0} parameter(0)\n  %r = bf16[4096,128]{1,0} parameter(1)\n"
        "  ROOT %m = bf16[65536,128]{1,0} dot(%l, %r), lhs_contracting_dims={1}, "
        'backend_config={"estimated_cycles":"9000000"}'
    )
    moved = 2 * (65536 * 4096 + 4096 * 128 + 65536 * 128)
    assert price(prices, "m", "matmuls") == approx(moved / MEMORY)


def test_what_lies_in_a_cores_own_memory_is_free_unless_it_was_fetched() -> None:
    prices = prices_of(
        "  %a = f32[1048576]{0} parameter(0)\n"
        "  %near = f32[1048576]{0:T(1024)S(1)} negate(%a)\n"
        "  %start = (f32[1048576]{0:T(1024)S(1)}, f32[1048576]{0}, u32[]) copy-start(%a)\n"
        "  %fetched = f32[1048576]{0:T(1024)S(1)} copy-done(%start)\n"
        "  ROOT %sum = f32[1048576]{0} add(%near, %fetched)"
    )
    array = 4 * 2**20 / MEMORY
    assert price(prices, "near") == approx(array)  # read, not written
    assert price(prices, "start") == price(prices, "fetched") == 0
    assert price(prices, "sum") == approx(2 * array)


def test_an_update_in_place_writes_what_it_updates() -> None:
    fused = (
        "%fused_update (p0: bf16[80,8,1024], p1: bf16[1,8,1024], p2: s32[]) -> bf16[80,8,1024] {\n"
        "  %p0 = bf16[80,8,1024]{2,1,0} parameter(0)\n  %p1 = bf16[1,8,1024]{2,1,0} parameter(1)\n"
        "  %p2 = s32[] parameter(2)\n"
        "  ROOT %u = bf16[80,8,1024]{2,1,0} dynamic-update-slice(%p0, %p1, %p2, %p2, %p2)\n}\n"
    )
    prices = prices_of(
        "  %s = bf16[80,8,1024]{2,1,0} parameter(0)\n  %n = bf16[1,8,1024]{2,1,0} parameter(1)\n"
        "  %i = s32[] parameter(2)\n"
        "  ROOT %f = bf16[80,8,1024]{2,1,0} fusion(%s, %n, %i), kind=kLoop, calls=%fused_update",
        fused,
    )
    assert price(prices, "f") == approx((2 * 2 * 8 * 1024 + 4) / MEMORY, rel=1e-3)


def attention(kind: str, result: str, masked: bool) -> str:
    mask = "s16[1,4,4]{2,1,0}, s8[1,4,4]{2,1,0}, " if masked else ""
    return (
        f"  ROOT %splash_mqa_{kind}_segmented.1 = {result} custom-call(), "
        'custom_call_target="tpu_custom_call", operand_layout_constraints={'
        f"{mask}bf16[8,4,4096,128]{{3,2,1,0}}, bf16[8,4096,128]{{2,1,0}}, "
        "bf16[8,4096,128]{2,1,0}, s32[8,4096]{1,0}}, frontend_attributes={kernel_metadata={\n}}"
    )


def test_attention_is_counted_from_its_shapes() -> None:
    rate = PEAK * efficiency.attention(V5P.chip, 128, 4096)
    pairs = 32 * 128 * 4096 * 4096  # heads, head_dim, queries, keys
    out = "(bf16[8,4,4096,128]{3,2,1,0})"
    name = "splash_mqa_fwd_segmented.1"
    causal = prices_of(attention("fwd", out, masked=True))
    assert price(causal, name, "attention") == approx(4 * pairs / 2 / rate)
    whole = prices_of(attention("fwd", out, masked=False))
    assert price(whole, name, "attention") == approx(4 * pairs / rate)


def test_backward_attention_in_two_kernels_does_7_matmuls_for_5() -> None:
    of_keys = "bf16[8,4096,128]{2,1,0}, bf16[8,4096,128]{2,1,0}"
    one = prices_of(attention("dkv", f"(bf16[8,4,4,4096,128]{{4,3,2,1,0}}, {of_keys})", True))
    keys = prices_of(attention("dkv", f"({of_keys})", True))
    queries = prices_of(attention("dq", "(bf16[8,4,4096,128]{3,2,1,0})", True))
    both = price(keys, "splash_mqa_dkv_segmented.1", "attention")
    both += price(queries, "splash_mqa_dq_segmented.1", "attention")
    rate = PEAK * efficiency.attention(V5P.chip, 128, 4096)
    alone = price(one, "splash_mqa_dkv_segmented.1", "attention")
    assert alone == approx(8 * 32 * 128 * 4096 * 4096 / 2 / rate)
    assert both == approx(alone * 7 / 5)


def test_a_kernel_that_is_not_known_is_said() -> None:
    lines = TEXT.replace(
        "  ROOT %tuple.1",
        "  %mine = bf16[4096,2048]{1,0} custom-call(%product), "
        'custom_call_target="tpu_custom_call"\n  ROOT %tuple.1',
    )
    found = found_in(lines)
    assert found.notes == ("kernel mine: only its bytes are counted",)
    assert found.compute["elementwise"] == approx(4 * (SCALE + 4 * 4096 * 2048 / MEMORY))


@pytest.mark.parametrize(
    ("name", "on", "choice"),
    [
        ("tpu_v5e_4", "v5e:2x2", Choice.of(fsdp=4)),
        ("tpu_v5e_16", "v5e:4x4", Choice.of(fsdp=16)),
        ("tpu7x_8", "tpu7x:2x2x1", Choice.of(fsdp=8)),
        ("tpu_slices_2x4", "2*v5e:2x2", Choice.of(dp=2, fsdp=4)),
    ],
)
def test_everything_that_audit_reads_is_sent_once(name: str, on: str, choice: Choice) -> None:
    """In loops, fusions that a gather is spread over, other cores' threads and between slices."""
    text = (Path(__file__).parents[1] / "audits" / "texts" / f"{name}.txt").read_text()
    machine = Machine.parse(on)
    mesh = {axis: size for axis, size in choice.sizes.items() if size > 1}
    step = StepModel(workload(MODEL, machine, 64, 4096), choice)
    found = roofline(text, mesh, step)
    laid = place_axes(machine, choice.sizes)
    expected: dict[str, float] = defaultdict(float)
    for row in collectives(text, mesh):
        seconds = over(laid, row.axes).seconds(row.operation, row.bytes) * row.times
        expected["+".join(row.axes)] += seconds
    assert expected
    sent = {axes: found.exposed[axes] + found.hidden[axes] for axes in found.exposed}
    assert sent == approx(dict(expected))
    assert math.isfinite(found.seconds)


def test_on_v5e_all_gathers_are_partly_hidden_as_they_are_compiled() -> None:
    text = (Path(__file__).parents[1] / "audits" / "texts" / "tpu_v5e_16.txt").read_text()
    machine = Machine.parse("v5e:4x4")
    step = StepModel(workload(MODEL, machine, 64, 4096), Choice.of(fsdp=16))
    found = roofline(text, {"fsdp": 16}, step)
    assert found.hidden["fsdp"] > 0
    assert found.exposed["fsdp"] > found.hidden["fsdp"]


def test_another_mesh_than_the_program_s_is_a_mistake() -> None:
    with pytest.raises(MeshwrightError, match="give the choice that was compiled"):
        roofline(TEXT, {"fsdp": 32, "tp": 2}, StepModel(workload(MODEL, V5P, 64, 4096), CHOICE))


def test_only_tpu_programs_have_cycles() -> None:
    step = StepModel(workload(MODEL, "h100:1x8", 64, 4096), Choice.of(fsdp=8))
    with pytest.raises(MeshwrightError, match="compiled for TPUs"):
        roofline(TEXT, {"fsdp": 8}, step)


def test_every_tpu_has_a_clock_that_its_cycles_can_be_read_by() -> None:
    """A matmul of 2,151,554 cycles by libtpu's count for one core of 7x: 0.85 of its peak."""
    tpus = {name for name, chip in CHIPS.items() if chip.platform == "tpu"}
    assert set(FLOPS_PER_CYCLE) == tpus
    flops, cycles = 2 * 8192 * 4096 * 14336, 2_151_554
    assert 0.7 < flops / cycles / FLOPS_PER_CYCLE["7x"] < 1.0
