"""`meshwright prove` from the command line, with mistakes."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.cli.main import main
from meshwright.cli.prove import prove_command
from meshwright.models import preset
from meshwright.planner.report import plan_data, read_plan
from meshwright.proofs.footprint import footprint, out_of_memory

pytestmark = pytest.mark.usefixtures("fast_proofs")
STEP = ["tiny", "--on", "cpu:8", "--mesh", "fsdp=2,tp=4", "--batch", "8", "--seq", "64"]


@pytest.fixture(scope="module", autouse=True)
def kept(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One cache for all of them: the same step is compiled once."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MESHWRIGHT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def said(capsys: pytest.CaptureFixture[str], words: list[str]) -> str:
    """The one line that a mistake gives."""
    with pytest.raises(SystemExit) as ended:
        main(["prove", *words])
    assert ended.value.code == 2
    return capsys.readouterr().err.strip()


def test_it_says_that_a_step_fits_and_how_far_the_plan_was_off(
    capsys: pytest.CaptureFixture[str],
) -> None:
    prove_command([*STEP, "--rows", "1"])
    shown = capsys.readouterr().out
    assert shown.startswith("fits: ")
    assert "memory of a device" in shown
    assert "no surprises" in shown


def test_json_holds_everything(capsys: pytest.CaptureFixture[str]) -> None:
    prove_command([*STEP, "--json"])
    data = json.loads(capsys.readouterr().out)
    assert data["fits"] is True
    assert data["audit"]["surprises"] == 0
    off = {one["what"]: one["off"] for one in data["compared"]}
    assert abs(off["all-gather over fsdp"]) < 0.01


def test_a_plan_is_proved_as_it_was_made(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    made = mw.plan("tiny", "cpu:8", batch=8, seq=64, mesh="fsdp=2,tp=4", loss_chunk=128)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan_data(made)))
    prove_command(["--plan", str(file), "--json"])
    data = json.loads(capsys.readouterr().out)
    assert data["mesh"] == made.mesh
    by_plan = next(one for one in data["compared"] if one["what"] == "memory of a device")
    assert by_plan["planned"] == made.best.memory.total


@pytest.mark.slow
def test_a_plan_of_a_chip_of_ones_own_is_proved_on_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The compiler's process gets its figures: no text names it."""
    file, catalogue = tmp_path / "plan.json", tmp_path / "mine.toml"
    words = [word if word != "cpu:8" else "mine:8" for word in STEP]
    catalogue.write_text('[chips.mine]\nlike = "cpu"\nmemory_bytes = 123_000_000_000\n')
    main(["plan", *words, "--catalogue", str(catalogue), "--json"])
    file.write_text(capsys.readouterr().out)
    prove_command(["--plan", str(file), "--json"])
    data = json.loads(capsys.readouterr().out)
    assert (data["machine"], data["fits"]) == ("mine:8", True)
    assert data["memory"]["limit"] == read_plan(file).best.memory.limit


def test_a_plan_with_an_edited_mesh_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    data = plan_data(mw.plan("tiny", "cpu:8", batch=8, seq=64))
    data["ranked"][0]["mesh"] = "dp=1,fsdp=2,tp=4,sp=1"
    file.write_text(json.dumps(data))
    line = said(capsys, ["--plan", str(file)])
    assert "ranked[0].mesh is 'dp=1,fsdp=2,tp=4,sp=1', but the rest of the file gives" in line
    assert "\n" not in line


def test_a_plan_without_a_loop_over_layers_is_proved_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "plan.json"
    made = mw.plan("tiny", "cpu:8", batch=8, seq=64, layers="unroll")
    file.write_text(json.dumps(plan_data(made)))
    proved: list[Any] = []

    def stop(config: Any, *_: Any, **__: Any) -> None:
        proved.append(config)
        raise mw.MeshwrightError("as far as this")

    monkeypatch.setattr("meshwright.cli.prove_train.prove", stop)
    with pytest.raises(mw.MeshwrightError, match="as far as this"):
        prove_command(["--plan", str(file)])
    assert proved[0].compute.layers == "unroll"


def test_a_mesh_can_be_left_to_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    words = [word if word != "fsdp=2,tp=4" else "auto" for word in STEP]
    prove_command([*words, "--compute.remat", "full", "--json"])
    heard = capsys.readouterr()
    assert "mesh auto: " in heard.err
    assert "remat full" in heard.err
    assert json.loads(heard.out)["mesh"] != "auto"


def test_an_engines_steps_are_proved_in_the_dtype_that_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    steps: list[Any] = []

    def stop(step: Any, *_: Any, **__: Any) -> None:
        steps.append(step)
        raise mw.MeshwrightError("as far as this")

    monkeypatch.setattr("meshwright.cli.prove_serve.prove_serving", stop)
    file = tmp_path / "plan.json"
    for dtype in ("bfloat16", "auto"):
        made = mw.plan("tiny", "cpu:4", batch=8, seq=64, kind="serve", dtype=dtype)
        file.write_text(json.dumps(plan_data(made)))
        words = ["tiny", "--on", "cpu:4", "--serve", "--batch", "8", "--seq", "64"]
        for asked in (["--plan", str(file)], [*words, "--dtype", dtype], words):
            with pytest.raises(mw.MeshwrightError, match="as far as this"):
                prove_command(asked)
    assert [step.dtype for step in steps] == ["bfloat16", "bfloat16"] + 4 * ["float32"]
    with pytest.raises(mw.MeshwrightError, match="dtype 'float16' is none of"):
        prove_command([*words, "--dtype", "float16"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (STEP[:1] + STEP[3:], "--on says for which machine"),
        ([*STEP, "--fail-on", "everything"], "surprise, rewrite, memory"),
        ([*STEP, "--choice", "1"], "give it too: --plan FILE"),
        (["--plan", "absent.json"], "absent.json"),
        ([STEP[0], "--on", "v5q:4x4", *STEP[3:]], "did you mean"),
        ([*STEP[:-1], "1000000"], "longer than the model allows"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = said(capsys, words)
    assert line.startswith("error: ")
    assert message in line
    assert "\n" not in line


def test_own_rules_cannot_be_judged_and_that_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "own.rules"
    split = [f"{dim} -> tp" for dim in ("vocab", "heads", "kv_heads", "mlp")]
    whole = [f"{dim} -> none" for dim in ("embed", "head_dim", "layers", "norm")]
    file.write_text("\n".join(["batch? -> dp+fsdp", "length? -> sp", *split, *whole]))
    line = said(capsys, [*STEP, "--rules", str(file), "--fail-on", "surprise"])
    assert "needs to know what belongs to the step" in line
    assert "\n" not in line  # before anything is compiled


def test_a_plan_of_a_model_without_a_name_says_where_to_prove_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan_data(mw.plan(preset("tiny"), "cpu:8", batch=8, seq=64))))
    assert "names no model; prove it in Python" in said(capsys, ["--plan", str(file)])


# ---- what the TPU compiler says of memory, shortened

EARLY = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
    "(19.56G) exceeds available HBM (15.75G)."
)
LATE = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 17.12G of 15.75G hbm. Exceeded hbm capacity by 1.37G.

  Largest program allocations in hbm:

  1. Size: 1002.00M
     Operator: op_name="jit(train)/transpose(jvp())/scatter-add" source_file="x.py"
     Shape: f32[128256,2048]{1,0:T(8,128)}
     Unpadded size: 1002.00M

  2. Size: 512.00M
     Shape: bf16[16,2,2048,32,64]{4,3,2,1,0}
"""
REPORT = """Memory Space: default (color=0)
Total bytes: 1411068928 (1.31GiB)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
  296.75MiB( 29%);  296.75MiB;    648790016;                2; bf16[75968,2048], bf16[9496,16,8,128]
    1.00GiB(100%);   128.0KiB;    166232064;                6; s32[2048], 5×f32[28,1024]
"""


def test_both_forms_of_out_of_memory_are_understood() -> None:
    early, late = out_of_memory(EARLY), out_of_memory(LATE)
    assert early is not None
    assert late is not None
    assert early.early
    assert not late.early
    assert (early.needed, early.limit) == (int(19.56 * 2**30), int(15.75 * 2**30))
    assert (late.needed, late.limit) == (int(17.12 * 2**30), int(15.75 * 2**30))
    assert [one.bytes for one in late.buffers] == [1002 * 2**20, 512 * 2**20]
    assert "scatter-add" in late.buffers[0].arrays
    assert out_of_memory("INTERNAL: something else") is None


def test_the_buffer_assignment_is_the_footprint_on_tpus() -> None:
    sizes = {"argument": 447, "output": 447, "alias": 447, "temp": 1084, "generated_code": 1000}
    machine = mw.Machine.parse("v5e:4x4")
    found = footprint(machine, sizes, REPORT)
    assert found.total == 1411068928 + 1000
    assert found.limit == int(15.75 * 2**30)
    assert found.buffers[0].bytes == int(296.75 * 2**20)
    assert len(found.buffers) == 2
    assert footprint(mw.Machine.parse("h200:1"), sizes, None).total == 447 + 1084


@pytest.mark.slow
def test_a_plan_of_serving_is_proved_as_it_was_made(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    chip = dataclasses.replace(mw.CHIPS["cpu"], name="mine", like="cpu")
    machine = mw.Machine(chip, (4,))
    made = mw.plan("tiny", machine, batch=8, seq=64, kind="serve", dtype="bfloat16")
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan_data(made)))
    prove_command(["--plan", str(file), "--choice", "2", "--json"])
    data = json.loads(capsys.readouterr().out)
    assert (data["machine"], data["mesh"]) == ("mine:4", made.ranked[1].choice.mesh)
    assert data["decode"]["fits"]
    compared = {one["what"]: one for one in data["decode"]["compared"]}
    assert compared["memory of a device"]["planned"] == made.ranked[1].memory.total
    assert data["decode"]["audit"]["surprises"] == 0
