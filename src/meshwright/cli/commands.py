"""The commands of `meshwright`: one file each, all thin, imported when it is the one to run."""

import contextlib
import importlib
import io
import sys
from typing import NamedTuple

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.files import disk_errors_in_one_line, output_is_written


class Command(NamedTuple):
    """A function of `meshwright.cli.<name>`, and the first sentence of its help."""

    function: str
    summary: str
    reads_words: bool = False  # else tyro reads them, by the function's signature


COMMANDS = {
    "show": Command(
        "show", "Draw a mesh on its machine, with sharded arrays and the table of a model."
    ),
    "machines": Command("machines", "List the chips in the catalogue."),
    "plan": Command(
        "plan_command",
        "Rank every mesh of a machine for a model: step time, memory, what limits it, and why.",
        reads_words=True,
    ),
    "prove": Command(
        "prove_command",
        "Compile a training step with a machine's own compiler; the machine is not needed.",
        reads_words=True,
    ),
    "audit": Command(
        "audit_command",
        "List every collective of a training step or a compiled program: planned, or a surprise.",
        reads_words=True,
    ),
    "data": Command("data", "Make and inspect token stores."),
    "train": Command("train_command", "Train a language model on any mesh.", reads_words=True),
    "board": Command("board", "Show the runs of a folder on one page, live, and compare them."),
    "export": Command(
        "export",
        "Write the model of a run as a folder that transformers reads, or an adapter for PEFT.",
    ),
    "eval": Command("evaluate", "Evaluate the model of a run or of a Hugging Face folder."),
    "generate": Command(
        "generate", "Generate text with the model of a training run or of a Hugging Face folder."
    ),
    "chat": Command(
        "chat", "Talk with the model of a run or of a Hugging Face folder, in the terminal."
    ),
    "serve": Command(
        "serve_command",
        "Serve a model over HTTP: OpenAI's API, EasyLM's routes and a chat page.",
        reads_words=True,
    ),
}

OPTIONS = ("--help", "--version")
WITH_MESH = ("train", "audit", "prove", "plan", "generate", "serve", "export", "chat", "eval")


def run(arguments: list[str]) -> None:
    """Run one command; a user's mistake is one readable line and exit status 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show × gets a ?
    try:
        with output_is_written(), disk_errors_in_one_line():
            _run(arguments)
    except MeshwrightError as mistake:
        with contextlib.suppress(OSError):  # standard error may lie on a full disk, too
            print(f"error: {mistake}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None


def _run(arguments: list[str]) -> None:
    if arguments[:1] in (["-h"], ["--help"]):
        print(_help())
        return
    if not arguments:
        raise MeshwrightError(f"no command; give one of them:\n\n{_commands()}")
    name, *words = arguments
    if name not in COMMANDS:
        kind = "not an option here" if name.startswith("-") else "not a command"
        raise MeshwrightError(f"{name!r} is {kind}{did_you_mean(name, [*COMMANDS, *OPTIONS])}")
    # here, since tyro takes as long to import as all of this
    import tyro

    from meshwright.cli.flags import NUMBERS, check_given_once
    from meshwright.cli.jax_log import shorten_plugin_errors
    from meshwright.cli.other_systems import check_flags

    shorten_plugin_errors()
    check_given_once(words)
    if name in WITH_MESH:
        check_flags(name, words)
    command = COMMANDS[name]
    function = getattr(importlib.import_module(f"meshwright.cli.{name}"), command.function)
    if command.reads_words:
        function(words)
        return
    tyro.cli(
        function, prog=f"meshwright {name}", args=words, config=(tyro.conf.UseAppendAction,),
        registry=NUMBERS,
    )  # fmt: skip


def _help() -> str:
    return (
        "usage: meshwright COMMAND ...\n\nSay where every axis goes, see what it costs, run it.\n\n"
        f"{_commands()}\n\n"
        "meshwright COMMAND --help says what a command takes, meshwright --version which this is."
    )


def _commands() -> str:
    return "\n".join(f"  {name:<10}{command.summary}" for name, command in COMMANDS.items())
