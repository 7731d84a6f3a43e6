"""What a person types first: help, a version, a mistake. It answers without importing jax."""

import os
import subprocess
import sys
from pathlib import Path

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


def test_the_package_is_the_command_too() -> None:
    """`python -m meshwright`, where the command is not on the path."""
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", "--version"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("meshwright 0")


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


# each names its mistake in one of the words that stand behind it
MISTAKES = {
    "train tiny --mesh fsdp=x": "'x' is not a size",
    "train tiny --mesh foo=2": "axis 'foo' has no role",
    "train tiny --data nothing.store": "token store 'nothing.store' does not exist",
    "train tiny --compute.remat ful": "did you mean 'full'?",
    "train tiny run_name=a": "--run runs/a",
    "serve ./nothing": "nothing does not exist",
    "serve m --mesh tp=x": "'x' is not a size",
    "serve m --engine.weights int3": "did you mean 'int8'?",
    "serve m --port web": "'web' is not a port: a number from 1 to 65535",
    "generate ./nothing": "nothing does not exist",
    "generate m": "no prompt",
    "chat runs/a/nothing": "runs/a/nothing does not exist",
    "export ./nothing out": "nothing does not exist",
    "eval ./nothing --data a": "nothing does not exist",
    "prove tiny --on 8xH100": "is written 'h100:8'",
    "plan tiny --on 16xh100": "is written 'h100:2x8'",
    "plan tiny --on h100:8 --batch x": "'x' is not a whole number",
    "audit tiny --mesh foo": "'foo' is not a size",
}
EACH = """
import contextlib, io, sys
from meshwright.cli.main import main
for words in {mistakes!r}:
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        main(words.split())
    print("jax" in sys.modules, said.getvalue().strip())
"""


def test_mistyped_words_and_values_are_named_before_jax_is_imported(tmp_path: Path) -> None:
    code = EACH.format(mistakes=list(MISTAKES))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    for line, (words, says) in zip(done.stdout.splitlines(), MISTAKES.items(), strict=True):
        imported, _, said = line.partition(" ")
        assert says in said, words
        assert imported == "False", words


def test_a_mistyped_flag_of_plan_does_not_import_jax() -> None:
    ended, names, shown = loaded("plan", "tiny", "--onn", "cpu:8", "--batch", "8", "--seq", "64")
    assert ended == 2
    assert "--on" in shown
    assert "jax" not in names
