"""The example notebooks run from the first cell to the last.

The cells are run as one script, without a kernel: what they need of IPython is `!command` and that
the last value of a cell is shown, and both are done here. A kernel would add a dozen packages.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples/notebooks").glob("*.ipynb"))
SLOW = {"fine_tune_and_chat", "plan_and_prove"}  # they train and generate, and compile
SHOW = """
import subprocess as _subprocess

def _show(value):
    if value is not None:
        html = value._repr_html_() if hasattr(value, "_repr_html_") else repr(value)
        print("shown:", html)

def _shell(command):
    _subprocess.run(command, shell=True, check=True)
"""


def cells(notebook: Path) -> list[dict[str, Any]]:
    return list(json.loads(notebook.read_text())["cells"])


def script(notebook: Path) -> str:
    """The code of a notebook as Python: commands are run, the last value of a cell is shown."""
    parts = [SHOW]
    for cell in cells(notebook):
        if cell["cell_type"] != "code":
            continue
        lines = "".join(cell["source"]).splitlines()
        code = "\n".join(f"_shell({x[1:]!r})" if x.startswith("!") else x for x in lines)
        tree = ast.parse(code)
        last = tree.body[-1]
        if isinstance(last, ast.Expr):
            last.value = ast.Call(ast.Name("_show", ast.Load()), [last.value], [])
        parts.append(ast.unparse(ast.fix_missing_locations(tree)))
    return "\n".join(parts)


def test_there_are_notebooks_and_they_are_saved_without_outputs() -> None:
    assert {notebook.stem for notebook in NOTEBOOKS} == {
        "shard_your_own_model", "plan_and_prove", "fine_tune_and_chat"
    }  # fmt: skip
    for notebook in NOTEBOOKS:
        data = json.loads(notebook.read_text())
        assert (data["nbformat"], data["nbformat_minor"]) == (4, 5)
        assert len({cell["id"] for cell in data["cells"]}) == len(data["cells"])
        assert not any(cell.get("outputs") for cell in data["cells"])
        assert data["cells"][0]["source"][0].startswith("# ")


@pytest.mark.parametrize(
    "notebook",
    [pytest.param(n, id=n.stem, marks=[pytest.mark.slow] * (n.stem in SLOW)) for n in NOTEBOOKS],
)
def test_a_notebook_runs_to_its_end(notebook: Path, tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "MESHWRIGHT_CACHE": str(tmp_path / "cache")}
    environment.pop("XLA_FLAGS", None)
    done = subprocess.run(
        [sys.executable, "-c", script(notebook)], capture_output=True, text=True, cwd=tmp_path,
        env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    values = [cell for cell in cells(notebook) if cell["cell_type"] == "code"]
    assert notebook.stem in SLOW or done.stdout.count("shown: ") >= len(values) // 2
    assert notebook.stem in SLOW or "<table>" in done.stdout
