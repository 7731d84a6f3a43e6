"""A disk that fills up, at any moment of a run: one line, exit code 2, and no checkpoint lost."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.patience import PATIENCE_S
from tests.processes import run_commands
from tests.training.test_loop import MODEL

from meshwright import files
from meshwright.checkpoint import Checkpoints
from meshwright.checkpoint.restore import advice
from meshwright.errors import MeshwrightError
from meshwright.training.run import LiveLine, MetricsLog, only_run_in, read_metrics

SETTINGS = ["--batch", "4", "--seq", "32", "--steps", "6"]


@pytest.fixture
def train(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return ["train", str(tmp_path / "config.json"), *SETTINGS]


def test_a_run_on_a_disk_that_fills_up_continues_to_the_end_and_loses_no_checkpoint(
    train: list[str], tmp_path: Path
) -> None:
    """The first run cannot write its page; in the second, no file may exceed 40 kB: no save fits."""
    run = tmp_path / "run"
    (run / "run.html").mkdir(parents=True)  # in the way
    first, full = run_commands(
        [*train, "--run", str(run), "--stop-at", "2"],
        ("[limit]", "40000"),
        [*train, "--run", str(run), "--checkpoint.every", "2"],
    )
    assert first.code == 2
    assert first.err.startswith("error: step 2 is saved, but ")
    assert first.err.count("\n") == 1
    assert full.code == 2
    assert full.err.startswith("error: step 6 was not saved: ")
    assert full.err.count("\n") == 1
    assert full.out.count("warning: step 4 was not saved") == 1
    assert "step 6/6" in full.out, "it trained to the end"
    checkpoints = Checkpoints(run / "checkpoints")
    assert (checkpoints.steps(), checkpoints.healthy()) == ([2], [2])
    assert "Intact checkpoints" in advice(checkpoints.folder, damaged=6)
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["step-00000002"]
    assert read_metrics(run).column("loss")[0] == [1, 2, 3, 4, 5, 6]


def test_a_disk_that_is_full_from_the_start_is_an_error_before_anything_slow(
    train: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    [ended] = run_commands(("[limit]", "0"), [*train, "--run", str(run)])
    assert ended.code == 2
    assert ended.err == f"error: {str(run)!r} cannot be written: File too large\n"
    assert "compiled" not in ended.out


@pytest.mark.slow
def test_a_mounted_disk_without_space_is_one_line_at_any_size(
    train: list[str], tmp_path: Path
) -> None:
    """True ENOSPC: memory as a disk, in a namespace of the program's own; from nothing to plenty."""
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=1m none {disk}"
    if (
        not shutil.which("unshare")
        or subprocess.run([*inside, mount], capture_output=True).returncode
    ):
        pytest.skip("this machine lets nobody mount a small disk")
    program = f"""
import json, os, subprocess, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.processes import run_commands
from pathlib import Path
found = []
train = {[*train, "--checkpoint.every", "2"]!r}
for size, filled in ((64, 64), (400, 0), (1400, 0)):
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={{size}}k", "none", {str(disk)!r}], check=True)
    if filled:
        Path({str(disk)!r}, "filler").write_bytes(bytes(filled * 1024))
    [ended] = run_commands([*train, "--run", {str(disk / "run")!r}])
    steps = sorted(p.name for p in Path({str(disk)!r}).glob("run/checkpoints/*"))
    found.append((ended.code, ended.out, ended.err, steps))
    subprocess.run(["umount", {str(disk)!r}], check=True)
print(json.dumps(found))
"""
    done = subprocess.run(
        [*inside, 'exec "$0" -c "$1"', sys.executable, program],
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    at_start, first_save, second_save = json.loads(done.stdout.splitlines()[-1])
    for code, _, err, _ in (at_start, first_save, second_save):
        assert code == 2
        assert "Traceback" not in err
    assert at_start[2].startswith(f"error: '{disk / 'run'}' cannot be written: No space left")
    assert (
        f"step 6 was not saved: the disk of {disk / 'run' / 'checkpoints'} is full"
        in (first_save[2])
    )
    assert first_save[3] == []
    assert "step 6 was not saved" in second_save[2]
    assert second_save[3] != [], "a complete checkpoint stays"


def test_a_lock_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    """/dev/full answers every write with ENOSPC."""
    (tmp_path / ".lock").symlink_to("/dev/full")
    with pytest.raises(MeshwrightError, match="cannot be written") as error, only_run_in(tmp_path):
        pass
    assert "\n" not in str(error.value)


def test_output_to_a_full_disk_does_not_stop_a_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_warned", set())
    full = os.fdopen(os.open("/dev/full", os.O_WRONLY), "w")
    live = LiveLine(10, file=full)
    for step in range(3):
        live.update({"step": step, "loss": 1.0})
        live.print("a line")
    live.close()
    assert capsys.readouterr().err.count("No space left on device; the command continues") == 1
    with pytest.raises(OSError, match="No space left"):
        full.close()


def test_output_that_was_lost_is_an_error_at_the_end(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "meshwright.cli.main", "machines"],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == (
        "error: the output cannot be written: No space left on device; free some space, or use "
        "another disk\n"
    )


@pytest.mark.parametrize(
    ("inside", "code", "said"),
    [
        ("print('lost'); raise SystemExit(7)", 7, ""),  # not hidden by output that was lost
        (
            "print_line('lost')",
            0,
            "warning: the output cannot be written: No space",
        ),  # a run's line
    ],
)
def test_output_that_was_lost_does_not_change_how_a_run_ends(
    inside: str, code: int, said: str
) -> None:
    program = (
        "from meshwright.files import output_is_written, print_line\n"
        f"with output_is_written(): {inside}\n"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, timeout=PATIENCE_S,
            env=os.environ | {"PYTHONUNBUFFERED": ""}, text=True,
        )  # fmt: skip
    assert done.returncode == code
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == bool(said)


def test_a_tracker_that_fails_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_warned", set())

    class Tracker:
        def write(self, step: int, numbers: object) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            raise AssertionError("it was left out")

    with MetricsLog(tmp_path) as log:
        log._sinks.append(Tracker())
        log.write(1, {"loss": 1.0})
        log.write(2, {"loss": 1.0})
    assert read_metrics(tmp_path).column("loss")[0] == [1, 2]
    assert capsys.readouterr().err.count("Tracker failed") == 1
