"""The limits stated in benchmarks/RESULTS.md hold on this machine too."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def placement() -> ModuleType:
    spec = importlib.util.spec_from_file_location("placement", ROOT / "benchmarks/placement.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_importing_adds_little_to_importing_jax(placement: ModuleType) -> None:
    assert placement.import_seconds() <= placement.IMPORT_LIMIT


def test_a_405b_model_is_explained_in_less_than_a_second(placement: ModuleType) -> None:
    assert placement.explain_seconds() <= placement.EXPLAIN_LIMIT


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
