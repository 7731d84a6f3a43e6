"""What RESULTS.md says of injected faults, whose results are recorded on several days."""

import json
from pathlib import Path

import pytest

import faults
from fault_stage import Stage
from faults import FAULTS, Result
from results import origin


def test_each_recorded_fault_has_its_own_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "faults.json"
    monkeypatch.setattr(faults, "RECORD", record)
    first, second = FAULTS[:2]
    record.write_text(json.dumps({first.title: [0.5, "stopped", [], []]}))  # without an origin
    faults.add_to_record(Result(second, 1.0, "stopped", (), ()))
    results = faults.read_record()
    assert results[first.title].origin == {}
    assert results[second.title].origin == origin()
    said = faults.conditions(list(results.values()))
    assert "{versions}, on {machine}, {date} (1 fault)".format(**origin()) in said
    assert "versions not recorded, machine not recorded, date not recorded (1 fault)" in said


def test_a_fault_gives_each_setting_once(tmp_path: Path) -> None:
    words = Stage(tmp_path).train("--batch", "8", "--mesh", "dp=2", steps=7)
    flags = [word for word in words if word.startswith("--")]
    assert len(set(flags)) == len(flags)
    assert words[words.index("--batch") + 1] == "8"
    assert words[words.index("--mesh") + 1] == "dp=2"
