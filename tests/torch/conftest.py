"""Tests of the PyTorch backend share one start of six processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def on_six(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of all cases of worker.py, run once on six processes."""
    out = tmp_path_factory.mktemp("torch") / "results.json"
    quiet = {
        "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "TORCH_LOGS": "-all",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    source = str(HERE.parents[1] / "src")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "6",
         str(HERE / "worker.py"), str(out)],
        env=os.environ | quiet | {"PYTHONPATH": source}, capture_output=True, text=True,
        timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(out.read_text())
