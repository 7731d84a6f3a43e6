"""Every command and flag that we print or document is one that our command line takes."""

import ast
import contextlib
import functools
import importlib
import io
import itertools
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright import plan
from meshwright.cli import audit as audit_cli
from meshwright.cli import commands as cli
from meshwright.cli import prove_train as prove_cli
from meshwright.cli import train as train_cli
from meshwright.machines import CHIPS, Catalogue
from meshwright.planner.report.phrases import next_commands

ROOT = Path(__file__).parents[2]
# the changelog is not one of them: it may name what is no more
NAMED = ("README.md", "CONTRIBUTING.md", "benchmarks/RESULTS.md")
PAGES = [*map(ROOT.joinpath, NAMED), *ROOT.glob("docs/**/*.md")]
COMMAND = re.compile(rf"meshwright ({'|'.join(cli.COMMANDS)})\b")
FLAG = re.compile(r"(?<![\w/<!-])--[a-z][\w.-]*\w")
BEFORE = {"--version", "--config"}  # read before the flags of a command
# of XLA, Slurm, torchrun, hf, pip, uv, LWM, benchmarks/, examples/ and tools/
THEIRS = re.compile(
    r"--(xla\w*|nodes|ntasks.*|nnodes|nproc-per-node|no-python|run-path|rdzv.*|(mp_)?mesh_dim|tp$|"
    r"documents|check|needles|local-dir|repo-type|revision|index-url|torch-backend)"
)


class ParsedError(Exception):
    """A command was read as far as to be run."""


@functools.cache
def flags(command: str) -> frozenset[str]:
    """All that a command takes, by its own --help."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        cli.run([*command.split(), "--help"])
    found = {*FLAG.findall(said.getvalue()), *BEFORE, "--help"}
    return frozenset(found | flags("train") if command in ("prove", "audit", "plan") else found)


def sources() -> Iterator[tuple[str, str]]:
    """Pages, and every text in our code: help, errors, docstrings. A value in one is an X."""
    for page in PAGES:
        yield str(page.relative_to(ROOT)), page.read_text()
    for file in ROOT.glob("src/**/*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            where = f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.JoinedStr):
                parts = (str(getattr(part, "value", "X")) for part in node.values)
                yield where, "".join("X" if part.startswith("<ast.") else part for part in parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield where, node.value


SOURCES = list(sources())


def commands(page: Path) -> Iterator[tuple[str, str, bool]]:
    """The commands of a page's blocks, run or not, and whether the page shows that they fail."""
    text = re.sub(r" *\\\n\s*", " ", page.read_text())
    for fence in re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        lines = [*fence.splitlines(), ""]
        for line, after in itertools.pairwise(lines):
            found = re.match(r"(?:\$ |\s*)(?:[A-Z_]+=\S+ |for .* do )*(meshwright \w.*)$", line)
            if found and COMMAND.match(found[1]):
                yield str(page.relative_to(ROOT)), found[1], after.startswith("error")


DOCUMENTED = sorted({found for page in PAGES for found in commands(page)})


@pytest.fixture
def only_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands are read, with their machines and settings, and not run."""

    def parsed(*_: Any, **__: Any) -> Any:
        raise ParsedError

    def stand_in(command: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(command)(lambda *_, **__: parsed())

    for name, command in cli.COMMANDS.items():
        if not command.reads_words:
            module = importlib.import_module(f"meshwright.cli.{command.module or name}")
            function = getattr(module, command.function)
            monkeypatch.setattr(module, command.function, stand_in(function))
    monkeypatch.setattr("meshwright.cli.early.check_model", lambda *_: None)  # it is not here
    monkeypatch.setattr(train_cli, "check_data", lambda _: None)
    monkeypatch.setattr("meshwright.api.train", parsed)
    monkeypatch.setattr(train_cli, "config_from_file", lambda _: train_cli.TrainConfig("tiny"))
    monkeypatch.setattr("meshwright.planner.plan", parsed)
    monkeypatch.setattr("meshwright.planner.compare", parsed)
    monkeypatch.setattr("meshwright.planner.deployments", parsed)
    own = Catalogue({"h100-96": CHIPS["h100"]})
    monkeypatch.setattr("meshwright.cli.plan.read_catalogue", lambda _: own)
    monkeypatch.setattr(prove_cli, "prove", parsed)
    monkeypatch.setattr("meshwright.cli.prove_serve.prove_serving", parsed)
    monkeypatch.setattr(prove_cli, "read_plan", lambda _: plan("tiny", "cpu:8", 16, 128))
    monkeypatch.setattr(audit_cli, "_text_in", parsed)
    monkeypatch.setattr("meshwright.training.abstract_step", parsed)
    monkeypatch.setattr("meshwright.launch.simulate_devices", lambda _: None)


def test_there_are_documented_commands_of_every_kind() -> None:
    found = [COMMAND.match(command) for _, command, _ in DOCUMENTED]
    assert {match[1] for match in found if match} == set(cli.COMMANDS)


@pytest.mark.parametrize(("page", "command", "fails"), DOCUMENTED)
def test_a_documented_command_can_be_typed(
    page: str, command: str, fails: bool, only_parsed: None, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = re.split(r" [|>&;]| 2>|; done", command)[0].replace("$i", "0")
    typed = typed.replace("--mesh ...", "--mesh auto")
    words = shlex.split(typed)[1:]
    if words[-1] in ("...", "…"):  # a page that leaves out the rest
        assert set(FLAG.findall(typed)) <= flags(COMMAND.match(typed)[1])
        return
    with pytest.raises((ParsedError, SystemExit)) as ended:
        cli.run(words)
    # a mistake that the page shows is one of ours, not one of the flags
    shown_mistake = fails and capsys.readouterr().err.startswith("error: ")
    assert ended.type is ParsedError or shown_mistake, f"{page}: {command}"


def test_every_flag_that_is_named_exists() -> None:
    every = {"--flag"}.union(*map(flags, cli.COMMANDS))  # "--flag" is any
    wrong = []
    for where, text in SOURCES:
        own = re.sub(r"\S+\.py [^`\n]*", "", text)  # scripts have flags of their own
        if "coming-from" in where:  # pages about the flags of others, which an error translates
            own = ""
            text = re.sub(r"^\$ .*\nerror: .*another system", "", text, flags=re.MULTILINE)
        wrong += [(where, f) for f in FLAG.findall(own) if f not in every and not THEIRS.match(f)]
        for command, rest in re.findall(COMMAND.pattern + r"([^`\n;()]*)", text):
            wrong += [(where, command, flag) for flag in {*FLAG.findall(rest)} - flags(command)]
    assert not wrong


def test_what_a_plan_says_to_type_next_can_be_typed(only_parsed: None) -> None:
    jobs = [
        plan("llama-3.1-8b", "v5p:4x4x4", 64, 8192, optimizer="muon", param_dtype="bfloat16"),
        plan("llama-3.1-8b", "v5p:4x4x4", 8, 262144, mesh="sp=8,tp=2", overlap="on"),
        plan("tiny", "cpu:8", 16, 128, layers="unroll", loss_chunk=512, dtype="bfloat16"),
        plan("llama-3.1-8b", "h100:8", 64, 4096, kind="serve"),
    ]
    for made in jobs:
        for estimate in made.ranked[:5]:
            for command in next_commands(made, estimate.choice):
                with pytest.raises(ParsedError):
                    cli.run(shlex.split(command)[1:])
    unrolled = next_commands(jobs[2], jobs[2].best.choice)
    for flag in ("--compute.layers unroll", "--loss.chunk 512", "--compute.dtype bfloat16"):
        assert all(flag in command for command in unrolled)


def test_the_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    cli.run(["--help"])
    shown = capsys.readouterr().out
    files = {file.stem for file in Path(cli.__file__).parent.glob("*.py")}
    for name, command in cli.COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(command.summary)}$", shown, re.MULTILINE)
        assert (command.module or name) in files


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_help_of_a_command_says_what_the_list_of_commands_says(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):
        cli.run([*name.split(), "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert cli.COMMANDS[name].summary in shown
