"""The commands of `meshwright`: one file each, all thin, imported when it is the one to run."""

import contextlib
import importlib
import io
import os
import sys
import typing
from collections.abc import Sequence
from typing import NamedTuple

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.files import disk_errors_in_one_line, output_is_written


class Command(NamedTuple):
    """A function of `meshwright.cli.<module>`, and the first sentence of its help.

    It takes the settings that its signature names; if it `reads_words`, the words themselves.
    """

    function: str
    summary: str
    module: str = ""  # the command's name by default
    reads_words: bool = False


COMMANDS = {
    "models": Command("models", "List the model presets with their sizes."),
    "machines": Command("machines", "List the chips and machines of the catalogue."),
    "show": Command(
        "show", "Draw a mesh on its machine, with sharded arrays and the table of a model."
    ),
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
    "data pack": Command(
        "pack", "Tokenize text and pack it into a token store for training.", "data"
    ),
    "data info": Command("info", "Show the contents of a token store.", "data"),
    "data show": Command(
        "show", "Show documents of a token store, with the tokens that have loss in colour.", "data"
    ),
    "data upgrade": Command(
        "upgrade", "Verify a store packed by an older version, and add block checksums.", "data"
    ),
    "train": Command("train_command", "Train a language model on any mesh.", reads_words=True),
    "board": Command("board", "Show the runs of a folder on one page, live, and compare them."),
    "eval": Command("evaluate", "Evaluate the model of a run or of a Hugging Face folder."),
    "generate": Command(
        "generate", "Generate text with the model of a training run or of a Hugging Face folder."
    ),
    "chat": Command(
        "chat", "Talk with the model of a run or of a Hugging Face folder, in the terminal."
    ),
    "serve": Command(
        "serve_command", "Serve a model over HTTP: OpenAI's API, EasyLM's routes and a chat page."
    ),
    "export": Command(
        "export",
        "Write the model of a run as a folder that transformers reads, or an adapter for PEFT.",
    ),
    "doctor": Command(
        "doctor", "Check versions, devices, memory, kernels and network, and say what to fix."
    ),
}

OPTIONS = ("--help", "--version")
JOINING = ("train", "serve")  # commands that torchrun starts several processes of
WITH_MESH = ("train", "audit", "prove", "plan", "generate", "serve", "export", "chat", "eval")


def run(arguments: list[str]) -> None:
    """Run one command; a user's mistake is one readable line and exit status 2."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by `>&-`: nobody wants it
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show × gets a ?
    try:
        with output_is_written(), disk_errors_in_one_line():
            _run(arguments)
    except MeshwrightError as mistake:
        if not _said_by_another(arguments):
            with contextlib.suppress(OSError):  # standard error may lie on a full disk, too
                print(f"error: {mistake}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None


def _said_by_another(arguments: Sequence[str]) -> bool:
    """Whether another process of torchrun on this host makes, and prints, the same mistake.

    Before jax and torch are imported, a mistake is one of the words alone.
    """
    if not arguments or arguments[0] not in JOINING:
        return False
    is_alone = os.environ.get("LOCAL_WORLD_SIZE", "1") == "1"
    is_first = is_alone or os.environ.get("LOCAL_RANK", "0") == "0"
    return not is_first and sys.modules.keys().isdisjoint(("jax", "torch"))


def _run(arguments: list[str]) -> None:
    if arguments[:1] == ["help"] and arguments[1:]:
        arguments = [*arguments[1:], "--help"]
    if arguments[:1] in (["-h"], ["--help"], ["help"]):
        print(_help())
        return
    if not arguments:
        raise MeshwrightError(f"no command; give one of them:\n\n{_lines(COMMANDS)}")
    name, words = _command(arguments)
    if name is None:
        return
    # here, since they take as long to import as all of this
    from meshwright.cli.early import check_mesh, check_model
    from meshwright.cli.flags import check_given_once, name_axes
    from meshwright.cli.jax_log import shorten_plugin_errors
    from meshwright.cli.other_systems import check_flags
    from meshwright.cli.parser import read

    shorten_plugin_errors()
    check_given_once(words)
    if name in WITH_MESH:
        words = name_axes(words)
        check_flags(name, words)
        check_mesh(name, words)
    command = COMMANDS[name]
    module = importlib.import_module(f"meshwright.cli.{command.module or name}")
    function = getattr(module, command.function)
    if command.reads_words:
        function(words)
        return
    (settings_type,) = (
        hint for of, hint in typing.get_type_hints(function).items() if of != "return"
    )
    first = getattr(module, "MOST_USED", ())
    settings = read(settings_type, words, f"meshwright {name}", function.__doc__, first=first)
    check_model(name, settings)
    function(settings)


def _command(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The command that is asked for, and its words; None where its help was."""
    name, *words = arguments
    if name in COMMANDS:
        return name, words
    group = {full: command for full, command in COMMANDS.items() if full.startswith(f"{name} ")}
    if not group:
        kind = "not an option here" if name.startswith("-") else "not a command"
        known = [full.partition(" ")[0] for full in COMMANDS]
        raise MeshwrightError(f"{name!r} is {kind}{did_you_mean(name, [*known, *OPTIONS])}")
    if words[:1] in (["-h"], ["--help"]):
        print(f"usage: meshwright {name} COMMAND ...\n\n{_lines(group)}")
        return None, []
    if not words:
        raise MeshwrightError(f"meshwright {name} needs a command:\n\n{_lines(group)}")
    full = f"{name} {words[0]}"
    if full not in group:
        known = [other.partition(" ")[2] for other in group]
        raise MeshwrightError(
            f"{words[0]!r} is not a command of meshwright {name}{did_you_mean(words[0], known)}"
        )
    return full, words[1:]


def _help() -> str:
    return (
        "usage: meshwright COMMAND ...\n\nSay where every axis goes, see what it costs, run it.\n\n"
        f"{_lines(COMMANDS)}\n\n"
        "meshwright COMMAND --help says what a command takes, meshwright --version (-V) which "
        "version this is."
    )


def _lines(commands: dict[str, Command]) -> str:
    return "\n".join(f"  {name:<14}{command.summary}" for name, command in commands.items())
