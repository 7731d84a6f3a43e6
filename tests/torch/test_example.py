"""examples/torch_2d.py trains on six processes, resumes on four, and goes on as on six."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.patience import PATIENCE_S

pytest.importorskip("torch")
pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]


def run(processes: int, *arguments: str) -> dict[int, float]:
    """The losses by step."""
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
         str(processes), str(ROOT / "examples" / "torch_2d.py"), *arguments],
        env=env, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = re.findall(r"^step (\d+): loss ([\d.]+)$", done.stdout, re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}


@pytest.mark.slow
def test_the_example_resumes_on_another_mesh(tmp_path: Path) -> None:
    began = run(6, "--mesh", "dp=2,tp=3", "--steps", "3", "--out", str(tmp_path / "run"))
    resumed = run(4, "--mesh", "dp=2,tp=2", "--steps", "5", "--out", str(tmp_path / "run"))
    straight = run(6, "--mesh", "dp=3,tp=2", "--steps", "5", "--out", str(tmp_path / "other"))
    assert list(began | resumed) == [1, 2, 3, 4, 5]
    assert list(resumed) == [4, 5]
    for step, loss in (began | resumed).items():
        assert abs(loss - straight[step]) < 3e-5, (step, loss, straight[step])


def test_the_example_is_short() -> None:
    assert len((ROOT / "examples" / "torch_2d.py").read_text().splitlines()) <= 60
