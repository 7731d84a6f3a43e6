"""Which folders are checkpoints, which are kept, and what killed processes left."""

import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshwright as mw
from meshwright.train.checkpoint import Checkpoints
from meshwright.train.checkpoint.folder import steps_to_delete

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
    with pytest.raises(mw.MeshwrightError, match="step 1 cannot be saved"):
        Checkpoints(tmp_path / "run" / "below").save(1, TREE, {})
