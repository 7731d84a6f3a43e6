"""Commands of meshwright in processes of their own, forked from one that has imported what they need.

Importing takes two seconds, most of many a command. What is forked has done nothing but import: no
backend of jax is there yet, and threads that libraries started wait for work. So a command finds
what it would find if it were started from a shell; the entry is the same.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


class Commands:
    """Runs `meshwright ARGUMENTS`, one command at a time, in the environment of its beginning."""

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        self._server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment,
        )  # fmt: skip

    def run(self, arguments: Sequence[str], out: Path, errors: Path | None = None) -> int:
        """The exit status; what is printed goes to files, errors to that of the rest or their own."""
        order = [[*arguments], str(out.absolute()), str((errors or out).absolute()), os.getcwd()]
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps(order), file=self._server.stdin, flush=True)
        status = self._server.stdout.readline()
        assert status, f"the process that forks commands ended with {self._server.wait()}"
        return int(status)

    def close(self) -> None:
        self._server.communicate()


def serve() -> None:
    """Fork for each line of standard input, and print how the child ended."""
    sys.path.pop(0)  # this folder, where tests/torch would be found as torch
    import orbax.checkpoint  # noqa: F401, imported by the first save

    import meshwright.cli.commands  # noqa: F401, imported by every command
    from meshwright.cli.main import main

    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            _become(*order)
            main()
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _become(arguments: list[str], out: str, errors: str, folder: str) -> None:
    signal.alarm(1200)  # seconds; ends what hangs
    os.chdir(folder)
    for number, path in enumerate((os.devnull, out, errors)):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.argv = ["meshwright", *arguments]


if __name__ == "__main__":
    serve()
