"""tools/find_python.py: a Python that runs, whatever names are on the PATH."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.patience import PATIENCE_S

SCRIPT = Path(__file__).parents[2] / "tools" / "find_python.py"


def program(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def found(tmp_path: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, SCRIPT, "3.11"],
        env={"PATH": str(tmp_path / "bin"), "PYENV_ROOT": str(tmp_path / "pyenv")},
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip


@pytest.fixture
def a_shim_that_runs_nothing(tmp_path: Path) -> None:
    program(
        tmp_path / "bin" / "python3.11", "echo 'pyenv: python3.11: command not found'; exit 127"
    )


@pytest.fixture
def pyenv_versions(tmp_path: Path) -> Path:
    """Of 3.9, which is too old, and of one that runs: this one."""
    old = "case $2 in *sys.version_info*) exit 1;; esac"
    program(tmp_path / "pyenv" / "versions" / "3.9.18" / "bin" / "python", old)
    folder = tmp_path / "pyenv" / "versions" / "3.13.0"
    return program(folder / "bin" / "python", f'exec {sys.executable} "$@"')


@pytest.mark.usefixtures("a_shim_that_runs_nothing")
def test_a_shim_is_passed_over_for_a_version_that_runs(
    pyenv_versions: Path, found: "subprocess.CompletedProcess[str]"
) -> None:
    assert found.stdout.strip() == str(pyenv_versions), found.stderr


@pytest.mark.usefixtures("a_shim_that_runs_nothing")
def test_where_none_runs_one_line_says_what_is_missing(
    found: "subprocess.CompletedProcess[str]",
) -> None:
    assert found.returncode == 1
    assert found.stderr.startswith("no Python 3.11 or newer")
    assert found.stderr.count("\n") == 1
