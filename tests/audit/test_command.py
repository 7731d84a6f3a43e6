"""`meshwright audit`: of a text, and of the step that train would run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.cli.audit import audit_command
from meshwright.errors import MeshwrightError

TEXTS = Path(__file__).parent / "texts"
BAD = ["--text", str(TEXTS / "tpu_v5e_16.txt"), "--mesh", "fsdp=16"]
EXPECT = ["--expect", "fsdp:all-gather,reduce-scatter"]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_a_text_is_shown_by_axis_and_by_row(capsys: pytest.CaptureFixture[str]) -> None:
    audit_command(BAD)
    shown = capsys.readouterr().out
    assert shown.startswith("mesh fsdp=16: 18 collectives in a run, 45.0 MiB sent by each device\n")
    assert "surprise" not in shown  # nothing was said of what to expect
    assert "bf16[512,2048]" in shown
    assert "audit/programs.py:31" in shown
    assert "largest buffers on a device" in shown


def test_a_surprise_is_named_and_can_fail_a_build(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        audit_command([*BAD, *EXPECT, "--fail-on", "surprise"])
    assert ended.value.code == 1
    shown = capsys.readouterr().out
    assert shown.count("surprise: all-reduce over fsdp of bf16[") == 2
    assert "tests/audit/programs.py:31" in shown
    assert "expected, but not there: reduce-scatter over fsdp" in shown
    audit_command(
        ["--text", str(TEXTS / "gpu_8.txt"), "--mesh=fsdp=8", *EXPECT, "--fail-on=surprise"]
    )
    assert "no surprises" in capsys.readouterr().out


def test_data_is_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    audit_command([*BAD, *EXPECT, "--json"])
    data = json.loads(capsys.readouterr().out)
    assert data["surprises"] == 2
    assert {row["source"] for row in data["rows"] if not row["planned"]} == {
        "tests/audit/programs.py:31"
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--text", "nowhere.hlo", "--mesh", "fsdp=4"], "'nowhere.hlo' cannot be read"),
        (BAD[:2], "--text needs --mesh"),
        ([*BAD[:2], "--mesh", "fsdp=-1"], "every size must be said"),
        ([*BAD[:2], "--mesh", "fsdp=4"], "device 15, mesh 'fsdp=4' has 4"),
        ([*BAD, "--batch", "8"], "--text takes --mesh only, not --batch 8"),
        ([*BAD, "--fail-on", "surprise"], "needs to know what a program may send"),
        ([*BAD, "--fail-on", "warning"], "it can be: surprise"),
        ([*BAD, "--expect", "fsdp"], "is not AXES:OPERATIONS"),
        ([*BAD, "--expect", "fsdp:gather"], "is not a collective"),
        ([*BAD, "--rows", "many"], "is not a whole number"),
        ([*BAD, "--expect"], "--expect needs a value"),
    ],
)
def test_mistakes_are_explained(words: list[str], message: str) -> None:
    with pytest.raises(MeshwrightError) as mistake:
        audit_command(words)
    assert message in str(mistake.value)


def test_a_step_needs_no_data_and_has_no_surprises() -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "meshwright.cli.audit", "tiny", "--cpu-devices", "8",
            "--mesh", "fsdp=4,tp=2", "--batch", "8", "--seq", "64", "--data", "nowhere.store",
            "--json", "--fail-on", "surprise",
        ],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["mesh"] == {"fsdp": 4, "tp": 2, "dp": 1, "sp": 1}
    assert data["surprises"] == 0
    assert ["fsdp", "all-gather"] in [[*one["axes"], one["operation"]] for one in data["by_axis"]]
