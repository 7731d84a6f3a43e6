"""Which folders are checkpoints, which are kept, and what killed processes left."""

import contextlib
import shutil
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshwright as mw
from meshwright.checkpoint import Checkpoints
from meshwright.checkpoint import checkpoints as checkpoints_module
from meshwright.checkpoint import folder as folder_module
from meshwright.checkpoint.folder import steps_to_delete

TREE = {"w": jnp.ones((4, 4))}


def test_the_last_and_the_round_ones_are_kept(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep_last=2, keep_every=4) as checkpoints:
        for step in range(1, 10):
            checkpoints.save(step, TREE, {})
        checkpoints.wait()
        assert checkpoints.steps() == [4, 8, 9]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000004",
        "step-00000008",
        "step-00000009",
    ]


def test_one_that_cannot_be_deleted_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(folder: Path, step: int) -> None:
        raise PermissionError("not allowed")

    monkeypatch.setattr(folder_module, "delete", refuse)
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        checkpoints.save(1, TREE, {}, wait=True)
        checkpoints.save(2, TREE, {}, wait=True)
        assert checkpoints.steps() == [1, 2]
    said = "warning: step 2 is saved, but step 1 cannot be deleted: not allowed\n"
    assert capsys.readouterr().err == said


def test_of_an_old_one_that_is_a_link_the_link_is_deleted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    with Checkpoints(folder, keep_last=1) as checkpoints:
        checkpoints.save(1, TREE, {}, wait=True)
        (folder / "step-00000001").rename(elsewhere)
        (folder / "step-00000001").symlink_to(elsewhere)
        (folder / ".deleting-00000009").symlink_to(elsewhere)  # as an earlier version left it
        checkpoints.save(2, TREE, {}, wait=True)
    assert [path.name for path in folder.iterdir()] == ["step-00000002"]
    assert (elsewhere / "checkpoint.json").is_file()
    said = f"step 1 was a link, which is deleted; what it led to is left: {elsewhere}\n"
    assert capsys.readouterr().err == f"warning: {said}"


def test_a_folder_made_again_under_a_save_is_no_checkpoint_and_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    list_files = checkpoints_module.list_files

    def deleted_and_made_again(saving: Path) -> dict[str, tuple[int, int | None]]:
        shutil.rmtree(tmp_path / "run")
        (saving / "arrays").mkdir(parents=True)  # as Orbax does
        return list_files(saving)

    monkeypatch.setattr(checkpoints_module, "list_files", deleted_and_made_again)
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, TREE, {})
        with pytest.raises(mw.MeshwrightError, match=r"saving-00000001 was deleted or moved"):
            checkpoints.wait()
        assert checkpoints.steps() == []
    assert (tmp_path / "run" / ".saving-00000001" / "arrays").is_dir()


@pytest.mark.parametrize("calls", [0, 1, 2, 3])
def test_nothing_is_completed_marked_or_deleted_in_a_folder_that_is_not_the_runs(
    calls: int, tmp_path: Path
) -> None:
    """`calls`: how often the folder is still the run's while it saves."""
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        for step in (1, 2, 3):
            Checkpoints(tmp_path, keep_last=None).save(step, TREE, {}, wait=True)
        left = iter(range(calls))

        def check_owned() -> None:
            if next(left, None) is None:
                raise mw.MeshwrightError("the folder is another run's")

        checkpoints.check_owned = check_owned
        with contextlib.suppress(mw.MeshwrightError):
            checkpoints.save(4, TREE, {}, wait=True)
        # to begin, to delete 1, to delete 2, to complete 4
        assert checkpoints.steps() == [1, 2, 3][max(calls - 1, 0) :]
        with pytest.raises(mw.MeshwrightError, match="another run's"):
            checkpoints.confirm(3)
        assert checkpoints.healthy() == [3], "known to this process"
    assert not (tmp_path / "step-00000003" / "healthy").exists()


@given(
    st.lists(st.integers(0, 200), unique=True, max_size=20),
    st.integers(1, 5),
    st.none() | st.integers(1, 50),
)
def test_the_newest_is_never_deleted(
    steps: list[int], keep_last: int, keep_every: int | None
) -> None:
    deleted = steps_to_delete(steps, keep_last, keep_every)
    kept = set(steps) - set(deleted)
    assert set(sorted(steps)[-keep_last:]) <= kept
    for step in deleted:
        assert keep_every is None or step % keep_every
    assert len(kept) <= keep_last + sum(
        keep_every is not None and step % keep_every == 0 for step in steps
    )


@given(
    st.lists(st.integers(0, 200), unique=True, min_size=1, max_size=20),
    st.integers(1, 5),
    st.none() | st.integers(1, 50),
    st.data(),
)
def test_the_newest_healthy_one_is_never_deleted(
    steps: list[int], keep_last: int, keep_every: int | None, data: st.DataObject
) -> None:
    healthy = data.draw(st.lists(st.sampled_from(steps), min_size=1))
    deleted = steps_to_delete(steps, keep_last, keep_every, healthy)
    assert max(healthy) not in deleted
    assert set(deleted) <= set(steps_to_delete(steps, keep_last, keep_every))


def test_a_confirmed_checkpoint_outlives_all_later_ones(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        checkpoints.save(1, TREE, {})
        checkpoints.confirm(1)  # while it is still being written
        for step in range(2, 6):
            checkpoints.save(step, TREE, {})
        checkpoints.wait()
        assert (checkpoints.steps(), checkpoints.healthy()) == ([1, 5], [1])
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:  # another process knows it, too
        assert checkpoints.healthy() == [1]
        checkpoints.save(6, TREE, {}, wait=True)
        checkpoints.confirm(6)
        assert checkpoints.steps() == [1, 6]
        checkpoints.save(7, TREE, {}, wait=True)
        assert (checkpoints.steps(), checkpoints.healthy()) == ([6, 7], [6])


def test_a_mark_that_cannot_be_written_is_still_known_to_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, step: int) -> None:
        raise OSError(28, "No space left on device")

    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        checkpoints.save(1, TREE, {}, wait=True)
        monkeypatch.setattr(folder_module, "mark_healthy", full)
        checkpoints.confirm(1)
        checkpoints.save(2, TREE, {}, wait=True)
        assert checkpoints.steps() == [1, 2]
        monkeypatch.undo()
        checkpoints.save(3, TREE, {}, wait=True)
    assert Checkpoints(tmp_path).healthy() == [1]


def test_the_previous_checkpoint_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        checkpoints.save(1, TREE, {}, wait=True)
        for step in range(2, 6):
            checkpoints.save(step, TREE, {})
            while checkpoints.latest() != step:
                assert checkpoints.steps() in ([step - 1], [step - 1, step], [step])
                time.sleep(0.001)
    assert Checkpoints(tmp_path).steps() == [5]


def test_leftovers_of_killed_processes_are_not_seen_and_cleared_by_the_next_save(
    tmp_path: Path,
) -> None:
    for name in (".saving-00000009", ".deleting-00000001", ".saving-notes", "mine", "step-abc"):
        (tmp_path / name / "arrays").mkdir(parents=True)
    (tmp_path / "step-00000007").write_text("a file")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.steps() == []
    assert (
        tmp_path / ".saving-00000009"
    ).exists()  # reading a run that is being trained changes nothing
    checkpoints.save(9, TREE, {}, wait=True)
    assert checkpoints.steps() == [9]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".saving-notes",
        "mine",
        "step-00000007",
        "step-00000009",
        "step-abc",
    ]


def test_a_step_is_not_saved_over_another(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, TREE, {"first": True})
        with pytest.raises(mw.MeshwrightError, match="step 1 is already saved"):
            checkpoints.save(1, TREE, {"first": False})
        assert checkpoints.meta(1) == {"first": True}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("gs://bucket/run",), "not on a file system"),
        (("",), "not a path"),
        ((3,), "not a path"),
        (("run", 0), "keep_last=0"),
        (("run", 3, 0), "keep_every=0"),
        (("run", "all"), "keep_last='all'"),
    ],
)
def test_a_folder_that_cannot_be_is_said(arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises(mw.MeshwrightError, match=said):
        Checkpoints(*arguments)


def test_a_file_in_the_place_of_the_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(mw.MeshwrightError, match="is a file"):
        Checkpoints(tmp_path / "run")
    with pytest.raises(mw.MeshwrightError, match=r"run/below is inside .*run, which is a file"):
        Checkpoints(tmp_path / "run" / "below")
    with pytest.raises(mw.MeshwrightError, match="cannot be used: File name too long"):
        Checkpoints(tmp_path / ("a" * 300))
