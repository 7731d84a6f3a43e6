"""`meshwright train --backend torch --mesh auto`: a mesh for the processes of the run."""

import dataclasses
import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from meshwright.errors import MeshwrightError
from meshwright.planner import planned
from meshwright.torch.train import train
from meshwright.torch.train.command import machine_of
from meshwright.training import TrainConfig

AUTO = TrainConfig("tiny", backend="torch", mesh="auto", steps=1, batch=2, seq=16)


def test_a_run_takes_the_mesh_that_the_plan_puts_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = dataclasses.replace(AUTO, run=tmp_path / "run")
    train(config, choose=planned)
    said = capsys.readouterr().out
    assert said.startswith("mesh auto: mesh fsdp=1, remat none, accumulation 1 (")
    assert "tiny on mesh fsdp=1: 1 cpu device" in said
    assert json.loads((tmp_path / "run" / "config.json").read_text())["mesh"] == "fsdp=1"


def test_it_needs_something_that_chooses() -> None:
    with pytest.raises(MeshwrightError, match="needs a function that chooses"):
        train(AUTO)


@pytest.mark.parametrize(
    ("kind", "on_hosts", "found"),
    [
        ("NVIDIA H100 80GB HBM3", 16 * [8], "h100:2x8"),
        (
            "NVIDIA H100 80GB HBM3",
            [*(4 * [4]), *(8 * [8])],
            "runs 8 of the 12 processes, another 4",
        ),
        ("NVIDIA GeForce RTX 2080 Ti", 16 * [8], "name the mesh, such as --mesh fsdp=16"),
    ],
)
def test_gpus_are_recognized_by_name_and_hosts(
    kind: str, on_hosts: list[int], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: kind)
    try:
        machine = str(machine_of(on_hosts))
    except MeshwrightError as error:
        machine = str(error)
    assert found in machine
