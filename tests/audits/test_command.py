"""`meshwright audit`: of a text, and of the step that train would run."""

import gzip
import json
import os
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
    assert shown.startswith(
        "mesh fsdp=16: 18 collectives in a run, 45.0 MiB sent by each device; not judged"
    )
    assert "surprise" not in shown  # no expectations
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
    assert "expected, but missing: reduce-scatter over fsdp" in shown
    audit_command(
        ["--text", str(TEXTS / "gpu_8.txt"), "--mesh=fsdp=8", *EXPECT, "--fail-on=surprise"]
    )
    assert "no surprises" in capsys.readouterr().out


def test_a_rewrite_is_named_and_can_fail_a_build(capsys: pytest.CaptureFixture[str]) -> None:
    expect = ["--expect", "fsdp:all-gather,reduce-scatter/all-reduce"]
    audit_command([*BAD, *expect, "--fail-on", "surprise"])
    shown = capsys.readouterr().out
    assert "no surprises; 2 rewritten by the compiler: all-reduce in place of" in shown
    assert shown.count("\nrewritten: all-reduce over fsdp of bf16[") == 2
    assert "~ rewritten by the compiler" in shown
    assert "not there" not in shown
    for words in (expect, EXPECT):  # a surprise is worse
        with pytest.raises(SystemExit) as ended:
            audit_command([*BAD, *words, "--fail-on", "rewrite"])
        assert ended.value.code == 1
    audit_command(
        ["--text", str(TEXTS / "gpu_8.txt"), "--mesh=fsdp=8", *expect, "--fail-on=rewrite"]
    )


@pytest.mark.parametrize("width", [80, 100, 119, 120, 160])
def test_what_names_a_row_is_never_cut(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    audit_command([*BAD, "--rows", "0"])
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert "…" not in shown
    assert max(len(line) for line in lines[1:]) <= width
    for operation, array in (("all-reduce", "bf16[512,2048]"), ("all-gather", "bf16[1,512,2048]")):
        row = next(line for line in lines if operation in line and array in line)
        assert {operation, "fsdp", array} <= set(row.split())
    head = next(line.split() for line in lines if line.split()[:2] == ["sent", "times"])
    left_out = next((line for line in lines if line.startswith("left out")), "").partition(";")[0]
    columns = ("sent", "times", "operation", "axes", "array", "phase", "how", "scope", "source")
    assert all((name in head) != (name in left_out) for name in columns)
    assert "source" in head
    assert width > 80 or "scope" not in head


def test_a_packed_text_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What prove keeps."""
    packed = tmp_path / "program.hlo.gz"
    packed.write_bytes(gzip.compress(Path(BAD[1]).read_bytes()))
    audit_command(["--text", str(packed), *BAD[2:], "--json"])
    of_packed = capsys.readouterr().out
    audit_command([*BAD, "--json"])
    assert capsys.readouterr().out == of_packed
    packed.write_bytes(packed.read_bytes()[:1000])
    with pytest.raises(MeshwrightError, match="cannot be read"):
        audit_command(["--text", str(packed), *BAD[2:]])


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
        ([*BAD[:2], "--mesh", "fsdp=-1"], "give every size"),
        ([*BAD[:2], "--mesh", "fsdp=4"], "device 15, mesh 'fsdp=4' has 4"),
        ([*BAD, "--batch", "8"], "--text takes --mesh only, not --batch 8"),
        ([*BAD, "--fail-on", "surprise"], "needs the expected collectives of a program"),
        (
            [*BAD, "--fail-on", "rewrite"],
            "--fail-on rewrite needs the expected collectives of a program",
        ),
        ([*BAD, "--fail-on", "warning"], "it can be: surprise, rewrite"),
        ([*BAD, "--expect", "fsdq:all-gather"], "no axis 'fsdq'; did you mean 'fsdp'?"),
        ([*BAD, "--expect", "fsdp:reduce-scatter/all-reduc"], "did you mean 'all-reduce'"),
        ([*BAD[:2], "--mesh", "fsdp=32"], "that has 16 devices, this 32"),
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


def test_a_step_on_axes_of_its_own_must_be_told_what_to_expect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is compiled."""
    rules = tmp_path / "own.rules"
    rules.write_text(
        "batch? -> data\nlength? -> none\nvocab -> none\nheads -> none\nkv_heads -> none\n"
        "mlp -> none\nembed -> data\nhead_dim -> none\nlayers -> none\nnorm -> none\n"
    )
    words = ["tiny", "--mesh", "data=16", "--rules", str(rules), "--batch", "16", "--seq", "64"]
    with pytest.raises(
        MeshwrightError,
        match="the expected collectives of a step on mesh 'data=16' with custom axes; give",
    ):
        audit_command([*words, "--fail-on", "surprise"])
    with pytest.raises(MeshwrightError, match="no axis 'fsdp'; known: data"):
        audit_command([*words, "--expect", "fsdp:all-gather"])


@pytest.mark.slow
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


@pytest.mark.parametrize("flags", [["--rows", "0"], ["--json"]])
def test_a_check_that_fails_says_so_also_where_nobody_reads_it(flags: list[str]) -> None:
    """As in `… --fail-on surprise | head -1`; a full disk is an error."""
    command = [sys.executable, "-m", "meshwright.cli.main", "audit", *BAD, *EXPECT, *flags]
    command += ["--fail-on", "surprise"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: the output cannot be written: No space left")
