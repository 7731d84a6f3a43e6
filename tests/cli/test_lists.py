"""`meshwright models`, `machines` and `doctor`: everything that is there, and what to fix."""

import importlib.util
import json
import shutil
import socket
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli import doctor
from meshwright.cli.commands import run
from meshwright.machines import CHIPS
from meshwright.models import PRESETS


def shown(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    run(words.split())
    return capsys.readouterr().out


def test_every_preset_is_listed_with_its_size(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    lines = shown("models", capsys).splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == list(PRESETS)
    assert "8.03B" in next(line for line in lines if line.startswith("llama-3.1-8b"))
    named = json.loads(shown("models QWEN3-30b --json", capsys))
    assert [(one["name"], one["layers"]) for one in named] == [("qwen3-30b-a3b", 48)]
    assert named[0]["active"] < named[0]["parameters"]


def test_every_chip_is_listed_with_the_machines_it_comes_in(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    lines = shown("machines", capsys).splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == list(CHIPS)
    assert "v5p:1x1x1 to 16x16x24 (6,144 chips)" in shown("machines", capsys)
    assert "v5e:8x16, v5e:16x16" in shown("machines v5e", capsys)
    assert "h100:8, h100:16x8 (16 hosts), p5.48xlarge" in shown("machines h100", capsys)


def findings() -> dict[str, doctor.Finding]:
    return {finding.subject: finding for finding in doctor.examine(network=False)}


def test_a_healthy_machine_needs_no_fix(capsys: pytest.CaptureFixture[str]) -> None:
    run(["doctor", "--no-network"])
    report = capsys.readouterr().out
    assert "nothing must be fixed" in report
    for subject in ("python", "packages", "devices", "host", "kernels", "compiler", "cache"):
        assert subject in report
    run(["doctor", "--no-network", "--json"])
    assert {one["subject"] for one in json.loads(capsys.readouterr().out)} == set(findings())


def test_what_is_missing_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else real(name)
    )
    found = findings()["extra torch"]
    assert found.found == "not installed"
    assert found.fix.endswith("pip install -e '.[torch]'")
    assert not found.must


def test_packages_that_do_not_fit_must_be_fixed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: "0.1" if name == "jaxlib" else real(name))
    with pytest.raises(SystemExit) as ended:
        run(["doctor", "--no-network"])
    assert ended.value.code == 1
    report = capsys.readouterr().out
    assert "pip install -U jax jaxlib" in report
    assert "1 to fix" in report


def test_an_accelerator_that_jax_does_not_see_must_be_fixed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(doctor, "_GPU_FILES", (str(tmp_path / "nvidia0"),))
    found = findings()["devices"]
    assert found.must
    assert found.fix.endswith("pip install -e '.[cuda]'")


def test_a_full_disk_and_a_broken_jax_are_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, 0))
    assert "set MESHWRIGHT_CACHE" in findings()["cache"].fix

    def fails() -> Any:
        raise RuntimeError("libcudart.so is missing\nmore")

    monkeypatch.setattr("jax.devices", fails)
    broken = findings()["devices"]
    assert broken.must
    assert broken.found == "RuntimeError: libcudart.so is missing"


def test_a_hub_that_cannot_be_reached_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **__: Any) -> Any:
        raise OSError("no route")

    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "create_connection", refuses)
    found = {finding.subject: finding for finding in doctor._network()}
    assert found["hub"].found.endswith("cannot be reached: no route")
    assert "HF_HUB_OFFLINE=1" in found["hub"].fix
