"""A plan told: what each report must show, and that its data can be read back."""

import copy
import dataclasses
import html
import io
import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console, Group
from tests.planner.made_plan import made_plan, transfer

import meshwright as mw
from meshwright.audits import wire_bytes
from meshwright.cli.plan import plan_command
from meshwright.cli.train import settings as train_settings
from meshwright.errors import MeshwrightError
from meshwright.machines import Machine
from meshwright.meshes import mesh as build_mesh
from meshwright.models import preset
from meshwright.models.decoder import PRESETS
from meshwright.ops.rope import LinearScaling, Rope, YarnScaling
from meshwright.planner import Run, compare, constraints_of, planned_sizes
from meshwright.planner.report import (
    comparison_page,
    explain,
    find_mesh,
    page,
    plan_data,
    plan_from_data,
    rates,
    read_plan,
    report,
)
from meshwright.planner.report.page import page_data
from meshwright.planner.report.phrases import folded, groups_of, next_commands, short_mesh
from meshwright.planner.result import Choice, Plan, Refusal
from meshwright.present import amount, bar, gib, seconds_text
from meshwright.serving import EngineConfig
from meshwright.training import TrainConfig, with_settings


def printed(group: Group, width: int, **said: Any) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, **said).print(group)
    return out.getvalue().splitlines()


# ---- data ---------------------------------------------------------------------------------------


def test_a_plan_written_as_json_and_read_back_is_the_same_plan(tmp_path: Path) -> None:
    plan = made_plan()
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan_data(plan)))
    assert read_plan(file) == plan


@pytest.mark.parametrize(
    "rope", [Rope(), Rope(5e5, LinearScaling(4.0)), Rope(1e6, YarnScaling(8.0, 4096))]
)
def test_every_model_survives_being_written(rope: Rope) -> None:
    made = made_plan(None)
    planned = [model for name, model in PRESETS.items() if name != "deepseek-v3"]
    for model in [*planned, dataclasses.replace(PRESETS["tiny"], rope=rope)]:
        plan = dataclasses.replace(made, model=model)
        assert plan_from_data(json.loads(json.dumps(plan_data(plan)))).workload.model == model


def test_a_machine_of_ones_own_chip_survives_being_written() -> None:
    chip = dataclasses.replace(mw.CHIPS["h100"], name="mine", memory_bytes=10**11)
    plan = dataclasses.replace(made_plan(), machine=Machine(chip, (2, 8)))
    back = plan_from_data(json.loads(json.dumps(plan_data(plan))))
    assert back.machine == plan.machine
    assert back.machine.chip.source("links") == chip.source("links")


def test_the_keys_of_the_data_are_those_the_documentation_lists() -> None:
    data = plan_data(made_plan())
    text = (Path(__file__).parents[2] / "docs/plan/plan.md").read_text()
    for keys in (data, data["ranked"][0], data["refused"][0], data["ranked"][0]["collectives"][0]):
        for key in keys:
            assert f"`{key}`" in text, key


def test_the_data_says_what_follows_from_its_numbers() -> None:
    data = plan_data(made_plan(cost_per_hour=3.0))
    first = data["ranked"][0]
    assert data["mesh"] == first["mesh"] == "dp=1,fsdp=64,tp=1,sp=1"
    assert first["tokens_per_second"] == 256 * 4096 / 2.0
    assert first["tokens_per_second_per_chip"] == 256 * 4096 / 2.0 / 64
    hours = 1e12 / first["tokens_per_second"] / 3600
    assert first["cost_per_trillion_tokens"] == pytest.approx(hours * 64 * 3.0)
    assert first["memory"]["total"] == sum(first["memory"]["kinds"].values())


def test_numbers_of_numpy_are_written_as_plain_ones() -> None:
    made = made_plan()
    one = dataclasses.replace(made.best, step_seconds=np.float32(2.0), mfu=np.float64(0.5))
    plan = dataclasses.replace(made, ranked=(one,), largest_batch=np.int64(512))
    back = plan_from_data(json.loads(json.dumps(plan_data(plan))))
    assert (back.largest_batch, back.best.step_seconds, back.best.mfu) == (512, 2.0, 0.5)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("mesh",), "fsdp=4,tp=2", ".mesh is 'fsdp=4,tp=2', but the rest of the file gives"),
        (("ranked", 0, "mesh"), "fsdp=4,tp=2", "ranked[0].mesh is 'fsdp=4,tp=2'"),
        (
            ("ranked", 1, "choice", "sizes", "fsdp"),
            64,
            "ranked[1].mesh is 'dp=1,fsdp=16,tp=4,sp=1'",
        ),
        (("machine", "text"), "v5p:4x4x8", "machine.text is 'v5p:4x4x8'"),
        (("machine", "shape"), [4, 4, 8], "machine.text is 'v5p:4x4x4'"),
        (("ranked", 0, "step_seconds"), 9.0, "ranked[0]."),
        (("ranked", 0, "memory", "total"), 1, "ranked[0].memory.total is 1"),
    ],
)
def test_a_file_that_was_edited_in_one_place_only_is_refused(
    path: tuple[Any, ...], value: Any, words: str
) -> None:
    data = json.loads(json.dumps(plan_data(made_plan())))
    with pytest.raises(MeshwrightError, match=re.escape(words)) as caught:
        plan_from_data(_changed(data, path, value))
    assert "\n" not in str(caught.value)


def test_a_choice_that_was_edited_throughout_is_used() -> None:
    data = json.loads(json.dumps(plan_data(made_plan())))
    data["ranked"][1]["choice"] |= {"remat": "none", "accumulation": 4}
    choice = plan_from_data(data).ranked[1].choice
    assert (choice.remat, choice.accumulation) == ("none", 4)


def test_a_plan_is_short_to_look_at() -> None:
    plan = mw.plan("llama-3.1-8b", "v5p:4x4x4", 256, 4096)
    for shown in (repr(plan), repr(plan.best), repr(plan.ranked[1]), repr(plan.refused[0])):
        assert len(shown) < 300
        assert "\n" not in shown
    assert "llama-3.1-8b" in repr(plan)
    assert "v5p:4x4x4" in repr(plan)
    assert plan.mesh in repr(plan)
    assert f"{plan.best.step_seconds:.3g} s" in repr(plan.best)


def _changed(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    data = copy.deepcopy(data)
    place = data
    for key in path[:-1]:
        place = place[key]
    if value is KeyError:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("format",), "something", "is not a plan; `meshwright plan"),
        (("version",), 99, "is of version 99, this Meshwright reads 8; plan again"),
        (("version",), 3, "is of version 3, this Meshwright reads 8; plan again"),
        (("config",), 8, "the plan.config: expected `object`, got `int`"),
        (("config", "batch"), KeyError, "config lacks the key 'batch'"),
        (("config", "batch"), "8", "the plan.config.batch: expected `int`, got `str`"),
        (("config", "batch"), True, "the plan.config.batch: expected `int`, got `bool`"),
        (("config", "batch"), 8, "tokens_per_second is 524288.0, but the rest of the file gives"),
        (("config", "compute", "dtype"), KeyError, "config.compute lacks the key 'dtype'"),
        (("engine",), "swim", "the plan.engine: expected `object | null`, got `str`; plan again"),
        (("model", "heads"), 7, "heads=7 cannot share kv_heads=8"),
        (("model", "rope", "scaling", "kind"), "Odd", "is not a model's config: 'Odd'"),
        (("model",), KeyError, "model is not a model's config"),
        (("machine", "shape"), [4, 4], "v5p machine takes 3 sizes"),
        (("machine", "chip", "host_box"), [1, 1], "host_box: expected `array` of length 3"),
        (("ranked",), {}, "the plan.ranked: expected `array`, got `object`"),
        (("ranked",), [], "the plan ranks no mesh: 'ranked' is empty; plan again"),
        (("ranked", 0, "step_seconds"), float("nan"), "ranked[0].tokens_per_second is"),
        (("ranked", 1, "collectives", 0, "phase"), 3, "ranked[1].collectives[0].phase: expected"),
        (("ranked", 0, "memory", "kinds"), [1], "memory.kinds: expected `object`, got `array`"),
    ],
)
def test_data_that_is_not_a_plan_is_refused_by_the_name_of_its_key(
    path: tuple[Any, ...], value: Any, words: str
) -> None:
    with pytest.raises(MeshwrightError, match=re.escape(words)):
        plan_from_data(_changed(plan_data(made_plan()), path, value))


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_stands_in_the_data_the_answer_is_a_plan_or_a_readable_error(
    drawn: st.DataObject,
) -> None:
    data = DATA
    path: list[Any] = []
    while isinstance(data, dict | list) and data:
        keys = list(data) if isinstance(data, dict) else list(range(len(data)))
        path.append(drawn.draw(st.sampled_from(keys)))
        data = data[path[-1]]
        if drawn.draw(st.integers(0, 4)) == 0:
            break
    value = drawn.draw(LEAVES | st.just([]) | st.just({}) | st.just(KeyError))
    try:
        assert isinstance(plan_from_data(_changed(DATA, tuple(path), value)), Plan)
    except MeshwrightError as mistake:
        assert len(str(mistake)) > 10


DATA = plan_data(made_plan())


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[]", b"null", b'"plan"'])
def test_a_file_that_is_no_plan_is_named(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "odd.json"
    file.write_bytes(content)
    with pytest.raises(MeshwrightError, match=r"odd\.json"):
        read_plan(file)
    with pytest.raises(MeshwrightError, match=r"none\.json' cannot be read"):
        read_plan(tmp_path / "none.json")


# ---- the terminal -------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
@pytest.mark.parametrize("cost", [None, 4.2])
def test_no_line_is_wider_than_the_terminal(width: int, cost: float | None) -> None:
    plan = made_plan(cost)
    texts = [report(plan, width), report(plan, width, refused=True)]
    texts += [explain(plan, one, width) for one in (*plan.ranked, *plan.refused)]
    for text in texts:
        lines = printed(text, width)
        assert max(map(len, lines)) <= width
        assert not any("…" in line for line in lines), "nothing is cut off"


@pytest.mark.parametrize("width", [80, 120])
def test_the_report_shows_every_mesh_with_its_reason(width: int) -> None:
    plan = made_plan()
    text = " ".join(" ".join(printed(report(plan, width), width)).split())
    for one in plan.ranked:
        assert short_mesh(one.choice) in text
        assert one.reason in text
    for part in ("llama-3.1-8b on v5p:4x4x4", "64 chips", "1.05M tokens a step", "65%", "524K",
                 "of 94.0 GiB", "19.5 21%", "4 meshes refused", "batch 512 in one micro-batch", "sequences of 262,144 tokens",
                 "142,415 at 4.2 a chip and hour", "meshwright prove", "meshwright train"):  # fmt: skip
        assert part in text, part


def test_a_warning_and_a_tight_mesh_are_told_in_every_report() -> None:
    made = made_plan()
    full = dataclasses.replace(made.best.memory, kinds={"parameters": 93 * 2**30})
    one = dataclasses.replace(made.best, memory=full)
    plan = dataclasses.replace(made, ranked=(one,), warnings=("rows are long",))
    assert "warning: rows are long" in "\n".join(printed(report(plan, 120), 120))
    assert "93.0 !99%" in "\n".join(printed(report(plan, 120), 120))
    told = "\n".join(printed(explain(plan, one, 120), 120))
    assert "warning: rows are long" in told
    assert "99%, fits, but tight" in told
    assert "</b> rows are long" in page(plan)
    data = plan_data(plan)
    assert data["warnings"] == ["rows are long"]
    assert data["ranked"][0]["memory"]["tight"] is True
    assert data["ranked"][0]["memory"]["reserve"] == round(0.05 * 94 * 2**30)


def test_a_longest_row_beyond_the_models_own_says_so() -> None:
    text = " ".join(" ".join(printed(report(made_plan(), 120), 120)).split())
    assert "sequences of 262,144 tokens" in text
    assert "(the model's own length is 131,072)" in text


def test_a_wide_terminal_shows_more_columns_than_a_narrow_one() -> None:
    heads = {w: printed(report(made_plan(), w), w)[4].split() for w in (80, 120)}
    assert {"mesh", "remat", "step", "MFU"} <= set(heads[80]) < set(heads[120])


def test_colour_is_never_the_only_sign() -> None:
    plan = made_plan()
    plain = printed(report(plan, 100), 100)
    coloured = printed(report(plan, 100), 100, force_terminal=True, color_system="truecolor")
    assert any("\x1b[" in line for line in coloured)
    assert [re.sub(r"\x1b\[[\d;]*m", "", line) for line in coloured] == plain


def test_refusals_that_differ_in_numbers_are_told_once_and_in_full_when_asked() -> None:
    plan = made_plan()
    assert sum(len(members) for members, _ in groups_of(plan.refused)) == len(plan.refused)
    short = "\n".join(printed(report(plan, 120), 120))
    assert "2  for example fsdp=4,tp=16: tp=16 does not divide kv_heads=8" in short
    assert "fsdp=2,tp=32" not in short
    full = "\n".join(printed(report(plan, 120, refused=True), 120))
    for one in plan.refused:
        assert f"{short_mesh(one.choice)}: {one.why}" in full


def test_of_meshes_that_lack_memory_the_nearest_is_named() -> None:
    plan = made_plan()
    first = plan.refused[0]
    assert first.memory is not None
    near = dataclasses.replace(first.memory, kinds={"parameters": 95 * 2**30})
    nearer = Refusal(Choice.of(dp=32, tp=2), "needs 95.0 GiB of 94.0", near)
    plan = dataclasses.replace(plan, refused=(*plan.refused, nearer))
    text = "\n".join(printed(report(plan, 120), 120))
    assert "2  for memory; the nearest is dp=32,tp=2: needs 95.0 GiB" in text


def test_top_says_how_many_meshes_are_left_out() -> None:
    text = "\n".join(printed(report(made_plan(), 120, top=1), 120))
    assert "and 2 meshes after these" in text
    assert "tp=4 is network-bound" not in text


def test_the_commands_are_what_train_understands() -> None:
    plan = made_plan()
    for one in plan.ranked:
        prove, train = next_commands(plan, one.choice)
        config = train_settings(shlex.split(train)[2:])
        assert prove == train.replace("train llama-3.1-8b", "prove llama-3.1-8b --on v5p:4x4x4")
        choice = one.choice
        assert (config.model, config.batch, config.seq) == ("llama-3.1-8b", 256, 4096)
        assert (config.mesh, config.accumulation) == (choice.mesh, choice.accumulation)
        assert config.compute.remat == choice.remat
        assert config.compute.sequence_parallel == choice.sequence_parallel
        assert config.compute.mlp_chunk == choice.mlp_chunk
        assert config.context_parallel == choice.context_parallel


@pytest.mark.parametrize("engine", [None, EngineConfig()], ids=["train", "serve"])
def test_a_proof_is_proposed_where_there_is_a_compiler(engine: EngineConfig | None) -> None:
    """Of a chip of one's own by the plan's file: `--on` knows the catalogue alone."""
    run = "meshwright train" if engine is None else "meshwright serve"
    plan = dataclasses.replace(made_plan(), engine=engine)

    def commands(chip: mw.Chip, number: int = 0, **changes: Any) -> list[str]:
        machine = Machine(chip, (8, 8) if chip.platform == "gpu" else (4, 4, 4))
        on_chip = dataclasses.replace(plan, machine=machine, **changes)
        return next_commands(on_chip, on_chip.ranked[number].choice)

    own = dataclasses.replace(mw.CHIPS["v5p"], name="mine", like="v5p")
    better = dataclasses.replace(mw.CHIPS["v5p"], memory_bytes=2**37)  # of the catalogue's name
    unnamed = with_settings(plan.config, {"model": ""})
    for chip in (own, better):
        assert commands(chip)[0] == "meshwright prove --plan PLAN_JSON"
        assert commands(chip, 2)[0] == "meshwright prove --plan PLAN_JSON --choice 3"
        (alone,) = commands(chip, config=unnamed, model=preset("llama-3.1-8b"))
        assert alone.startswith(run)
    like_l40s = dataclasses.replace(mw.CHIPS["l40s"], name="mine", like="l40s")
    for chip in (mw.CHIPS["mi300x"], mw.CHIPS["l40s"], like_l40s):
        (alone,) = commands(chip)
        assert alone.startswith(run)
    for name in ("v5p", "h100", "a3-mega", "l4"):
        prove, _ = commands(mw.CHIPS[name])
        assert prove.startswith(f"meshwright prove llama-3.1-8b --on {name}:")
    longer = with_settings(plan.config, {"seq": 262144})
    if engine is None:
        assert "PLAN_JSON --override rope.scaling=" in commands(own, config=longer)[0]


def test_another_optimizer_and_dtype_are_in_the_commands() -> None:
    made = made_plan()
    changes = {"optimizer.name": "muon", "compute.param_dtype": "bfloat16"}
    plan = dataclasses.replace(made, config=with_settings(made.config, changes))
    _, train = next_commands(plan, plan.best.choice)
    config = train_settings(shlex.split(train)[2:])
    assert (config.optimizer.name, config.compute.param_dtype) == ("muon", "bfloat16")


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ("--batch 8 --seq 256 --compute.dtype float32", {"--dtype": "float32"}),
        # 96% of an H100, where an engine takes 90%
        ("--batch 450 --seq 1024 --engine.weights plain", {"--engine.memory-fraction": "0.96"}),
        (
            "--requests 1 --prompt 1000 --output 200 --batch 219 --compute.dtype bfloat16",
            {"--engine.memory-fraction": "0.96", "--dtype": "bfloat16"},
        ),
        ("--batch 8 --seq 256", {}),
    ],
)
def test_what_a_plan_of_serving_needs_is_in_its_commands(
    words: str, flags: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    plan_command(["llama-3.1-8b", "--on", "h100:1", "--serve", *shlex.split(words)])
    _, _, said = capsys.readouterr().out.partition("next\n")
    *prove, serve = said.replace("\\\n", "").splitlines()
    for flag in ("--dtype", "--engine.memory-fraction"):
        given = shlex.split(serve)
        value = given[given.index(flag) + 1] if flag in given else None
        assert value == flags.get(flag)
    for line in prove:
        assert ("--dtype float32" in line) == (flags == {"--dtype": "float32"})


@settings(deadline=None)
@given(st.integers(40, 160))
def test_a_folded_command_is_the_same_command(width: int) -> None:
    plan = made_plan()
    for command in next_commands(plan, plan.ranked[2].choice):
        assert shlex.split(folded(command, width).replace("\\\n", " ")) == shlex.split(command)


# ---- explain ------------------------------------------------------------------------------------


def test_a_mesh_is_found_however_it_is_written() -> None:
    plan = made_plan()
    for text in ("fsdp=16,tp=4", "tp=4,fsdp=-1", "1,-1,4,1", "dp:1,fsdp:16,tp:4"):
        assert find_mesh(plan, text) is plan.ranked[1]
    assert find_mesh(plan, "dp=64") is plan.refused[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fsdp=63", "needs 63 devices, 64 are in 'v5p:4x4x4'"),
        ("fsdp=32,dp=2", "was not looked at: the constraints leave it out; looked at were"),
        ("rows=64", "'rows'"),
        ("", "is empty"),
    ],
)
def test_a_mesh_that_is_not_there_is_a_readable_error(text: str, words: str) -> None:
    with pytest.raises(MeshwrightError, match=re.escape(words)):
        find_mesh(made_plan(), text)


def test_explain_fills_in_every_formula() -> None:
    plan = made_plan()
    two = plan.ranked[1]
    text = " ".join(" ".join(printed(explain(plan, two, 120), 120)).split())
    for kind in two.memory.kinds:
        assert kind in text
    for one in two.collectives:
        assert one.what in text
        assert one.link in text
    model = plan.workload.model
    assert f"= {amount(model.flops_per_token(4096), 'FLOP')}" in text
    for part in ("798 TFLOP / 459 TFLOP/s = 1.74 s", "33% more: remat computes again",
                 "1.10 TB / 2.77 TB/s = 398 ms", "together 23.5 of 94.0 GiB that a device gives: 25%, fits",
                 "not counted: 5%, 4.7 GiB",
                 "links: 150 ms, 105 ms of it exposed"):  # fmt: skip
        assert part in text, part


@pytest.mark.parametrize(
    "changes", [{}, {"lora_rank": 16}, {"trainable": ("layers/-1/",)}, {"objective": "dpo"}]
)
def test_flops_that_explain_shows_add_up(changes: dict[str, Any]) -> None:
    made = mw.plan("llama-3.2-1b", "h200:4x8", 64, 4096, mesh="fsdp=32", **changes)
    text = " ".join(" ".join(printed(explain(made, made.best, 120), 120)).split())
    number = r"([0-9.]+) TFLOP"
    found = re.search(rf"an example: {number} of the model ([+-]) {number} .*? = {number}", text)
    assert (found is None) == (not changes)
    if found:
        sign = 1 if found[2] == "+" else -1
        assert float(found[1]) + sign * float(found[3]) == pytest.approx(float(found[4]), rel=0.01)
    device = re.search(rf"a device: {number} × 64 sequences / 32 devices = {number}", text)
    assert device
    assert float(device[1]) * 64 / 32 == pytest.approx(float(device[2]), rel=0.01)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "llama-3.1-70b"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("on", ["7x:4x4x4", "h100:8x8"])
def test_no_step_is_shorter_than_its_roofline(model: str, dtype: str, on: str) -> None:
    changes = {"matmul": "fp8"} if dtype == "fp8" else {"dtype": dtype}
    made = mw.plan(model, on, 512, 4096, remat="full", **changes)
    for one in made.ranked:
        floor = rates.roofline(made, one)
        assert one.step_seconds >= max(floor.compute, floor.memory)


def test_explain_names_small_transfers_without_a_row_for_each() -> None:
    plan = made_plan()
    one = plan.ranked[1]
    small = [transfer(f"scalar {i}", "all-reduce", ("tp",), 4, 1, seconds=1e-6) for i in range(3)]
    one = dataclasses.replace(one, collectives=(*small, *one.collectives))
    text = " ".join(" ".join(printed(explain(plan, one, 120), 120)).split())
    assert "and 3 small ones, 3.00 µs in all: scalar 0, scalar 1, scalar 2" in text


def test_explain_of_a_refused_mesh_says_why_and_what_is_too_large() -> None:
    plan = made_plan()
    text = "\n".join(printed(explain(plan, plan.refused[0], 120), 120))
    assert "refused: needs 120.0 GiB of 94.0" in text
    assert "26.0 GiB too much" in text
    assert "the best that fits is fsdp=64" in text


# ---- numbers ------------------------------------------------------------------------------------


def ring_bytes(operation: str, whole: int, ways: int) -> float:
    """Bytes one device sends, counted hop by hop round a ring of `ways` devices."""
    part = whole / ways
    hops = {"all-gather": ways - 1, "reduce-scatter": ways - 1, "all-reduce": 2 * (ways - 1)}
    return sum(part for _ in range(hops[operation]))


@pytest.mark.parametrize("operation", ["all-gather", "reduce-scatter", "all-reduce"])
def test_bytes_on_the_wire_are_those_of_a_ring(operation: str) -> None:
    assert wire_bytes(operation, 1000, 8) == pytest.approx(ring_bytes(operation, 1000, 8))
    sent = transfer("x", operation, ("fsdp", "sp"), 1000, 3)
    choice = Choice.of(dp=2, fsdp=4, tp=8, sp=2)
    one = dataclasses.replace(made_plan().best, choice=choice, collectives=(sent,))
    summed = rates.by_axis(one)["fsdp+sp"].wire_bytes
    assert summed == pytest.approx(3 * ring_bytes(operation, 1000, 8))


def test_sums_by_axis_hold_every_transfer_once() -> None:
    one = made_plan().ranked[1]
    axes = rates.by_axis(one)
    assert list(axes) == ["tp", "fsdp"], "the longest first"
    assert sum(time.seconds for time in axes.values()) == pytest.approx(
        sum(each.seconds for each in one.collectives)
    )
    assert sum(time.exposed for time in axes.values()) == pytest.approx(one.exposed)


def test_serving_makes_a_token_a_row_and_step() -> None:
    made = made_plan()
    plan = dataclasses.replace(made, engine=EngineConfig())
    assert plan_data(plan)["ranked"][0]["tokens_per_second"] == 256 / 2.0
    lines = printed(report(plan, 120), 120)
    assert "a token" in lines[4]
    assert "remat" not in lines[4]
    assert "serving, weights bfloat16" in lines[2]
    assert not any("meshwright train" in line for line in lines)


def test_two_cores_of_a_chip_share_what_it_has() -> None:
    plan = dataclasses.replace(made_plan(), machine=Machine.parse("7x:4x4x4"))
    assert rates.peak_flops(plan) == mw.CHIPS["7x"].bf16_flops / 2
    assert rates.per_chip(plan, plan.best) == plan.tokens_per_second(plan.best) / 64


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (seconds_text(0.0), "0"), (seconds_text(2.0), "2.00 s"), (seconds_text(0.4561), "456 ms"),
        (seconds_text(7.84e-6), "7.84 µs"), (seconds_text(3900), "1 h 5 min"),
        (amount(0), "0"), (amount(950), "950"), (amount(1234567), "1.23M"), (amount(999600), "1.00M"),
        (amount(9.89e14, "FLOP"), "989 TFLOP"), (amount(0.5), "0.500"), (amount(5e16), "50,000T"),
        (gib(0), "0.0"), (gib(2**29), "0.50"), (gib(2**20), "0.001"), (gib(1500 * 2**30), "1,500.0"),
        (bar(0.5, 4), "██  "), (bar(1.7, 4), "████"), (bar(0.0, 4), "    "), (bar(1 / 32, 4), "▏   "),
        (short_mesh(Choice.of()), "fsdp=1"),
    ],
)  # fmt: skip
def test_numbers_are_short_and_keep_their_size(shown: str, text: str) -> None:
    assert shown == text


# ---- the page -----------------------------------------------------------------------------------


def test_the_page_needs_nothing_from_outside() -> None:
    text = page(made_plan())
    assert text.startswith("<!doctype html>")
    outside = set(re.findall(r"https?://[^\s\"'`]+", text))
    assert outside <= {"http://www.w3.org/2000/svg"}, "a name, never fetched"
    assert not re.search(r"\b(src|href)\s*=|@import|url\(|fetch\(", text)


def test_the_page_copies_commands_and_slides_to_other_sizes() -> None:
    machine = Machine.parse("h100:8")
    config = TrainConfig("tiny", batch=32, seq=128)
    found = planned_sizes(config, machine, constraints_of(config), of_batch=(0.25, 0.5, 1, 2, 4))
    assert {one.machine.num_chips for one in found} == {2, 4, 8, 16, 32}
    assert {one.batch for one in found} == {8, 16, 32, 64, 128}
    own = [one for one in found if one.batch == 32]
    curved = planned_sizes(config, machine, constraints_of(config))
    assert own == curved
    text = page(made_plan(), sizes=found)
    assert 'id="sizeBatch" type="range"' in text
    assert "navigator.clipboard.writeText" in text
    assert 'type="range"' not in page(made_plan())


def test_a_page_of_machines_compared_has_every_reason_and_needs_nothing_from_outside() -> None:
    config = TrainConfig("tiny", batch=64, seq=128)
    machines = [Machine.parse("h100:8"), Machine.parse("v5e:2x4")]
    found = compare(config, [*machines, Machine.parse("l4:1")], Run(1e9, within=600.0))
    text = comparison_page(found, planned_sizes(config, machines[0], constraints_of(config)))
    for one in found.offers:
        assert str(one.machine) in text
        assert html.escape(one.estimate.reason) in text
    for other in found.refused:
        assert html.escape(other.why) in text
    assert "meshwright plan tiny --on" in text
    outside = set(re.findall(r"https?://[^\s\"'`]+", text))
    assert outside <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\b(src|href)\s*=|@import|url\(|fetch\(", text)


def test_a_name_on_the_page_cannot_become_code() -> None:
    made = made_plan()
    config = dataclasses.replace(made.config, model="</script><script>alert(1)</script>")
    text = page(dataclasses.replace(made, config=config))
    assert text.count("<script>") == 1
    assert "alert(1)" in text


@pytest.mark.parametrize("machine", ["v5p:16x16x16", "h100:128x8", "2*v6e:16x16", "7x:4x4x4"])
def test_a_page_of_thousands_of_chips_is_small_with_every_device_in_place(
    machine: str,
) -> None:
    made = made_plan()
    on = Machine.parse(machine)
    choice = Choice.of(fsdp=on.num_devices // 32, tp=8, sp=4)
    one = dataclasses.replace(made.ranked[1], choice=choice)
    plan = dataclasses.replace(made, machine=on, ranked=(one,) * 200)
    text = page(plan)
    assert len(text) < 3e6
    first = page_data(plan)["rows"][0]
    assert sorted(first["order"]) == list(range(on.num_devices))
    placed = build_mesh(choice.mesh, machine=on)
    assert first["order"][-1] == placed.devices[0, -1, -1, -1].id
    assert first["extents"] == [placed.axis_extent(axis) for axis in ("dp", "fsdp", "tp", "sp")]
