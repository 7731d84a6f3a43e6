"""The placements that benchmarks/placement.py times are the same, and its results within its limits.

Times are measured by the script alone: `python benchmarks/placement.py --check`.
"""

from pathlib import Path

import pytest

import placement

ROOT = Path(__file__).parents[2]


def test_every_notation_places_as_device_put_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "ROUNDS", 1)
    monkeypatch.setattr(placement, "ARRAYS", 8)
    assert set(placement.placement_ratios()) == {"expressions", "path rules", "logical rules"}
    assert placement.explain_seconds() > 0


def test_the_committed_results_are_within_the_limits() -> None:
    rows = [
        line.split("|")[2:4]
        for line in (ROOT / "benchmarks" / "RESULTS.md").read_text().splitlines()
        if line.startswith("| `")
    ]
    assert len(rows) >= 5
    for measured, limit in rows:
        assert float(measured.strip(" ×s")) <= float(limit.strip(" ×s"))
