"""The limits stated in benchmarks/RESULTS.md hold on this machine too."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_placement_stays_within_its_limits() -> None:
    script = ROOT / "benchmarks" / "placement.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_committed_results_are_within_the_limits() -> None:
    rows = [
        line.split("|")[2:4]
        for line in (ROOT / "benchmarks" / "RESULTS.md").read_text().splitlines()
        if line.startswith("| `")
    ]
    assert len(rows) >= 5
    for measured, limit in rows:
        assert float(measured.strip(" ×s")) <= float(limit.strip(" ×s"))
