"""Tests of the PyTorch backend share one start of six processes."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.patience import PATIENCE_S

HERE = Path(__file__).parent


# what `make test` takes of the cases that repeat one thing for many models
# (tied embeddings are in the short ones that try options, resume and load)
IN_SHORT = {
    "train llama dp=2,tp=3",
    "train experts qwen3_moe",
    "train by command gemma2",
    "architecture gemma2",
    "architecture gpt_neox",
}


class SixProcesses:
    """The results of worker.py by case; it runs once for the short ones and once for the others."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[bool, dict[str, Any]] = {}

    def __getitem__(self, name: str) -> Any:
        short = name in IN_SHORT or not name.startswith(("train ", "architecture "))
        if short not in self._found:
            with (self._folder / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes themselves
                self._found[short] = self._run(short)
        return self._found[short][name]

    def _run(self, short: bool) -> dict[str, Any]:
        out = self._folder / f"{'short' if short else 'long'}.json"
        if out.exists():
            return dict(json.loads(out.read_text()))
        quiet = {
            "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "TORCH_LOGS": "-all",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONWARNINGS": "ignore",
        }  # fmt: skip
        source = str(HERE.parents[1] / "src")
        done = subprocess.run(
            [sys.executable, str(HERE / "worker.py"), f"{out}.part", "short" if short else "long",
             *sorted(IN_SHORT)],
            env=os.environ | quiet | {"PYTHONPATH": source}, capture_output=True, text=True,
            timeout=PATIENCE_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-6000:]
        Path(f"{out}.part").rename(out)
        print(done.stderr)  # the seconds of each case
        return dict(json.loads(out.read_text()))


@pytest.fixture(scope="session")
def on_six(tmp_path_factory: pytest.TempPathFactory) -> SixProcesses:
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "six-processes"
    folder.mkdir(exist_ok=True)
    return SixProcesses(folder)
