"""The commands of `meshwright`: one file each, all thin."""

import contextlib
import io
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from meshwright.cli.audit import audit_command
from meshwright.cli.data import data
from meshwright.cli.eval import evaluate
from meshwright.cli.flags import NUMBERS, check_given_once
from meshwright.cli.generate import generate
from meshwright.cli.jax_log import shorten_plugin_errors
from meshwright.cli.machines import machines
from meshwright.cli.other_systems import check_flags
from meshwright.cli.plan import plan
from meshwright.cli.prove import prove_command
from meshwright.cli.serve import serve, serve_command
from meshwright.cli.show import show
from meshwright.cli.train import train, train_command
from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.train.run import disk_errors_in_one_line, output_is_written

COMMANDS: dict[str, Callable[..., Any]] = {
    "show": show,
    "machines": machines,
    "plan": plan,
    "prove": prove_command,
    "audit": audit_command,
    "data": data,
    "train": train,
    "generate": generate,
    "serve": serve,
    "eval": evaluate,
}


# all settings are one value, whose groups have prefixes; train's may come from a file
WITH_SETTINGS: dict[str, Callable[[Sequence[str]], None]] = {
    "train": train_command,
    "audit": audit_command,
    "prove": prove_command,
    "serve": serve_command,
}


WITH_MESH = ("train", "audit", "prove", "plan", "generate", "serve", "eval")


def run(arguments: list[str]) -> None:
    """Run one command; a user's mistake is one readable line and exit status 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show × gets a ?
    shorten_plugin_errors()
    try:
        with output_is_written(), disk_errors_in_one_line():
            _run(arguments)
    except MeshwrightError as mistake:
        with contextlib.suppress(OSError):  # standard error may lie on a full disk, too
            print(f"error: {mistake}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None


def _run(arguments: list[str]) -> None:
    command = arguments[0] if arguments else "--help"
    if not command.startswith("-") and command not in COMMANDS:
        raise MeshwrightError(f"there is no command {command!r}{did_you_mean(command, COMMANDS)}")
    check_given_once(arguments[1:])
    if arguments[:1] and arguments[0] in WITH_MESH:
        check_flags(arguments[0], arguments[1:])
    if arguments[:1] and arguments[0] in WITH_SETTINGS:
        WITH_SETTINGS[arguments[0]](arguments[1:])
        return
    tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="meshwright",
        description="Say where every axis goes, see what it costs, run it.",
        args=arguments,
        config=(tyro.conf.UseAppendAction,),
        registry=NUMBERS,
    )
