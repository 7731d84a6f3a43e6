"""What a person types first: help, a version, a mistake. It answers without importing jax."""

import os
import subprocess
import sys

import pytest

from meshwright.cli import commands

# takes a tenth of a second to import, or seconds
HEAVY = ("jax", "numpy", "optax", "orbax", "rich", "tyro")
CODE = """
import sys
from meshwright.cli.main import main
try:
    main({words!r})
    code = 0
except SystemExit as ended:
    code = ended.code
print("\\nloaded", code, *(name for name in {heavy!r} if name in sys.modules))
"""


def loaded(*words: str) -> tuple[int, set[str], str]:
    """The exit status of a command, which heavy packages it imported, and what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(words=list(words), heavy=HEAVY)],
        capture_output=True, text=True, check=True, env=os.environ | {"COLUMNS": "200"},
    )  # fmt: skip
    *shown, last = done.stdout.splitlines()
    _, code, *names = last.split()
    return int(code), set(names), "\n".join(shown) + done.stderr


@pytest.mark.parametrize(
    ("words", "code", "answer"),
    [
        (["--version"], 0, "meshwright 0"),
        (["-V"], 0, "meshwright 0"),
        (["--help"], 0, "Train a language model on any mesh."),
        (["-h"], 0, "usage: meshwright COMMAND"),
        (["trian", "tiny"], 2, "error: 'trian' is not a command; did you mean 'train'?"),
        (["genrate"], 2, "did you mean 'generate'?"),
        (["--verison"], 2, "error: '--verison' is not an option here; did you mean '--version'?"),
        (["tokenize"], 2, "error: 'tokenize' is not a command; known: models, machines, show, "),
        ([], 2, "error: no command; give one of them:"),
    ],
)
def test_help_and_a_mistyped_command_import_nothing_heavy(
    words: list[str], code: int, answer: str
) -> None:
    ended, names, shown = loaded(*words)
    assert ended == code
    assert answer in shown
    assert not names


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_the_help_of_a_command_does_not_import_jax(name: str) -> None:
    ended, names, shown = loaded(*name.split(), "--help")
    assert ended == 0
    assert f"meshwright {name}" in shown.partition("\n")[0]
    assert commands.COMMANDS[name].summary in " ".join(shown.split())
    assert "jax" not in names


def test_a_command_that_has_parts_lists_them() -> None:
    ended, names, shown = loaded("data", "--help")
    assert ended == 0
    assert not names
    assert "data pack     Tokenize text" in shown
    ended, _, shown = loaded("data", "pak")
    assert ended == 2
    assert "did you mean 'pack'?" in shown


def test_a_mistyped_flag_of_plan_does_not_import_jax() -> None:
    ended, names, shown = loaded("plan", "tiny", "--onn", "cpu:8", "--batch", "8", "--seq", "64")
    assert ended == 2
    assert "--on" in shown
    assert "jax" not in names
