"""docs/add-a-model.md, followed: its files, copied as they stand, make a model that trains."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import meshwright

PAGE = Path(__file__).parents[2] / "docs" / "add-a-model.md"


@pytest.mark.slow
def test_the_model_of_the_page_trains(tmp_path: Path) -> None:
    package = tmp_path / "src" / "meshwright"
    source = Path(meshwright.__file__).parent
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
    text = PAGE.read_text()
    named = r"`src/meshwright/(models/pairs/(?:config|arrays|forward|family)\.py)`"
    files = re.findall(named + r".*?```\n(.*?)```", text, re.DOTALL)
    names = [name for name, _ in files]
    assert [Path(name).stem for name in names] == ["config", "arrays", "forward", "family"]
    (package / "models" / "pairs").mkdir()
    (package / "models" / "pairs" / "__init__.py").touch()
    for name, code in files:
        (package / name).write_text(code)
    registry = package / "models" / "registry.py"
    changed = registry.read_text().replace("(DECODER, T5)", "(DECODER, T5, PAIRS)")
    assert "PAIRS" in changed
    line = "from meshwright.models.pairs.family import PAIRS\n"
    registry.write_text(
        changed.replace("from meshwright.models.t5", line + "from meshwright.models.t5", 1)
    )
    train = text.partition("## 5.")[2].split("```")[1].strip().splitlines()[0].split()[1:]
    train[train.index("--steps") + 1] = "2"
    assert "step 2/2  loss" in _run(tmp_path, train)
    size = ["--batch", "16", "--seq", "64"]
    for on in ("v5e:2x2", "h100:8"):
        planned = _run(tmp_path, ["plan", "pairs-tiny", "--on", on, *size, "--explain", "fsdp=-1"])
        assert "mlp weights of a layer" in planned


def _run(folder: Path, arguments: list[str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "meshwright.cli.main", *arguments],
        env=os.environ | {"PYTHONPATH": str(folder / "src")},
        cwd=folder, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
