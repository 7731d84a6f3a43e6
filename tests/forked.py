"""Commands of meshwright in processes of their own, forked from one that has imported what they need.

Importing takes two seconds, most of many a command. What is forked has done nothing but import: no
backend of jax is there yet, and threads that libraries started wait for work. So a command finds
what it would find if it were started from a shell; the entry is the same.
"""

import atexit
import dataclasses
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

LONGEST_S = 1200  # ends what hangs; no measure of speed


@dataclasses.dataclass
class Started:
    """A command that runs: its process, and what it printed so far."""

    pid: int
    said: Path
    _status: Path

    def poll(self) -> int | None:
        """The exit status, once it has ended."""
        text = self._status.read_text()
        return int(text) if text.endswith("\n") else None

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


class Commands:
    """Runs `meshwright ARGUMENTS` in the environment of its beginning."""

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        self._wait: Callable[[], object]
        if _imported:
            server, self._orders, self._answers = _forked_server(environment or {})
            self._wait = functools.partial(os.waitpid, server, 0)
            return
        server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment,
        )  # fmt: skip
        assert server.stdin is not None
        assert server.stdout is not None
        self._orders, self._answers, self._wait = server.stdin, server.stdout, server.wait

    def run(self, arguments: Sequence[str], out: Path, errors: Path | None = None) -> int:
        """The exit status; what is printed goes to files, errors to that of the rest or their own."""
        return self._order(arguments, out, errors)

    def run_script(
        self,
        script: Path,
        arguments: Sequence[str],
        out: Path,
        environment: dict[str, str] | None = None,
    ) -> int:
        """The same of `python SCRIPT ARGUMENTS`, with changes to the environment."""
        return self._order(arguments, out, script=str(script), environment=environment)

    def start(self, arguments: Sequence[str], said: Path) -> Started:
        """Run a command beside others; what it prints goes to the file `said`."""
        with tempfile.NamedTemporaryFile(delete=False) as status:
            pid = self._order(arguments, said, status=status.name)
        return Started(pid, said, Path(status.name))

    def _order(
        self, arguments: Sequence[str], out: Path, errors: Path | None = None, **more: object
    ) -> int:
        paths = {"out": str(out.absolute()), "errors": str((errors or out).absolute())}
        order = {"arguments": [*arguments], "folder": os.getcwd()} | paths | more
        print(json.dumps(order), file=self._orders, flush=True)
        answer = self._answers.readline()
        assert answer, "the process that forks commands ended"
        return int(answer)

    def close(self) -> None:
        self._orders.close()
        self._answers.close()
        self._wait()


@functools.cache
def shared_commands() -> Commands:
    """One for all tests of this process."""
    commands = Commands()
    atexit.register(commands.close)
    return commands


_imported = False  # whether this process is forked from one with all imports


def import_all() -> None:
    """Import what commands import when they need it."""
    global _imported
    import orbax.checkpoint  # noqa: F401, imported by the first save

    import meshwright.api  # noqa: F401
    from meshwright.cli.commands import COMMANDS
    from meshwright.cli.train import settings

    for name, command in COMMANDS.items():
        importlib.import_module(f"meshwright.cli.{command.module or name}")
    settings(["tiny"])
    _imported = True
    gc.freeze()


def serve() -> None:
    """Fork for each line of standard input, and print how the child ended, or who it is."""
    for line in sys.stdin:
        order = json.loads(line)
        status = order.pop("status", None)
        child = os.fork()
        if child and status is None:
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        elif child == 0:
            if status is not None:
                _wait_beside(Path(status))
            _become(**order)
            sys.exit()


def _wait_beside(status: Path) -> None:
    """Print the process of a fork; this one waits for it, and writes how it ended."""
    child = os.fork()
    if child:
        print(child, flush=True)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        status.write_text(f"{code}\n")
        os._exit(0)


def _forked_server(environment: dict[str, str]) -> tuple[int, TextIO, TextIO]:
    """A fork of this process, where it takes orders, and where it answers."""
    (orders, give), (take, answers) = os.pipe(), os.pipe()
    server = os.fork()
    if server:
        os.close(orders)
        os.close(answers)
        return server, os.fdopen(give, "w"), os.fdopen(take)
    for here, there in ((orders, 0), (answers, 1)):
        os.dup2(here, there)
    for file in (orders, give, take, answers):
        os.close(file)
    os.environ.update(environment)
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    serve()
    os._exit(0)


def _become(
    arguments: list[str],
    out: str,
    errors: str,
    folder: str,
    script: str | None = None,
    environment: dict[str, str] | None = None,
) -> None:
    signal.alarm(LONGEST_S)
    os.chdir(folder)
    for number, path in enumerate((os.devnull, out, errors)):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.environ.update(environment or {})
    sys.argv = [script or "meshwright", *arguments]
    if script is not None:
        runpy.run_path(script, run_name="__main__")
        return
    from meshwright.cli.main import main

    main()


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, where tests/torch would be found as torch
    sys.modules["forked"] = sys.modules["__main__"]  # for scripts
    import_all()
    serve()
