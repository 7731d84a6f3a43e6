"""SIGKILL in the middle of a save loses nothing that was complete."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.patience import PATIENCE_S

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kill_during_save.py"


@pytest.mark.slow
def test_three_kills_inside_a_save_lose_nothing() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--kills", "3", "--seed", "1"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 kills inside a save" in done.stdout
