"""The lock of a run's folder: whether folder and lock at the path are still those of the run."""

import fcntl
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

import pytest

from meshwright.errors import MeshwrightError
from meshwright.training.run import LostFolderError, only_run_in


def replaced_by_another_run(run: Path) -> None:
    shutil.rmtree(run)
    with only_run_in(run):
        pass


def replaced_by_a_link(run: Path) -> None:
    run.rename(run.with_name("moved"))
    run.with_name("other").mkdir()
    run.symlink_to(run.with_name("other"))


def lock_of_another_run(run: Path) -> None:
    (run / ".lock").unlink()
    with only_run_in(run):
        pass


def replaced_by_a_file(run: Path) -> None:
    shutil.rmtree(run)
    run.write_text("a file")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (shutil.rmtree, "the run's folder {run} was deleted or moved. "),
        (lambda run: run.rename(run.with_name("moved")), "folder {run} was deleted or moved. "),
        (lambda run: run.parent.rename(run.parent.with_name("moved")), "was deleted or moved. "),
        (replaced_by_a_link, "folder {run} was deleted or moved. "),
        (replaced_by_a_file, "folder {run} was deleted or moved. "),
        (replaced_by_another_run, "folder {run} was replaced by that of process "),
        (lambda run: (run / ".lock").unlink(), "the run's lock {run}/.lock was deleted. "),
        (lock_of_another_run, "the run's lock {run}/.lock was replaced by that of process "),
    ],
)  # fmt: skip
def test_a_run_notices_that_its_folder_or_lock_is_no_longer_its_own(
    change: Callable[[Path], object], told: str, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "mine"
    with only_run_in(run) as check_owned:
        check_owned()
        change(run)
        with pytest.raises(LostFolderError) as error:
            check_owned()
    assert told.format(run=run) in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_written_beside_the_lock_does_not_matter(tmp_path: Path) -> None:
    with only_run_in(tmp_path / "run") as check_owned:
        (tmp_path / "run" / "checkpoints").mkdir()
        (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
        check_owned()
        shutil.rmtree(tmp_path / "run" / "checkpoints")
        check_owned()


def test_a_folder_by_a_relative_path_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with only_run_in(Path("run")) as check_owned:
        monkeypatch.chdir("/")
        check_owned()


def refused(run: AbstractContextManager[object]) -> None:
    error = ValueError("refused")
    assert not run.__exit__(ValueError, error, error.__traceback__)


@pytest.mark.parametrize("existing", ["", "runs", "runs/mine"])
def test_a_run_that_is_refused_removes_the_folders_that_it_made(
    existing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(existing).mkdir(parents=True, exist_ok=True)
    before = sorted(tmp_path.rglob("*"))
    run = only_run_in(Path("runs/mine"))
    run.__enter__()
    monkeypatch.chdir("/")
    refused(run)
    there = [path for path in sorted(tmp_path.rglob("*")) if path.name != ".lock"]
    assert there == before


def test_a_folder_that_cannot_be_made_leaves_none_above_it(tmp_path: Path) -> None:
    name = "x" * 300
    with pytest.raises(MeshwrightError, match="File name too long"):
        only_run_in(tmp_path / "runs" / name).__enter__()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("third", [False, True])
def test_a_run_does_not_take_a_lock_that_a_refused_run_removed(
    third: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run ends after the second opened its lock; then a third may come."""
    first, third_run = only_run_in(tmp_path / "run"), only_run_in(tmp_path / "run")
    first.__enter__()
    flock = fcntl.flock

    def after_the_first_ended(file: IO[bytes], how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        refused(first)
        if third:
            third_run.__enter__()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", after_the_first_ended)
    if third:
        with pytest.raises(MeshwrightError, match="another run is writing to"):
            only_run_in(tmp_path / "run").__enter__()
        third_run.__exit__(None, None, None)
    else:
        with only_run_in(tmp_path / "run") as check_owned:
            check_owned()
    assert (tmp_path / "run" / ".lock").exists()


def test_a_run_makes_a_folder_again_that_a_refused_run_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, mkdir = only_run_in(tmp_path / "runs" / "first"), os.mkdir
    first.__enter__()

    def after_the_first_ended(path: Path) -> None:
        monkeypatch.setattr(os, "mkdir", mkdir)
        refused(first)
        mkdir(path)

    monkeypatch.setattr(os, "mkdir", after_the_first_ended)
    with only_run_in(tmp_path / "runs" / "second") as check_owned:
        check_owned()


def test_a_refused_run_leaves_a_folder_that_another_process_made_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = os.mkdir

    def made_by_another(path: Path) -> None:
        monkeypatch.setattr(os, "mkdir", mkdir)
        mkdir(path)
        mkdir(path)

    monkeypatch.setattr(os, "mkdir", made_by_another)
    run = only_run_in(tmp_path / "runs" / "mine")
    run.__enter__()
    refused(run)
    assert list(tmp_path.rglob("*")) == [tmp_path / "runs"]


def test_a_run_that_fails_after_it_wrote_keeps_its_folder_and_lock(tmp_path: Path) -> None:
    def fail() -> None:
        (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
        raise ValueError("late")

    with pytest.raises(ValueError, match="late"), only_run_in(tmp_path / "run"):
        fail()
    assert {path.name for path in (tmp_path / "run").iterdir()} == {".lock", "metrics.jsonl"}
    with pytest.raises(ValueError, match="again"), only_run_in(tmp_path / "run"):
        raise ValueError("again")
    assert (tmp_path / "run" / ".lock").exists()
