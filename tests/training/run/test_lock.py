"""The lock of a run's folder: whether folder and lock at the path are still those of the run."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("existing", ["", "runs", "runs/mine"])
def test_a_run_that_is_refused_leaves_what_was_there(existing: str, tmp_path: Path) -> None:
    (tmp_path / existing).mkdir(parents=True, exist_ok=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="refused"), only_run_in(tmp_path / "runs" / "mine"):
        raise ValueError("refused")
    assert sorted(tmp_path.rglob("*")) == before


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
