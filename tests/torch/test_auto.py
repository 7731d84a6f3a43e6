"""`meshwright train --backend torch --mesh auto`: a mesh for the processes of the run."""

import dataclasses
import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import torch.distributed as dist

from meshwright.cli.auto import planned
from meshwright.errors import MeshwrightError
from meshwright.torch.train import train
from meshwright.torch.train.command import machine_of_run
from meshwright.train import TrainConfig

AUTO = TrainConfig("tiny", backend="torch", mesh="auto", steps=1, batch=2, seq=16)


def test_a_run_takes_the_mesh_that_the_plan_puts_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = dataclasses.replace(AUTO, run=tmp_path / "run")
    train(config, choose=lambda auto, machine: planned(auto, machine, []))
    said = capsys.readouterr().out
    assert said.startswith("mesh auto: mesh fsdp=1, accumulation 1, remat none (")
    assert "tiny on mesh fsdp=1: 1 cpu device" in said
    assert json.loads((tmp_path / "run" / "config.json").read_text())["mesh"] == "fsdp=1"


def test_it_needs_something_that_chooses() -> None:
    with pytest.raises(MeshwrightError, match="needs a function that chooses"):
        train(AUTO)


@pytest.mark.parametrize(
    ("kind", "own", "found"),
    [
        ("NVIDIA H100 80GB HBM3", "8", "h100:2x8"),
        ("NVIDIA H100 80GB HBM3", "3", "start the same number on each, or name the mesh"),
        ("NVIDIA GeForce RTX 4090", "8", "name the mesh, such as --mesh fsdp=16"),
    ],
)
def test_gpus_are_recognized_by_name_and_hosts(
    kind: str, own: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", own)
    monkeypatch.setattr(dist, "get_world_size", lambda: 16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: kind)
    try:
        machine = str(machine_of_run())
    except MeshwrightError as error:
        machine = str(error)
    assert found in machine
