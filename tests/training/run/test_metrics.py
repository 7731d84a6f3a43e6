"""Every step stands in metrics.jsonl once, whatever happened to the process that wrote it."""

import json
import math
import resource
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright import MeshwrightError
from meshwright.training.run import MetricsLog, read_metrics


def written(folder: Path, steps: range, **more: object) -> None:
    with MetricsLog(folder, **more) as log:  # type: ignore[arg-type]
        for step in steps:
            log.write(step, {"loss": 1 / (step + 1)})


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "new" / "run") as log:
        log.write(1, {"loss": 2.5, "tokens": 4096, "grad_norm": np.float32(0.5)})
        log.write(2, {"loss": jnp.float32(math.nan), "grad_norm": math.inf})
        log.note(2, "resumed", mesh="fsdp=8")
        # every line is in the file before the next step begins
        assert len(read_metrics(tmp_path / "new" / "run").records) == 2
    metrics = read_metrics(tmp_path / "new" / "run")
    assert metrics.column("loss")[0] == [1, 2]
    assert metrics.records[0]["tokens"] == 4096
    assert math.isnan(metrics.records[1]["loss"])
    assert metrics.column("grad_norm") == ([1, 2], [0.5, math.inf])
    assert [(event["event"], event["mesh"]) for event in metrics.events] == [("resumed", "fsdp=8")]
    for line in (tmp_path / "new" / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    written(tmp_path, range(10))
    with MetricsLog(tmp_path, resume_step=6) as log:
        log.note(6, "resumed")
        for step in range(7, 12):
            log.write(step, {"loss": -1.0})
    metrics = read_metrics(tmp_path)
    assert metrics.column("loss")[0] == list(range(12))
    assert metrics.column("loss")[1][7:] == [-1.0] * 5
    # events outlive a second, earlier resume
    written(tmp_path, range(4, 6), resume_step=3)
    metrics = read_metrics(tmp_path)
    assert metrics.column("loss")[0] == list(range(6))
    assert [event["step"] for event in metrics.events] == [6]


def test_texts_and_loads_past_the_step_are_dropped_too(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        for step in (2, 4):
            log.note(step, "sample", prompt="a", text="b")
            log.note(step, "expert_loads", loads=[[1.0]])
        log.note(4, "ended", state="stopped")
    with MetricsLog(tmp_path, resume_step=2):
        pass
    events = [(event["event"], event["step"]) for event in read_metrics(tmp_path).events]
    assert events == [("sample", 2), ("expert_loads", 2), ("ended", 4)]


@given(cut=st.integers(0, 400))
def test_a_line_cut_short_anywhere_loses_that_line_only(
    cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run")
    written(folder, range(6))
    file = folder / "metrics.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[:cut])
    complete = whole[:cut].count(b"\n")
    metrics = read_metrics(folder)
    # a line without only its newline is complete
    assert metrics.column("loss")[0][:complete] == list(range(min(complete, 6)))
    assert len(metrics.records) - complete in (0, 1)
    written(folder, range(6, 9))
    steps = read_metrics(folder).column("loss")[0]
    assert steps == [*range(len(metrics.records)), 6, 7, 8]
    assert read_metrics(folder).unreadable == 0


def test_a_spoilt_line_in_the_middle_is_counted(tmp_path: Path) -> None:
    written(tmp_path, range(3))
    file = tmp_path / "metrics.jsonl"
    first, *rest = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(first + b'{"step": 7, "lo\n[1]\n\xff\n{"loss": 1}\n' + b"".join(rest))
    metrics = read_metrics(tmp_path)
    assert (len(metrics.records), metrics.unreadable) == (3, 4)


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    written(tmp_path / "run", range(3), writes=False, tensorboard=True, wandb="project")
    assert not (tmp_path / "run").exists()


def test_a_full_disk_is_told_once_and_training_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with MetricsLog(tmp_path) as log:
        log.write(0, {"loss": 1.0})
        room = (tmp_path / "metrics.jsonl").stat().st_size + 10
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))  # ten bytes more, and no further
        try:
            log.write(1, {"loss": 1.0})  # torn, without an error from the system
            log.write(2, {"loss": 1.0})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        log.write(3, {"loss": 1.0})
    assert capsys.readouterr().err.count("cannot be written") == 1
    metrics = read_metrics(tmp_path)
    assert metrics.column("loss")[0] == [0, 3]
    assert metrics.unreadable == 1


def test_mistakes_are_told(tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError, match=r"holds no metrics\.jsonl"):
        read_metrics(tmp_path)
    with (
        MetricsLog(tmp_path) as log,
        pytest.raises(MeshwrightError, match="metric 'loss' is 'low', not a number"),
    ):
        log.write(1, {"loss": "low"})
    (tmp_path / "file").write_text("")
    with pytest.raises(MeshwrightError, match="cannot be written"):
        MetricsLog(tmp_path / "file" / "run")


def test_a_tracker_that_is_not_installed_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("wandb", "tensorboard", "tensorboard.compat.proto.event_pb2"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(MeshwrightError, match=r"TensorBoard .*pip install -e '\.\[track\]'"):
        MetricsLog(tmp_path, tensorboard=True)
    with pytest.raises(MeshwrightError, match=r"W&B .*pip install -e '\.\[track\]'"):
        MetricsLog(tmp_path, wandb="project")
